"""The plain rule of the notebook, against rows counted by hand and against the tests' own row-by-row oracle."""

import numpy as np
import pytest
from batch.oracles import select_row_by_row

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.explore.kept_rows import dealt_block_tables
from replay_sim.explore.plain_rows import is_needed, lowest_held, plain_rows
from replay_sim.explore.rows_proof import random_batch

WINDOW, BLOCK_SIZE = 4, 4
CHUNK = Request(6, 10, Phase.PREFILL, window_start=6)
DECODE = Request(6, 10, Phase.DECODE)
READ = Request(6, 0, Phase.PREFILL, all_rows_read=True)


@pytest.mark.parametrize(
    ("request_", "kept"),
    [(CHUNK, [12, 13, 14, 15]), (DECODE, [10, 11, 12, 13, 14, 15]), (READ, [0, 1, 2, 3, 4, 5])],
    ids=["chunk", "decode", "all rows read"],
)
def test_a_row_is_needed_if_its_output_is_read_or_the_last_row_sees_it(request_: Request, kept: list[int]) -> None:
    """S1."""
    positions = range(request_.computed, request_.seq_len)
    assert [position for position in positions if is_needed(request_, position, WINDOW)] == kept


def test_what_is_held_is_the_unbroken_run_that_ends_at_the_last_position() -> None:
    """S4."""
    assert lowest_held(CHUNK, range(12, 16)) == 12
    assert lowest_held(CHUNK, range(10, 16)) == 6
    assert lowest_held(Request(0, 9, Phase.PREFILL, window_start=9), []) == 9


def test_rows_of_a_batch_have_the_positions_slots_and_windows_counted_by_hand() -> None:
    """S2, S3, S4, S7."""
    tables = [np.array([9, 7, 5, 3], np.int32)]
    (first, *_, last), starts, held = (
        getattr(plain_rows(Batch([CHUNK]), WINDOW, tables, BLOCK_SIZE), name)
        for name in ("rows", "query_start_loc", "window_starts")
    )
    assert (first.row, first.position, first.slot) == (2, 12, 12)
    assert (first.window_start_first, first.window_start_rest) == (9, 12)
    assert (last.row, last.slot, last.window_start_first, last.window_start_rest) == (5, 15, 12, 12)
    assert (starts, held) == ((0, 4), (12,))


def test_it_is_the_rule_of_the_tests_oracle_on_random_batches() -> None:
    """S1 to S4, S6."""
    rng = np.random.default_rng(7)
    for _ in range(150):
        batch = random_batch(rng, WINDOW)
        plain = plain_rows(batch, WINDOW, dealt_block_tables(batch, BLOCK_SIZE), BLOCK_SIZE)
        rows, positions, starts, window_starts = select_row_by_row(batch, WINDOW)
        assert [row.row for row in plain.rows] == rows
        assert [row.position for row in plain.rows] == positions
        assert (list(plain.query_start_loc), list(plain.window_starts)) == (starts, window_starts)
