"""Row selection against an oracle that looks at one row at a time."""

import numpy as np
import pytest
from batch.oracles import select_row_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import kept_lengths, select_rows

WINDOW = 128
LENGTHS = (
    0,
    1,
    2,
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    WINDOW + 62,
    2 * WINDOW,
    2 * WINDOW + 2,
    3 * WINDOW + 66,
    1930,
)


@st.composite
def batches(draw: st.DrawFn, window: int) -> Batch:
    """0 to 16 requests with lengths around the window, mixed phases, some with a window start."""
    near = st.sampled_from([0, 1, max(window - 1, 0), window, window + 1, 2 * window, 2 * window + 3])
    requests = []
    for _ in range(draw(st.integers(0, 16))):
        computed = draw(st.integers(0, 3 * window) | st.just(0))
        requests.append(
            Request(
                draw(near | st.integers(0, 5 * window)),
                computed,
                draw(st.sampled_from(Phase)),
                draw(st.booleans()),
                draw(st.integers(0, computed)),
            )
        )
    return Batch(requests)


@given(st.data(), st.integers(1, 40))
@settings(deadline=None)
def test_selection_equals_the_row_by_row_oracle(data, window):
    """S1-S4, S6, S8: every row on its own gives the same rows, positions, starts and window starts."""
    batch = data.draw(batches(window))
    rows, positions, starts, window_starts = select_row_by_row(batch, window)
    selected = select_rows(batch, window)
    assert selected.rows.dtype == np.int64 and selected.rows.tolist() == rows
    assert selected.query_start_loc.dtype == np.int32 and selected.query_start_loc.tolist() == starts
    assert selected.window_starts.dtype == np.int64 and selected.window_starts.tolist() == window_starts
    assert batch.positions[selected.rows].tolist() == positions
    assert selected.num_rows == len(rows)
    assert selected.trims == (len(rows) < batch.num_tokens)
    assert kept_lengths(batch, window).tolist() == np.diff(starts).tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prefill_keeps_its_last_window_of_rows(length):
    """S1, S6: lengths of window +- 1 and of no multiple of it."""
    selected = select_rows(Batch([Request(length, 0, Phase.PREFILL)]), WINDOW)
    first = max(length - WINDOW, 0)
    assert selected.rows.tolist() == list(range(first, length))
    assert selected.window_starts.tolist() == [first]
    assert selected.trims == (length > WINDOW)


@pytest.mark.parametrize("length", LENGTHS)
def test_decodes_and_prompts_whose_rows_are_all_read_keep_every_row(length):
    """S1: whatever the window and however many speculative tokens."""
    for request in (Request(length, 300, Phase.DECODE), Request(length, 300, Phase.PREFILL, True)):
        selected = select_rows(Batch([request]), WINDOW)
        assert selected.num_rows == length
        assert not selected.trims
        assert selected.window_starts.tolist() == [0]


def test_only_the_request_without_log_probabilities_is_trimmed():
    """S1: two prompts of 300, the first with all rows read."""
    batch = Batch([Request(300, 0, Phase.PREFILL, True), Request(300, 0, Phase.PREFILL)])
    selected = select_rows(batch, WINDOW)
    assert selected.query_start_loc.tolist() == [0, 300, 428]
    assert selected.rows[300:].tolist() == list(range(472, 600))


def test_a_decode_of_more_tokens_than_the_window_keeps_them_beside_a_trimmed_prefill():
    """S1: phase decides, the shapes are the same."""
    batch = Batch([Request(6, 90, Phase.DECODE), Request(6, 90, Phase.PREFILL)])
    assert select_rows(batch, 4).query_start_loc.tolist() == [0, 6, 10]


def test_one_token_prompts_are_prefills_that_keep_their_row():
    """S6: they are not decodes, and not an idle rank either."""
    selected = select_rows(Batch([Request(1, 0, Phase.PREFILL)] * 3), WINDOW)
    assert selected.rows.tolist() == [0, 1, 2]


def test_a_chunk_takes_its_window_start_from_its_own_sequence_length():
    """S7: the second chunk of a prompt, at 1000..1999."""
    selected = select_rows(Batch([Request(1000, 1000, Phase.PREFILL)]), WINDOW)
    assert selected.rows.tolist() == list(range(872, 1000))
    assert selected.window_starts.tolist() == [2000 - WINDOW]


def test_a_short_chunk_after_a_trimmed_one_keeps_its_window_start():
    """S4, S7: nothing of it is trimmed."""
    selected = select_rows(Batch([Request(50, 1000, Phase.PREFILL, window_start=872)]), WINDOW)
    assert selected.window_starts.tolist() == [872]


def test_a_window_start_above_the_kept_rows_stays():
    """S4: the later of the two starts counts, here never below what the request holds."""
    selected = select_rows(Batch([Request(130, 4000, Phase.PREFILL, window_start=4000)]), WINDOW)
    assert selected.window_starts.tolist() == [4002]
    selected = select_rows(Batch([Request(200, 4000, Phase.PREFILL, window_start=3990)]), 300)
    assert selected.window_starts.tolist() == [3990]


def test_an_empty_batch_has_no_rows():
    """S6."""
    selected = select_rows(Batch(), WINDOW)
    assert selected.rows.dtype == np.int64 and selected.rows.size == 0
    assert selected.query_start_loc.tolist() == [0]
    assert not selected.trims


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window is 0: it must be at least 1"):
        select_rows(Batch(), 0)
