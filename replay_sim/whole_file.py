"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 text to `path`, making its folder; a reader sees the old file or the new one, never a part.

    Raises OSError that names `path`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def _write(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
