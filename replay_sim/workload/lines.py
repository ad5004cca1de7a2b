"""What the trace readers share: bounded lines, CSV columns, checked fields, requests in order."""

import csv
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from replay_sim.workload.trace import TraceError, TraceRequest

MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 2 << 30
MAX_LINES = 5_000_000
"""Blank ones and the lines between the tables of a log included."""
MAX_REQUESTS = 2_000_000
MAX_TOKENS = 1 << 24

Path = str | os.PathLike[str]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a regular file that are not blank, with their numbers from 1, one in memory at a time.

    TraceError for a file of another kind, which might never end or give nothing a second time, or beyond the bounds.
    """
    try:
        _check_file(path)
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number > MAX_LINES:
                    raise TraceError(path, number, "file", f"at most {MAX_LINES} lines", "one more")
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(path, number, "line", f"at most {MAX_LINE_BYTES} bytes", line[:40])
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise TraceError(path, number, "line", "UTF-8 text", line[:40]) from error
                if text.strip():
                    yield number, text
    except OSError as error:
        raise TraceError(path, 1, "file", "a readable file", error.strerror) from error


def _check_file(path: Path) -> None:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise TraceError(path, 1, "file", "a regular file", kind)
    if found.st_size > MAX_FILE_BYTES:
        raise TraceError(path, 1, "file", f"at most {MAX_FILE_BYTES} bytes", found.st_size)


def csv_fields(path: Path, number: int, text: str) -> list[str]:
    """The stripped fields of one CSV line; TraceError if its quotes do not match."""
    try:
        return [field.strip() for field in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise TraceError(path, number, "line", "a line of comma-separated fields", text) from error


def read_columns(path: Path, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The named columns of a CSV file, line by line; TraceError for a missing column or field, or one given twice."""
    lines = read_lines(path)
    number, text = next(lines, (1, ""))
    header = csv_fields(path, number, text) if text else []
    for name in names:
        if name not in header:
            raise TraceError(path, number, "header", f"a column {name}", text)
        if header.count(name) > 1:
            raise TraceError(path, number, "header", f"one column {name}", text)
    indices = [header.index(name) for name in names]
    for number, text in lines:
        fields = csv_fields(path, number, text)
        if len(fields) != len(header):
            raise TraceError(path, number, "line", f"{len(header)} fields like the header", text)
        yield number, [fields[index] for index in indices]


def check_count(path: Path, number: int, field: str, value: object, minimum: int, maximum: int = MAX_TOKENS) -> int:
    """A number, of tokens if not said otherwise, from a field's text or JSON value; TraceError out of bounds."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(maximum)):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise TraceError(path, number, field, f"an integer from {minimum} to {maximum}", value)
    return value


def collect(path: Path, requests: Iterable[tuple[int, TraceRequest]], max_requests: int) -> tuple[TraceRequest, ...]:
    """All requests; TraceError for none, too many, or one that arrives before the one above it."""
    collected: list[TraceRequest] = []
    for number, request in requests:
        if len(collected) == max_requests:
            raise TraceError(path, number, "file", f"at most {max_requests} requests", "one more")
        if collected and request.arrival_s < collected[-1].arrival_s:
            expected = f"an arrival at or after {collected[-1].arrival_s} s, that of the line above"
            raise TraceError(path, number, "arrival", expected, request.arrival_s)
        collected.append(request)
    if not collected:
        raise TraceError(path, 1, "file", "at least one request", "none")
    return tuple(collected)
