"""The table of a sweep, a row for each design point: written as CSV or JSON, and read back."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from replay_sim.explore.sweep_rows import COLUMNS, Row
from replay_sim.whole_file import write_whole

SUFFIXES = (".csv", ".json")
SIZES = ("cudagraph_capture_sizes", "decoder_replay_cudagraph_capture_sizes")
WORDS = ("config", "workload", "cudagraph_mode", "plan", "source", "outside", "error")
"""The columns of text."""


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
    """The table of a file that `write_table` wrote, as `table_of` makes it; a failed point's sizes may be empty."""
    check_suffix(path)
    if path.suffix == ".json":
        return table_of(json.loads(path.read_text(encoding="utf-8")))
    figures = [name for name in COLUMNS if name not in (*WORDS, *SIZES)]
    missing = {name: [""] for name in figures}
    table = pd.read_csv(path, keep_default_na=False, na_values=missing, float_precision="round_trip")
    for name in SIZES:
        table[name] = [[int(size) for size in str(text).split()] for text in table[name]]
    return table[list(COLUMNS)]


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a table, one column a name of COLUMNS."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))
