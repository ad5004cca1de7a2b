"""The parts that a report's sections are made of, as plain values: words, tables, drawings and text to paste."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import pandas as pd
import plotly.graph_objects as go

MIB = 1 << 20
MOST_ROWS = 20
MOST_LISTED = 60
NUMBER = re.compile(r"(?:[+−-]?[\d,]+(?:\.\d+)?(?: ?%| MiB| ms| s)?|–|none)")
"""A cell that is set to the right."""


@attrs.frozen
class Words:
    """A paragraph; `is_source` sets it small, and `command`, if any, follows it as code."""

    kind: ClassVar[str] = "words"
    text: str
    command: str = ""
    is_source: bool = False


@attrs.frozen
class Table:
    """A table as text: its title, header, rows, and how many rows are left out; without a header it lists facts."""

    kind: ClassVar[str] = "table"
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    hidden: int = 0

    @property
    def right(self) -> list[bool]:
        """For each column whether all of its cells are numbers."""
        columns = zip(*self.rows, strict=True) if self.rows else [[] for _ in self.header]
        return [bool(column) and all(NUMBER.fullmatch(cell) for cell in column) for column in columns]


@attrs.frozen
class Beside:
    """Tables next to each other."""

    kind: ClassVar[str] = "beside"
    tables: Sequence[Table]


@attrs.frozen(eq=False)
class Drawing:
    """A figure, and the name of its element."""

    kind: ClassVar[str] = "drawing"
    name: str
    figure: go.Figure

    @property
    def html(self) -> str:
        """The figure as an element; it needs plotly.js in the page."""
        config = {"displaylogo": False, "responsive": True}
        element = f"figure-{self.name}"
        return str(self.figure.to_html(full_html=False, include_plotlyjs=False, div_id=element, config=config))

    @property
    def caption(self) -> str:
        """The source of its numbers, as the figure shows it."""
        (caption,) = (note.text for note in self.figure.layout.annotations if note.name == "caption")
        return str(caption).replace("<br>", " ")


@attrs.frozen
class Pasted:
    """Text to copy."""

    kind: ClassVar[str] = "pasted"
    text: str


@attrs.frozen
class Heading:
    """A heading within a section."""

    kind: ClassVar[str] = "heading"
    text: str


Part = Words | Table | Beside | Drawing | Pasted | Heading


@attrs.frozen
class Section:
    """A section of the page: the name of its anchor, its title, and its parts in order."""

    name: str
    title: str
    parts: Sequence[Part]


def cell(key: str, value: Any) -> str:
    """A value as text, in the unit that its key names."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "none"
    if key == "reachable_rows":
        return ", ".join(f"{low:,} to {high:,}" for low, high in value) or "none"
    if isinstance(value, list):
        return listed(value, ", ")
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / MIB:,.1f} MiB"
    if key in ("mean_padding", "worst_padding"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def listed(values: Sequence[Any], between: str) -> str:
    """The values in a row, of very many the first and the last with their count."""
    if len(values) <= MOST_LISTED:
        return between.join(map(str, values)) or "none"
    return f"{between.join(map(str, values[:10]))}{between}… {values[-1]} ({len(values)} in all)"


def frame_table(title: str, frame: pd.DataFrame) -> Table:
    """A data frame as a table, its index first if it has a name; a column of fractions has equally many decimals."""
    frame = frame.reset_index() if frame.index.name else frame
    columns = [_column(str(key), frame[key].tolist()) for key in frame.columns]
    return Table(title, [str(key) for key in frame.columns], list(zip(*columns, strict=True)))


def _column(key: str, values: Sequence[Any]) -> list[str]:
    known = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    decimals = next((digits for digits in range(3) if all(round(one, digits) == one for one in known)), None)
    if not known or decimals is None:
        return [cell(key, value) for value in values]
    return [
        f"{one:,.{decimals}f}" if isinstance(one, float) and math.isfinite(one) else cell(key, one) for one in values
    ]


def sentence(words: str) -> str:
    """The words with a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}" + ("" if words.endswith(".") else ".")
