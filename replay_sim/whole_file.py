"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
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
    """The name is known before the file is there, so that an interrupt at any point leaves none.

    It is short, so that any name which a file can have can be written.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
