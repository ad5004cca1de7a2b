"""The proof of row selection: the reference and the device's metadata against the plain rule, on random batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest

import attrs
import numpy as np
import pandas as pd
import torch

from replay_sim.batch.metadata import BatchMetadataBuffers, BlockTables, ReplayMetadataBuffers
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import select_rows
from replay_sim.explore.kept_rows import dealt_block_tables
from replay_sim.explore.plain_rows import PlainRow, PlainRows, plain_rows

WINDOWS = (1, 3, 8)
MAX_REQS, MAX_PADS, BLOCK_SIZE = 6, 9, 4
PAD = PlainRow(row=-1, position=0, slot=-1, request=-1, window_start_first=0, window_start_rest=0)
"""What the metadata of a pad row says: slot -1 and no request (S8)."""
ROW_COLUMNS = {
    "rows": "row",
    "positions": "position",
    "slot_mapping": "slot",
    "request_of_row": "request",
    "window_start_first": "window_start_first",
    "window_start_rest": "window_start_rest",
}
"""The replay metadata's tensors with a value a row, and the plain row's names for them."""
CLAUSES = {
    "reference: rows": "S1, S2",
    "reference: query_start_loc": "S3",
    "reference: window_starts": "S4, S7",
    "device: rows": "S2, S8, S9",
    "device: positions": "S3, S9",
    "device: slot_mapping": "S3, S8, S9",
    "device: request_of_row": "S8, S9",
    "device: window_start_first": "S4, S9",
    "device: window_start_rest": "S4, S9",
    "device: query_start_loc": "S3, S9",
    "device: num_rows": "S8, S9",
}


def _any(holds: Callable[[Request, int], bool]) -> Callable[[Batch, int], bool]:
    return lambda batch, window: any(holds(request, window) for request in batch.requests)


def _is_prefill(request: Request) -> bool:
    return request.phase is Phase.PREFILL


COVERED: dict[str, Callable[[Batch, int], bool]] = {
    "no request": lambda batch, _: not batch.num_reqs,
    "a request of no rows": _any(lambda request, _: not request.query_len),
    "a one-token prompt": _any(lambda request, _: _is_prefill(request) and request.query_len == 1),
    "a prefill of window - 1": _any(lambda request, window: _is_prefill(request) and request.query_len == window - 1),
    "a prefill of window": _any(lambda request, window: _is_prefill(request) and request.query_len == window),
    "a prefill of window + 1": _any(lambda request, window: _is_prefill(request) and request.query_len == window + 1),
    "a later chunk": _any(lambda request, _: _is_prefill(request) and request.computed > 0),
    "a window that starts late": _any(lambda request, _: request.window_start > 0),
    "a decode longer than the window": _any(
        lambda request, window: not _is_prefill(request) and request.query_len > window
    ),
    "a prompt whose rows are all read": _any(
        lambda request, window: _is_prefill(request) and request.all_rows_read and request.query_len > window
    ),
    "no prefill that trims": lambda batch, window: not select_rows(batch, window).trims,
}
"""What ordinary input may hold (S1, S6, S7), and whether a batch of a window holds it."""


@attrs.frozen
class RowsProof:
    """How many batches were compared, by how many values, how many values differ, and what the batches held."""

    batches: int
    rows: int
    kept: int
    pads: int
    compared: dict[str, int]
    differing: dict[str, int]
    covered: dict[str, int]

    def table(self) -> pd.DataFrame:
        """A line for each column of values: its clauses, how many values were compared and how many differ."""
        lines = [(CLAUSES[name], count, self.differing[name]) for name, count in self.compared.items()]
        return pd.DataFrame(lines, index=list(self.compared), columns=["clause", "values compared", "differ"])

    def covered_table(self) -> pd.DataFrame:
        """How many of the batches held each kind of ordinary input (S6)."""
        return pd.DataFrame({"batches": self.covered}).rename_axis("holds")


def random_batch(rng: np.random.Generator, window: int) -> Batch:
    """Up to MAX_REQS requests, their lengths around the window more often than not, and none at times (S6)."""
    return Batch(_random_request(rng, window) for _ in range(rng.integers(0, MAX_REQS + 1)))


def _random_request(rng: np.random.Generator, window: int) -> Request:
    near = (0, 1, window - 1, window, window + 1, 2 * window, 3 * window + 2)
    computed = int(rng.choice((0, 1, window, int(rng.integers(0, 4 * window)))))
    return Request(
        query_len=int(rng.choice(near) if rng.random() < 0.6 else rng.integers(0, 4 * window)),
        computed=computed,
        phase=Phase.DECODE if rng.random() < 0.4 else Phase.PREFILL,
        all_rows_read=bool(rng.random() < 0.2),
        window_start=int(rng.choice((0, max(0, computed - window), int(rng.integers(0, computed + 1))))),
    )


def prove_rows(batches: int = 1000, *, device: torch.device | None = None, seed: int = 0) -> RowsProof:
    """Compare `batches` random batches in turn of every window in WINDOWS, each with up to MAX_PADS pads (S1-S9).

    The buffers are made once for each window, so what an earlier batch left in them must not show.
    """
    rng = np.random.default_rng(seed)
    buffers = {window: _buffers(window, device or torch.device("cpu")) for window in WINDOWS}
    counts = {"rows": 0, "kept": 0, "pads": 0}
    compared: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    covered = Counter(dict.fromkeys(COVERED, 0))
    for index in range(batches):
        window = WINDOWS[index % len(WINDOWS)]
        batch, pads = random_batch(rng, window), int(rng.integers(0, MAX_PADS + 1))
        tables = dealt_block_tables(batch, BLOCK_SIZE)
        expected = plain_rows(batch, window, tables, BLOCK_SIZE)
        for name, found, right in _columns(batch, tables, expected, pads, *buffers[window]):
            compared[name] += len(right)
            differing[name] += sum(one != other for one, other in zip_longest(found, right))
        covered.update(name for name, holds in COVERED.items() if holds(batch, window))
        for name, count in zip(counts, (batch.num_tokens, len(expected.rows), pads), strict=True):
            counts[name] += count
    return RowsProof(batches, **counts, compared=dict(compared), differing=dict(differing), covered=dict(covered))


def _buffers(window: int, device: torch.device) -> tuple[BatchMetadataBuffers, ReplayMetadataBuffers]:
    longest = 4 * window + 2
    rows = MAX_REQS * longest + MAX_PADS
    batch = BatchMetadataBuffers(
        max_rows=rows,
        max_num_seqs=MAX_REQS,
        max_blocks=-(-2 * longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        window=window,
        device=device,
    )
    return batch, ReplayMetadataBuffers(max_rows=rows, max_num_seqs=MAX_REQS, device=device)


def _columns(
    batch: Batch,
    tables: BlockTables,
    expected: PlainRows,
    pads: int,
    source: BatchMetadataBuffers,
    target: ReplayMetadataBuffers,
) -> Iterable[tuple[str, list[int], list[int]]]:
    """Each column by name, as it was found and as it is by the plain rule."""
    reference = select_rows(batch, source.window)
    yield "reference: rows", reference.rows.tolist(), [row.row for row in expected.rows]
    yield "reference: query_start_loc", reference.query_start_loc.tolist(), list(expected.query_start_loc)
    yield "reference: window_starts", reference.window_starts.tolist(), list(expected.window_starts)
    source.write(batch, tables, np.zeros(batch.num_tokens, np.int32), batch.num_tokens)
    padded = len(expected.rows) + pads
    target.write(batch, source, padded)
    for name, attribute in ROW_COLUMNS.items():
        right = [getattr(row, attribute) for row in (*expected.rows, *[PAD] * pads)]
        yield f"device: {name}", getattr(target, name)[:padded].tolist(), right
    starts = list(expected.query_start_loc)
    starts += starts[-1:] * (MAX_REQS + 1 - len(starts))
    yield "device: query_start_loc", target.query_start_loc.tolist(), starts
    yield "device: num_rows", target.num_rows.tolist(), [len(expected.rows)]
