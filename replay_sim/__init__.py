"""Design decoder replay for LLM serving engines: plan it, run it, measure it."""

__version__ = "0.1.0"
