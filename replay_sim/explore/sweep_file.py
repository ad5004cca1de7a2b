"""The file of a sweep's finished points: a line of JSON each, on disk before the next, from which a sweep goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from replay_sim.explore.sweep_rows import Row

FORM = 1
"""Of the lines; another number is another form."""


class PointsFile:
    """Finished points of one sweep, told from others by its fingerprint; `rows` are all that it holds, by point.

    The first line says which sweep it is. Rows are appended in one write and synced, so that what a killed process
    leaves is whole lines and at most one torn one at the end, which is cut off when the file is taken up again. Left
    without a row, the file is deleted. Raises ValueError for a file that is there and not to be resumed, of another
    sweep, or that nobody here wrote.
    """

    def __init__(self, path: Path, fingerprint: str, *, resume: bool) -> None:
        self.path = path
        self.rows: dict[int, Row] = {}
        head = _line({"sweep": fingerprint, "form": FORM})
        if resume and path.exists():
            end = self._read(head)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND)
            os.ftruncate(self._handle, end)
            if not end:
                self._write(head)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise ValueError(
                f"{path}: holds points of a sweep that did not end; resume it, or delete the file"
            ) from None
        self._write(head)

    def append(self, rows: Sequence[Row]) -> None:
        """Add finished points; they are on disk when this returns."""
        self._write(b"".join(map(_line, rows)))
        self.rows |= {row["point"]: row for row in rows}

    def remove(self) -> None:
        """Delete the file, once the table that was made of it is written."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)
        if not self.rows:
            self.path.unlink()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._handle, left) :]
        os.fsync(self._handle)

    def _read(self, head: bytes) -> int:
        """Take up the rows; the bytes of the whole lines."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if not end and head.startswith(data):
            return 0
        first, *lines = data[:end].splitlines(keepends=True) or [data]
        if first != head:
            raise ValueError(f"{self.path}: holds points of another sweep, model or version; delete it to start anew")
        for number, line in enumerate(lines, 2):
            row = _parsed(line)
            if row is None or row["point"] in self.rows:
                raise ValueError(f"{self.path}: line {number} is no new finished point; delete the file to start anew")
            self.rows[row["point"]] = row
        return end


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes) -> Row | None:
    """The row of a line; None if it is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("point"), int) else None
