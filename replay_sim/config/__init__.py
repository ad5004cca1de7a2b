"""Serving settings, decoder shapes and the bundled presets of both."""

from replay_sim.config.errors import ConfigError
from replay_sim.config.loading import config_from_mapping, load_config
from replay_sim.config.presets import DEFAULT_PRESET, preset_names
from replay_sim.config.serving import ServingConfig
from replay_sim.config.shapes import FLASH_RANK, SHAPES, TINY, DecoderShape

__all__ = [
    "DEFAULT_PRESET",
    "FLASH_RANK",
    "SHAPES",
    "TINY",
    "ConfigError",
    "DecoderShape",
    "ServingConfig",
    "config_from_mapping",
    "load_config",
    "preset_names",
]
