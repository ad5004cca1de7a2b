"""What plans cost, against counting one by one (P7)."""

import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.config import FLASH_RANK, TINY, ServingConfig, load_config
from replay_sim.plan import make_plan, plan_cost, reachable_rows, static_bytes_per_row

BYTES_A_ROW = 51_308
SIZES = (128, 256, 512)


def test_a_row_of_the_seven_inputs_has_the_published_bytes() -> None:
    """P7: hidden size 5120, four streams, bfloat16; with int64 ids four bytes more."""
    assert static_bytes_per_row(FLASH_RANK) == BYTES_A_ROW
    assert static_bytes_per_row(FLASH_RANK, input_id_bytes=8) == BYTES_A_ROW + 4


def test_buffers_take_the_rows_of_the_largest_graphs() -> None:
    """P7, B1, L4: inputs by the largest replay size, outputs by the largest model graph that breaks."""
    plan = make_plan(load_config("b200-tp4-c8"))
    cost = plan_cost(plan)
    assert cost.static_buffer_bytes == 2048 * BYTES_A_ROW
    assert cost.break_buffer_bytes == 8190 * ((4 + 3) * 5120 * 2 + 4 * 4)
    assert plan_cost(make_plan(load_config("h100-tp8-c28"))).break_buffer_bytes == 0


def test_graphs_and_segments_are_counted() -> None:
    """P7: a replay graph of three layers has four segments."""
    plan = make_plan(ServingConfig(decoder_replay_cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=4))
    cost = plan_cost(plan, TINY)
    assert (cost.num_replay_graphs, cost.num_replay_segments) == (3, 12)
    assert (cost.num_model_graphs, cost.num_full_graphs) == (3, 3)


def test_pool_bytes_are_passed_through_and_never_made_up() -> None:
    """P7."""
    plan = make_plan(ServingConfig())
    assert plan_cost(plan).predicted_pool_bytes is None
    assert plan_cost(plan, predicted_pool_bytes=7).predicted_pool_bytes == 7


def test_an_empty_plan_costs_nothing() -> None:
    """U7."""
    cost = plan_cost(make_plan(ServingConfig(max_cudagraph_capture_size=64)))
    assert (cost.num_replay_graphs, cost.static_buffer_bytes, cost.mean_padding, cost.worst_padding) == (
        0,
        0,
        0,
        0,
    )
    assert cost.worst_padding_rows is None


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    window=st.integers(1, 8),
    max_num_seqs=st.integers(1, 8),
    threshold=st.integers(9, 40),
    models=st.lists(st.integers(1, 64), min_size=1, max_size=3),
)
def test_padding_is_that_of_every_row_counted(
    sizes: list[int], window: int, max_num_seqs: int, threshold: int, models: list[int]
) -> None:
    """P7: mean, worst, and rows that are mostly padding."""
    config = ServingConfig(
        window=window,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=70,
        decoder_replay_cudagraph_capture_sizes=sizes,
        cudagraph_capture_sizes=models,
        decoder_replay_trim_threshold=threshold,
    )
    plan = make_plan(config)
    pairs = []
    for low, high in reachable_rows(plan):
        for rows in range(low, high + 1):
            padded = min((size for size in plan.replay_sizes if size >= rows), default=None)
            if padded:
                pairs.append((rows, padded))
    cost = plan_cost(plan)
    if not pairs:
        assert (cost.mean_padding, cost.worst_padding, cost.worst_padding_rows) == (0, 0, None)
        return
    pads = sum(padded - rows for rows, padded in pairs)
    assert math.isclose(cost.mean_padding, pads / sum(padded for _, padded in pairs), abs_tol=1e-12)
    assert math.isclose(cost.worst_padding, max(1 - rows / padded for rows, padded in pairs), abs_tol=1e-12)
    assert cost.worst_padding_rows == max(pairs, key=lambda pair: (1 - pair[0] / pair[1], -pair[0]))[0]
    assert cost.mostly_padding_rows == sum(padded - rows > rows for rows, padded in pairs)
    histogram = {rows: 1.0 for rows, _ in pairs}
    assert math.isclose(plan_cost(plan, histogram=histogram).mean_padding, cost.mean_padding, abs_tol=1e-9)


def test_more_pads_than_rows_are_reported() -> None:
    """B15: 3,208 rows run on 8,192."""
    plan = make_plan(ServingConfig(decoder_replay_cudagraph_capture_sizes=[2816, 3072, 8192]))
    cost = plan_cost(plan, histogram={3208: 2.0, 9000: 5.0})
    assert cost.mean_padding == pytest.approx(1 - 3208 / 8192)
    assert cost.mostly_padding_rows > 0


def test_costs_are_values() -> None:
    cost = plan_cost(make_plan(ServingConfig()))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        cost.mean_padding = 1.0  # type: ignore[misc]
