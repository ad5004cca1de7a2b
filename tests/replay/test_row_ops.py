"""The row operations as the rest of the system calls them, on the CPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from replay_sim.replay import row_ops

ROWS, BUFFER_ROWS, WIDTH = 6, 8, 4


def gathered(kept: list[int], padded: int, index_rows: int = BUFFER_ROWS) -> torch.Tensor:
    """A buffer of sevens after a gather of those rows of 0, 1, 2, ..."""
    values = torch.arange(1.0, ROWS * WIDTH + 1).view(ROWS, WIDTH)
    buffer = torch.full((BUFFER_ROWS, WIDTH), 7.0)
    rows = torch.full((index_rows,), -1, dtype=torch.int64)
    rows[: len(kept)] = torch.tensor(kept)
    table = torch.zeros(1, dtype=torch.int64)
    row_ops.store_addresses(table, {"values": values})
    row_ops.gather_by_address([buffer], table, rows, torch.tensor([len(kept)], dtype=torch.int32), padded)
    return buffer


@pytest.mark.parametrize("padded", [2, 3, BUFFER_ROWS - 1, BUFFER_ROWS])
def test_a_gather_fills_as_many_rows_as_it_is_told_of_buffers_that_hold_more(padded: int) -> None:
    """B2."""
    buffer = gathered([1, 4], padded)
    assert buffer[:2, 0].tolist() == [5.0, 17.0]
    assert not bool(buffer[2:padded].any()) and bool((buffer[padded:] == 7).all())


def test_a_gather_beyond_its_index_is_refused() -> None:
    """B2, and nothing is read past the index."""
    with pytest.raises(ValueError, match="padded is 6: the buffers have 8 rows, the index 5"):
        gathered([1, 4], 6, index_rows=5)
    assert gathered([1, 4], 5, index_rows=5)[2:5].any().item() is False


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """KeyboardInterrupt before the `line`-th line that runs in the plain scatter; yields the lines that did run."""
    ran: list[int] = []

    def trace(frame, event: str, _):
        if frame.f_code.co_name != "_scatter_plainly":
            return None
        if event == "line":
            ran.append(frame.f_lineno)
            if len(ran) == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(before)


def scatter(targets: list[torch.Tensor], written: torch.Tensor, kept: list[int]) -> None:
    """Rows of ones of two outputs, at `kept`."""
    places = torch.full((ROWS,), -1, dtype=torch.int32)
    places[kept] = torch.arange(len(kept), dtype=torch.int32)
    outputs = [torch.ones(len(kept), *target.shape[1:]) for target in targets]
    length = torch.tensor([len(kept)], dtype=torch.int32)
    row_ops.scatter_rows(targets, written, outputs, torch.tensor(kept), length, places)


def test_an_interrupt_anywhere_in_a_scatter_leaves_no_row_that_the_next_one_does_not_clear() -> None:
    """L6: of other rows than those before, which would hide what was not cleared."""
    for line in count(1):
        targets = [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, 2)]
        written = torch.zeros(2, ROWS, dtype=torch.uint8)
        scatter(targets, written, [0, 3])
        try:
            with interrupted_at(line) as ran:
                scatter(targets, written, [1, 4])
        except KeyboardInterrupt:
            assert len(ran) == line
        scatter(targets, written, [2, 3])
        for target in targets:
            assert target[:, 0].tolist() == [0, 0, 1, 1, 0, 0], line
        if len(ran) < line:
            break
    assert line > 10
