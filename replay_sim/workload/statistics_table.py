"""Reader for the CUDA-graph statistics table that a running server logs, in markdown and among other lines."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import attrs

from replay_sim.batch.dispatch import HEADERS, CudagraphMode
from replay_sim.workload.lines import Path, check_count, read_lines
from replay_sim.workload.trace import TraceError

MODEL_GRAPHS, REPLAY_GRAPHS = "model", "replay"
MAX_COUNT = 1 << 53
LOOKED_AT = 10_000
MODES = tuple(mode.value for mode in CudagraphMode)
TITLE = re.compile(r"\*\*(Model|Replay) graphs\*\*$")
CUT = re.compile(r"\d more rows, \d{1,18} dispatches, not shown\.$")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
RULE = re.compile(r":?-+:?$")
GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3}){1,6}$")
"""A number whose thousands are separated."""


@attrs.frozen
class StatisticsRow:
    """A row of the table: tokens (rows of the replay batch for replay graphs), without and with pads, and a count.

    runtime_mode: NONE, PIECEWISE or FULL. graphs: `model`, or `replay` under that title.
    """

    unpadded: int
    padded: int
    runtime_mode: str
    count: int
    graphs: str = MODEL_GRAPHS


@attrs.frozen
class StatisticsTable:
    """The rows of all tables of a file, in order of appearance; equal ones of two intervals both stand (issue 6)."""

    rows: tuple[StatisticsRow, ...]

    def histogram(self, runtime_mode: str | None = None, graphs: str = MODEL_GRAPHS) -> Counter[int]:
        """Dispatches by unpadded size, of one mode or of all; ValueError for a mode or graphs that do not exist."""
        for name, value, known in (
            ("runtime_mode", runtime_mode, (None, *MODES)),
            ("graphs", graphs, (MODEL_GRAPHS, REPLAY_GRAPHS)),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(map(str, known))}")
        counts: Counter[int] = Counter()
        for row in self.rows:
            if row.graphs == graphs and runtime_mode in (None, row.runtime_mode):
                counts[row.unpadded] += row.count
        return counts


def read_statistics(path: Path, max_num_batched_tokens: int | None = None) -> StatisticsTable:
    """All rows of a file that holds such tables; TraceError names line, field and what was expected.

    No step has more than `max_num_batched_tokens` tokens, and no replay batch more rows; None for no bound. What a
    logger writes before a row is left out, and lines outside of the tables are skipped. A table says whose graphs it
    counts by the titles that DispatchTable prints; without one they are the model's.
    """
    rows = tuple(_rows(path, max_num_batched_tokens))
    if not rows:
        raise TraceError(path, 1, "file", f"a table with the columns {' | '.join(HEADERS)}, and rows", "none")
    return StatisticsTable(rows)


def has_statistics(path: Path) -> bool:
    """Whether one of the first LOOKED_AT lines of the file is the header of such a table."""
    return any(_is_header(_cells(text)) for _, text in islice(read_lines(path), LOOKED_AT))


def _rows(path: Path, budget: int | None) -> Iterator[StatisticsRow]:
    """The rows of all tables; one ends with an empty line or a title, not with a line that another process logged."""
    graphs, inside, begun = MODEL_GRAPHS, False, False
    for number, text in read_lines(path):
        text = ESCAPE.sub("", text).rstrip()
        cells = _cells(text)
        if title := TITLE.search(text):
            graphs, inside = title[1].lower(), False
        elif _is_header(cells):
            inside = begun = True
        elif begun and CUT.search(text):
            raise TraceError(path, number, "line", "a table that is whole", text)
        elif text.count("|") < 2 and not text.startswith("|"):
            inside = inside and bool(text) and "**" not in text
        elif cells and all(map(RULE.match, cells)):
            continue
        elif inside or (begun and len(cells) == len(HEADERS) and cells[3] in MODES):
            yield _row(path, number, text, cells, graphs, budget)


def _cells(text: str) -> list[str]:
    """The last cells of a line that ends with a bar, at most as many as the table has columns."""
    if not text.rstrip().endswith("|"):
        return []
    cells = [cell.strip() for cell in text.rstrip().split("|")[1:-1]]
    return cells[-len(HEADERS) :]


def _is_header(cells: list[str]) -> bool:
    """Whether these are the table's column names."""
    return [cell.lower() for cell in cells] == [name.lower() for name in HEADERS]


def _row(path: Path, number: int, text: str, cells: list[str], graphs: str, budget: int | None) -> StatisticsRow:
    """A checked row, of no more than `budget` tokens."""
    if len(cells) != len(HEADERS):
        raise TraceError(path, number, "line", f"{len(HEADERS)} cells between bars", text)
    unpadded, padded, paddings = (
        check_count(path, number, name, _ungrouped(cell), 0) for name, cell in zip(HEADERS[:3], cells[:3], strict=True)
    )
    if budget is not None and unpadded > budget:
        expected = f"at most max_num_batched_tokens {budget} of the config that is tuned"
        raise TraceError(path, number, HEADERS[0], expected, unpadded)
    if padded < unpadded:
        raise TraceError(path, number, HEADERS[1], f"at least the unpadded {unpadded}", padded)
    if paddings != padded - unpadded:
        raise TraceError(path, number, HEADERS[2], f"{padded - unpadded}, padded less unpadded", paddings)
    if cells[3] not in MODES:
        raise TraceError(path, number, HEADERS[3], f"one of {', '.join(MODES)}", cells[3])
    count = check_count(path, number, HEADERS[4], _ungrouped(cells[4]), 1, MAX_COUNT)
    return StatisticsRow(unpadded, padded, cells[3], count, graphs)


def _ungrouped(cell: str) -> str:
    """A number without the separators of its thousands; other text as it is."""
    return cell.replace(",", "") if GROUPED.match(cell) else cell
