"""The table of a sweep, a row for each design point: written as CSV or JSON, and read back."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from replay_sim.explore.sweep_rows import COLUMNS, SIZES, Row
from replay_sim.whole_file import write_whole

SUFFIXES = (".csv", ".json")
WORDS = ("config", "workload", "cudagraph_mode", "plan", "source", "outside", "error")
"""The columns of text."""


def check_out(path: Path) -> None:
    """Raise ValueError for what no table can be written to, before anything is swept."""
    check_suffix(path)
    if path.is_dir():
        raise ValueError(f"out: {str(path)!r} is not allowed; it is a folder, and must be a file")


def check_suffix(path: Path) -> None:
    """Raise ValueError for a file that is neither CSV nor JSON by its name."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"out: {str(path)!r} is not allowed; it must end in {' or '.join(SUFFIXES)}")


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows whole or not at all: CSV, where sizes are separated by spaces, or a JSON list of objects.

    Figures are as exact in both: the shortest text that is the same float.
    """
    check_suffix(path)
    if path.suffix == ".json":
        write_whole(path, json.dumps(list(rows)) + "\n")
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([" ".join(map(str, row[name] or ())) if name in SIZES else row[name] for name in COLUMNS])
    write_whole(path, text.getvalue())


def read_table(path: Path) -> pd.DataFrame:
    """The table of a file that `write_table` wrote, as `table_of` makes it of the rows."""
    check_suffix(path)
    text = path.read_text(encoding="utf-8")
    return table_of(
        json.loads(text) if path.suffix == ".json" else [_row(r) for r in csv.DictReader(io.StringIO(text))]
    )


def _row(texts: dict[str, str]) -> Row:
    """The row of a CSV's line; a failed point has no sizes and no figures."""
    row: Row = {}
    for name, text in texts.items():
        if name in SIZES:
            row[name] = None if texts["error"] else [int(size) for size in text.split()]
        else:
            row[name] = text if name in WORDS else json.loads(text or "null")
    return row


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a table, one column a name of COLUMNS."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))
