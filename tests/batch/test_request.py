"""Requests and batches: what they derive, and what they refuse."""

import numpy as np
import pytest

from replay_sim.batch.request import Batch, Phase, Request

PREFILL = Request(7, 5, Phase.PREFILL, window_start=2, request_id="a")
LOGPROBS = Request(3, 0, Phase.PREFILL, all_rows_read=True, request_id="b")
NOTHING = Request(0, 9, Phase.PREFILL, request_id="c")
DECODE = Request(1, 40, Phase.DECODE, request_id="d")


def test_a_batch_derives_lengths_starts_and_positions():
    """S2, S3: int32 lengths and cumulative starts, int64 positions."""
    batch = Batch((PREFILL, LOGPROBS, NOTHING, DECODE))
    assert (batch.num_reqs, batch.num_tokens) == (4, 11)
    assert batch.query_lens.dtype == np.int32 and batch.query_lens.tolist() == [7, 3, 0, 1]
    assert batch.query_start_loc.dtype == np.int32 and batch.query_start_loc.tolist() == [0, 7, 10, 10, 11]
    assert batch.seq_lens.dtype == np.int64 and batch.seq_lens.tolist() == [12, 3, 9, 41]
    assert batch.positions.dtype == np.int64
    assert batch.positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 40]
    assert PREFILL.seq_len == 12


def test_an_empty_batch_is_ordinary():
    """S6."""
    batch = Batch()
    assert (batch.num_reqs, batch.num_tokens, batch.uniform_decode_len) == (0, 0, None)
    assert batch.query_start_loc.tolist() == [0]
    assert batch.positions.tolist() == []
    assert batch == Batch.from_columns([], [], [])


def test_columns_and_requests_give_the_same_batch():
    requests = (PREFILL, LOGPROBS, NOTHING, DECODE)
    batch = Batch.from_columns(
        [7, 3, 0, 1],
        [5, 0, 9, 40],
        [False, False, False, True],
        all_rows_read=[False, True, False, False],
        window_starts=[2, 0, 0, 0],
        request_ids="abcd",
    )
    assert batch.requests == requests
    assert batch == Batch(requests)
    assert batch != Batch(requests[:3])


def test_a_batch_does_not_follow_the_arrays_it_was_made_from_and_cannot_be_changed():
    computed = np.array([4, 5])
    batch = Batch.from_columns([1, 1], computed, [True, True])
    computed[0] = 99
    assert batch.computed.tolist() == [4, 5]
    with pytest.raises(ValueError, match="read-only"):
        batch.query_lens[0] = 2


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((Request(6, 10, Phase.DECODE), Request(6, 90, Phase.DECODE)), 6),
        ((Request(6, 10, Phase.DECODE), Request(5, 90, Phase.DECODE)), None),
        ((Request(1, 0, Phase.PREFILL), Request(1, 0, Phase.PREFILL)), None),
        ((Request(1, 10, Phase.DECODE), Request(1, 0, Phase.PREFILL)), None),
    ],
)
def test_uniform_decode_is_read_from_the_phase_never_from_the_shape(requests, expected):
    """S1; a batch of one-token prompts looks like decodes and is none."""
    assert Batch(requests).uniform_decode_len == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_len": -1}, "query_len is -1: it must be an integer of at least 0"),
        ({"query_len": 1.5}, "query_len is 1.5"),
        ({"query_len": True}, "query_len is True"),
        ({"computed": -2}, "computed is -2"),
        ({"window_start": -3}, "window_start is -3"),
        ({"window_start": 5}, "window_start is 5: it must be at most computed, which is 4"),
        ({"phase": "prefill"}, "phase is 'prefill': it must be Phase.PREFILL or Phase.DECODE"),
    ],
)
def test_a_bad_request_names_the_field_and_the_value(fields, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"query_len": 1, "computed": 4, "phase": Phase.PREFILL} | fields))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, -1], [0, 0], [False, False]), "query_len is -1"),
        (([1, -1], [0, 64], [False, False]), "query_len is -1"),
        (([1, 1], [0, -7], [False, False]), "computed is -7"),
        (([1, 1], [0], [False, False]), "computed has shape"),
        (([1, 1], [0, 0], [False]), "phase has shape"),
        (([2**31 - 1, 1], [0, 0], [False, False]), "query_len adds up to 2147483648 tokens"),
    ],
)
def test_bad_columns_name_the_field_and_the_value(columns, message):
    with pytest.raises(ValueError, match=message):
        Batch.from_columns(*columns)


def test_bad_optional_columns_name_the_field():
    with pytest.raises(ValueError, match="window_start is 5: it must be at most computed, which is 4"):
        Batch.from_columns([1, 1], [9, 4], [False, False], window_starts=[6, 5])
    with pytest.raises(ValueError, match="window_start is -1"):
        Batch.from_columns([1, 1], [9, 4], [False, False], window_starts=[6, -1])
    with pytest.raises(ValueError, match="window_start is -1"):
        Batch.from_columns([1], [2**63 - 1], [False], window_starts=[-1])
    with pytest.raises(ValueError, match="1 request_ids"):
        Batch.from_columns([1, 1], [9, 4], [False, False], request_ids=("a",))
