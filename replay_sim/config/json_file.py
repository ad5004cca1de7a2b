"""Reads a file that must hold one JSON object, and refuses everything that it cannot mean."""

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from replay_sim.config.errors import shown


class JsonFileError(ValueError):
    """A file that is not one JSON object; the message is one line that says why, without the file's name."""


def read_object(path: Path, largest_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the regular file at `path`, of UTF-8 text and at most `largest_bytes`.

    Raises JsonFileError for anything else: keys given twice, NaN and infinities included.
    """
    return parse_object(_read_bytes(path, largest_bytes))


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that these bytes of UTF-8 text are; raises JsonFileError as `read_object` does."""
    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except JsonFileError:
        raise
    except RecursionError:
        raise JsonFileError("unreadable JSON: nested too deeply") from None
    except ValueError as error:
        raise JsonFileError(f"unreadable JSON: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(document, dict):
        raise JsonFileError(f"unreadable JSON: {shown(document)} must be an object")
    return document


def _read_bytes(path: Path, largest_bytes: int) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise JsonFileError("cannot be read: it must be a regular file")
        with path.open("rb") as file:
            data = file.read(largest_bytes + 1)
    except JsonFileError:
        raise
    except OSError as error:
        raise JsonFileError(f"cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise JsonFileError("cannot be read: not a path") from None
    if len(data) > largest_bytes:
        raise JsonFileError(f"cannot be read: it must be at most {largest_bytes} bytes")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise JsonFileError(f"key {shown(key)} is given twice; it must be given once")
        result[key] = value
    return result


def _refuse_constant(constant: str) -> NoReturn:
    raise JsonFileError(f"unreadable JSON: {constant} is not a JSON number")
