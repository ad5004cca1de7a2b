"""The row operations as the rest of the system calls them, on the CPU."""

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
