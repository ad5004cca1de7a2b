"""Reading a serving config from a preset's name or a JSON file, refusing everything that it cannot mean."""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs

from replay_sim.config.errors import ConfigError, nearest, shown
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
        ConfigError: an unknown key (named with the nearest known one), or a value that is not allowed.
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
                f"config: {shown(text)} is no preset and no file; presets are {', '.join(known)}"
                f"{nearest(text, known)}"
            )
    try:
        return config_from_mapping(_read_object(path))
    except ConfigError as error:
        raise ConfigError(f"{_plain(text)}: {error}") from None


def _looks_like_path(text: str) -> bool:
    return os.sep in text or text.endswith(".json") or ("\0" not in text and os.path.lexists(text))


def _plain(text: str) -> str:
    return text if text.isascii() and text.isprintable() and len(text) <= 200 else shown(text)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the regular file at `path`; ConfigError if it holds anything else."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError("cannot be read: it must be a regular file")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError("cannot be read: not a path") from None
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigError(f"cannot be read: it must be at most {LARGEST_FILE_BYTES} bytes")
    try:
        document = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("unreadable JSON: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"unreadable JSON: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"unreadable JSON: {shown(document)} must be an object of settings")
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"key {shown(key)} is given twice; it must be given once")
        result[key] = value
    return result


def _refuse_constant(constant: str) -> NoReturn:
    raise ConfigError(f"unreadable JSON: {constant} is not a JSON number")
