"""A pytest plugin: Hypothesis stops at the first failure that it finds, as no one reads it."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=(Phase.explicit, Phase.generate), database=None, print_blob=False)
settings.load_profile("unshrunk")
