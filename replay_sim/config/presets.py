"""The bundled serving configs: real ones that others published, each with its source."""

from pathlib import Path

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "b200-tp4-c8"
"""What the name `default` stands for: 16 requests, 8,192 tokens a step, model graphs up to 8,190 tokens, so
that prefill steps break out of graphs, and replay sizes left to the rule."""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted, `default` among them."""
    return sorted(["default", *(path.stem for path in PRESETS.glob("*.json"))])


def preset_path(name: str) -> Path | None:
    """Return the file of the preset `name`, or None if there is no such preset."""
    if name not in preset_names():
        return None
    return PRESETS / f"{DEFAULT_PRESET if name == 'default' else name}.json"
