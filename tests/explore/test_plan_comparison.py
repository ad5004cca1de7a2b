"""Plans beside each other: the optimum against every choice there is, padding counted by hand, rows from a workload."""

import itertools
from bisect import bisect_left

import attrs
import pytest

from replay_sim.config import FLASH_RANK, ServingConfig, load_config
from replay_sim.explore.plan_comparison import (
    DEFAULT,
    EXPLICIT,
    OPTIMAL,
    RowWeights,
    compared_plans,
    curve_padding,
    default_plan,
    dispatched_table,
    fewest_graphs,
    judged,
    judged_table,
    notes_table,
    optimal_curve,
    padding_table,
    reachable_weights,
    seqs_points,
    seqs_sweep,
    workload_weights,
)
from replay_sim.plan import static_bytes_per_row

CONFIG = ServingConfig(
    window=4,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    cudagraph_capture_sizes=(8, 16, 32),
    decoder_replay_cudagraph_capture_sizes=(2, 8, 20),
    decoder_replay_trim_threshold=16,
)
DEFAULT_SIZES = (4, 8, 12, 16, 20, 24)
"""By hand: from the window in steps of it up to max_num_seqs x window."""

WEIGHTS = RowWeights({5: 10.0, 6: 1.0, 9: 5.0, 17: 2.0, 23: 1.0, 30: 3.0}, "counted by hand")
HELD = {rows: weight for rows, weight in WEIGHTS.histogram.items() if rows <= 24}
PROFILE = "conversation"
FEW_STEPS = 300


def padded_rows(sizes, histogram) -> float:
    return sum(sizes[bisect_left(sizes, rows)] * weight for rows, weight in histogram.items())


@pytest.mark.parametrize("graphs", range(1, 7))
def test_the_optimum_pads_as_little_as_any_choice_of_so_many_sizes(graphs) -> None:
    """P8: among all lists of at most so many sizes that end with the default's largest."""
    curve = optimal_curve(default_plan(CONFIG), WEIGHTS, graphs)
    others = (choice for count in range(graphs) for choice in itertools.combinations(range(1, 24), count))
    best = min(padded_rows((*choice, 24), HELD) for choice in others)
    assert padded_rows(curve[-1], HELD) == best
    assert len(curve[-1]) <= graphs and all(sizes[-1] == 24 for sizes in curve)


def test_the_curve_ends_where_another_size_saves_no_pad() -> None:
    curve = optimal_curve(default_plan(CONFIG), WEIGHTS, 64)
    assert curve[0] == (24,) and curve[-1] == (5, 6, 9, 17, 23, 24)
    shares = curve_padding(default_plan(CONFIG), curve, WEIGHTS)
    assert shares[0] == pytest.approx(1 - (50 + 6 + 45 + 34 + 23) / (24 * 19)) and shares[-1] == 0
    assert fewest_graphs(curve, shares, shares[2]) == 3
    assert fewest_graphs(curve, shares, -1.0) is None


def test_there_is_no_optimum_where_no_batch_fits_a_graph() -> None:
    assert optimal_curve(default_plan(CONFIG), RowWeights({25: 1.0}, "beyond"), 4) == []
    nothing = attrs.evolve(CONFIG, cudagraph_decoder_replay=False)
    assert optimal_curve(default_plan(nothing), WEIGHTS, 4) == []
    assert set(compared_plans(nothing, WEIGHTS)) == {DEFAULT, EXPLICIT}


def test_the_three_plans_are_the_rules_the_configs_and_the_optimum_with_as_many_graphs() -> None:
    """P1, P2, P4."""
    plans = compared_plans(CONFIG, WEIGHTS)
    assert [plan.replay_sizes for plan in plans.values()] == [DEFAULT_SIZES, (2, 8, 20), (5, 6, 9, 17, 23, 24)]
    assert CONFIG.decoder_replay_cudagraph_capture_sizes == (2, 8, 20)
    assert len(compared_plans(CONFIG, WEIGHTS, 2)[OPTIMAL].replay_sizes) == 2
    without = attrs.evolve(CONFIG, decoder_replay_cudagraph_capture_sizes=None)
    assert list(compared_plans(without, WEIGHTS)) == [DEFAULT, OPTIMAL]


def test_padding_bytes_and_what_goes_eager_are_those_counted_by_hand() -> None:
    """P6, P7."""
    plans = judged(compared_plans(CONFIG, WEIGHTS), WEIGHTS)
    real = 50 + 6 + 45 + 34 + 23
    assert plans[DEFAULT].cost.mean_padding == pytest.approx(1 - real / (8 * 11 + 12 * 5 + 20 * 2 + 24))
    assert plans[EXPLICIT].cost.mean_padding == pytest.approx(1 - (real - 23) / (8 * 11 + 20 * 7))
    assert plans[DEFAULT].eager_share == pytest.approx(3 / 22) and plans[EXPLICIT].eager_share == pytest.approx(4 / 22)
    assert plans[EXPLICIT].unreachable == (2,)
    assert plans[EXPLICIT].cost.static_buffer_bytes == 20 * static_bytes_per_row(FLASH_RANK)
    table = judged_table(plans)
    assert table.loc[EXPLICIT, "sizes no batch can select"] == "2" and table.loc[DEFAULT, "replay graphs"] == 6
    assert padding_table({"here": plans}).loc["here", OPTIMAL] == "0.0%"


def test_every_reachable_row_count_weighs_one() -> None:
    """P6: the window of one trimmed prefill up to a token less than the budget."""
    assert reachable_weights(default_plan(CONFIG)).histogram == dict.fromkeys(range(4, 64), 1.0)


def test_dispatch_counts_the_pads_that_planning_promises() -> None:
    """G3: both from the same steps, one from the histogram, one step by step."""
    config = load_config("b200-tp4-c32")
    weights = workload_weights(config, PROFILE, num_steps=FEW_STEPS)
    table = dispatched_table(config, judged(compared_plans(config, weights), weights), PROFILE, num_steps=FEW_STEPS)
    assert (table["replay batches in graphs"] == sum(weights.histogram.values())).all()
    assert table["replay batches in graphs"].min() > 50
    assert (table["pads dispatched"] - table["pads planned"]).abs().max() < 1e-12
    assert table.loc[DEFAULT, "pads"] > table.loc[OPTIMAL, "pads"]


def test_a_workload_is_the_same_for_its_seed_and_names_its_source() -> None:
    first, again, other = (workload_weights(CONFIG, PROFILE, seed=seed, num_steps=60) for seed in (0, 0, 1))
    assert first.histogram == again.histogram != other.histogram
    assert "60 steps" in first.source and "seed 1 from profile conversation" in other.source
    with pytest.raises(ValueError, match="profile"):
        workload_weights(CONFIG, "mine")


def test_graphs_and_bytes_grow_with_max_num_seqs_until_the_maximum_size() -> None:
    """P2: 32, the largest model size, is the bound from eight requests of four rows on."""
    swept = seqs_sweep(CONFIG, (1, 2, 8, 64))
    assert [(point.num_replay_graphs, point.largest_size) for point in swept[DEFAULT]] == [
        (1, 4),
        (2, 8),
        (8, 32),
        (8, 32),
    ]
    assert [point.largest_size for point in swept[EXPLICIT]] == [4, 8, 20, 20]
    assert swept[DEFAULT][1].static_buffer_bytes == 8 * static_bytes_per_row(FLASH_RANK)


def test_the_sweep_ends_before_the_first_value_that_is_refused() -> None:
    """P3."""
    config = ServingConfig(window=8, max_num_seqs=2, max_num_batched_tokens=32, max_cudagraph_capture_size=64)
    assert [point.max_num_seqs for point in seqs_points(config, (1, 4, 5, 6))] == [1, 4]


def test_what_no_batch_selects_is_named_for_every_config() -> None:
    """P6."""
    table = notes_table({"own": CONFIG, "none": attrs.evolve(CONFIG, cudagraph_decoder_replay=False)})
    assert table.loc["own", "of them no batch can select"] == 1
    assert "replay sizes 2 are unreachable" in table.loc["own", "said aloud"]
    assert table.loc["none", "replay graphs"] == 0
