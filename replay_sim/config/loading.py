"""Reading a serving config from a preset's name or a JSON file, refusing everything that it cannot mean."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from replay_sim.config.errors import ConfigError, nearest, shown
from replay_sim.config.json_file import JsonFileError, read_object
from replay_sim.config.presets import preset_names, preset_path
from replay_sim.config.serving import ServingConfig

LARGEST_FILE_BYTES = 1 << 20
DESCRIPTIVE_KEYS = ("id", "name", "note", "source")
KEYS_NULL_MEANS_NONE = ("decoder_replay_trim_threshold",)


def config_from_mapping(settings: Mapping[str, Any]) -> ServingConfig:
    """Return the config that `settings`, in the engine's key names, describe.

    A null is a setting that is not set, but for `decoder_replay_trim_threshold`, where it means never. The
    keys of `DESCRIPTIVE_KEYS` say where the settings come from and are not looked at.

    Raises:
        ConfigError: an unknown key (named with the nearest known one, if one is alike), or a value that is not allowed.
    """
    known = [field.name for field in attrs.fields(ServingConfig)]
    for key in settings:
        if key not in known and key not in DESCRIPTIVE_KEYS:
            hint = nearest(key, known) if isinstance(key, str) else ""
            raise ConfigError(f"unknown key {shown(key)}{hint}")
    return ServingConfig(
        **{
            key: value
            for key, value in settings.items()
            if key in known and (value is not None or key in KEYS_NULL_MEANS_NONE)
        }
    )


def load_config(name_or_path: str | Path) -> ServingConfig:
    """Return the preset of that name, or else the config in the JSON file at that path.

    Raises:
        ConfigError: no such preset or file, a file that is not one JSON object of at most 1 MiB, or bad
            settings; the message names the file.
    """
    text = os.fspath(name_or_path)
    path = preset_path(text)
    if path is None:
        path = Path(text)
        if not _looks_like_path(text):
            known = preset_names()
            raise ConfigError(
                f"config: {shown(text)} is no preset and no file; presets are {', '.join(known)}{nearest(text, known)}"
            )
    try:
        return config_from_mapping(read_object(path, LARGEST_FILE_BYTES))
    except (ConfigError, JsonFileError) as error:
        raise ConfigError(f"{_plain(text)}: {error}") from None


def _looks_like_path(text: str) -> bool:
    return os.sep in text or text.endswith(".json") or ("\0" not in text and os.path.lexists(text))


def _plain(text: str) -> str:
    return text if text.isascii() and text.isprintable() and len(text) <= 200 else shown(text)
