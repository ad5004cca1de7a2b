"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, to `path`, making its folder.

    A reader sees the old file or the new one, never a part. Raises OSError that names `path`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
