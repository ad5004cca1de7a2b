"""The file of a sweep's finished points: a line of JSON each, on disk before the next, from which a sweep goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from replay_sim.config.json_file import JsonFileError, parse_object
from replay_sim.explore.sweep_rows import Row

FORM = 2
"""Of the lines; another number is another form."""
MAX_LINE_BYTES = 1 << 20


class PointsFile:
    """Finished points of one sweep, told from others by its fingerprint; `rows` are all that it holds, by point.

    The first line says which sweep it is. Rows are appended in one write and synced, so that what a killed process
    leaves is whole lines and at most one torn one at the end, which is cut off when the file is taken up again. A row
    that `is_row` denies is none of this sweep. Left without a row, the file is deleted. Raises ValueError for a file
    that is there and not to be resumed, of another sweep, or that nobody here wrote, and OSError that names the file.
    """

    def __init__(
        self, path: Path, fingerprint: Mapping[str, str], is_row: Callable[[Row], bool], *, resume: bool
    ) -> None:
        self.path = path
        self._is_row = is_row
        self.rows: dict[int, Row] = {}
        self._fingerprint = dict(fingerprint)
        head = _line({"sweep": self._fingerprint, "form": FORM})
        with _named(path):
            there = path.exists()
            end = self._read(head) if there else 0
            if there and not resume:
                held = f"holds {len(self.rows):,} points of this sweep, which did not end; --resume goes on with them"
                if not path.stat().st_size:
                    held = "is empty; --resume takes it for the finished points"
                raise ValueError(f"{path}: {held}, or delete the file")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | (0 if there else os.O_CREAT | os.O_EXCL), 0o644)
            os.ftruncate(self._handle, end)
        if not end:
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
        with _named(self.path):
            while left:
                left = left[os.write(self._handle, left) :]
            os.fsync(self._handle)

    def _read(self, head: bytes) -> int:
        """Take up the rows, a line in memory at a time; the bytes of the whole lines."""
        if not self.path.is_file():
            raise ValueError(f"out: {self.path} cannot hold the finished points: it must be a regular file")
        with self.path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES)
            if first != head and head.startswith(first):
                return 0
            if first != head:
                raise ValueError(f"{self.path}: {self._why_foreign(first)}")
            number, end = 1, len(head)
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                number, end = number + 1, end + len(line)
                row = _parsed(line) or {}
                if not self._is_row(row) or row["point"] in self.rows:
                    raise ValueError(
                        f"{self.path}: line {number} is no finished point of this sweep, or one that a line above is; "
                        "delete the file to start anew"
                    )
                self.rows[row["point"]] = row
        return end

    def _why_foreign(self, first: bytes) -> str:
        """What another first line than this sweep's says of the file, and what to do about it."""
        head = _parsed(first)
        if head is None or not isinstance(head.get("sweep"), dict | str):
            return "holds no points of a sweep; name another file as out, or move this one away"
        theirs = head["sweep"]
        if head.get("form") != FORM or not isinstance(theirs, dict):
            return "holds points in the form of another version of this package; delete the file to start anew"
        other = [name for name, part in self._fingerprint.items() if theirs.get(name) != part]
        return (
            f"holds points of a sweep that differs from this one in {', '.join(other)}; go on with that one, name "
            "another file as out, or delete this file"
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file and the option in the errors of the operating system."""
    try:
        yield
    except OSError as error:
        raise OSError(f"out: {path} cannot be written: {error.strerror or error}") from error


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is none."""
    try:
        return parse_object(line)
    except JsonFileError:
        return None
