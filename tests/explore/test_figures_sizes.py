"""Figures of plans beside each other: what they draw is what they were given, counted by hand."""

import pytest

from replay_sim.config import ServingConfig
from replay_sim.explore.figures_plan import thinned
from replay_sim.explore.figures_sizes import plans_figure, seqs_figure, trade_off_figure
from replay_sim.explore.plan_comparison import (
    DEFAULT,
    MIB,
    RowWeights,
    compared_plans,
    default_plan,
    judged,
    optimal_curve,
    seqs_sweep,
)
from replay_sim.explore.theme import LOOKS, Meaning
from replay_sim.measure.records import ENVIRONMENT_KEYS, Record

CONFIG = ServingConfig(
    window=4,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    cudagraph_capture_sizes=(8, 16, 32),
    decoder_replay_cudagraph_capture_sizes=(2, 8, 20),
    decoder_replay_trim_threshold=16,
)
WEIGHTS = RowWeights({5: 10.0, 9: 5.0, 17: 2.0, 23: 1.0}, "counted by hand")
FEW = RowWeights({5: 3.0}, "one row count")
SOURCE = "counted by hand"


def plans(weights=WEIGHTS, graphs=3):
    return judged(compared_plans(CONFIG, weights, graphs), weights)


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def trace(figure, name):
    (found,) = [trace for trace in figure.data if trace.name == name]
    return found


def test_every_staircase_is_sampled_at_each_size_and_one_above() -> None:
    """P7."""
    explicit = trace(plans_figure(plans(), WEIGHTS, SOURCE), "explicit plan")
    assert explicit.x == (1, 2, 3, 8, 9, 20) and explicit.y == (2, 2, 8, 8, 20, 20)
    assert explicit.customdata[2] == pytest.approx(5 / 8)
    assert "max_num_batched_tokens 64" in explicit.hovertemplate


def test_batches_are_counted_once_and_sizes_are_marked_where_they_lie() -> None:
    """P6: a size that no batch can select is a cross."""
    figure = plans_figure(plans(), WEIGHTS, SOURCE)
    bars = trace(figure, "replay batches")
    assert sum(bars.y) == 18 and len(bars.y) == 4
    sizes = [trace for trace in figure.data if trace.yaxis == "y3"]
    assert sizes[0].x == (4, 8, 12, 16, 20, 24) and sizes[1].x == (2, 8, 20)
    assert sizes[1].marker.symbol == ("x-thin", "line-ns", "line-ns")
    assert "1 sizes no batch can select" in title(figure)


def test_a_plan_looks_the_same_in_all_figures() -> None:
    looks = {name: LOOKS[meaning].colour for name, meaning in (("default plan", Meaning.DEFAULT_PLAN),)}
    curve = optimal_curve(default_plan(CONFIG), WEIGHTS, 6)
    for figure in (plans_figure(plans(), WEIGHTS, SOURCE), trade_off_figure(curve, plans(), WEIGHTS, SOURCE)):
        found = trace(figure, "default plan")
        assert looks["default plan"] in (found.line.color, found.marker.color)


def test_the_axis_ends_beyond_the_graph_of_the_largest_batch_and_says_what_is_cut() -> None:
    figure = plans_figure(plans(FEW, 6), FEW, SOURCE)
    assert figure.layout.xaxis3.range == (0, 9)
    assert "larger sizes" in figure.layout.xaxis3.title.text
    assert "larger sizes" not in plans_figure(plans(), WEIGHTS, SOURCE).layout.xaxis3.title.text


def test_plans_without_graphs_are_said_to_run_eagerly() -> None:
    config = ServingConfig(window=4, max_num_batched_tokens=64, cudagraph_decoder_replay=False)
    figure = plans_figure(judged(compared_plans(config, WEIGHTS), WEIGHTS), WEIGHTS, SOURCE)
    assert title(figure) == "<b>No replay graphs are planned: every replay batch runs eagerly</b>"
    assert len(figure.data) == len(plans_figure(plans(), WEIGHTS, SOURCE).data)


def test_the_trade_off_says_how_many_graphs_pad_no_more_than_the_default() -> None:
    """P8: by hand the default pads 55 of 213, three graphs 9, 17, 24 pad 41, two more than that."""
    curve = optimal_curve(default_plan(CONFIG), WEIGHTS, 6)
    figure = trade_off_figure(curve, plans(), WEIGHTS, SOURCE)
    optimum = trace(figure, "optimal plan for each number of graphs")
    assert optimum.x == (1, 2, 3, 4, 5) and optimum.y[-1] == 0
    default, explicit = trace(figure, "default plan"), trace(figure, "explicit plan")
    assert (default.x, explicit.x) == ((6,), (3,))
    assert default.y[0] == pytest.approx(1 - (50 + 45 + 34 + 23) / (80 + 60 + 40 + 24))
    enough = next(count for count, share in zip(optimum.x, optimum.y, strict=True) if share <= default.y[0])
    assert title(figure).startswith(f"<b>{enough} graphs chosen for these rows pad no more than the default's 6")
    assert "nothing to choose" in title(trade_off_figure([], plans(), WEIGHTS, SOURCE))


def test_graphs_and_bytes_stand_against_max_num_seqs_and_a_measured_pool_beside_them() -> None:
    """O5."""
    point = {"arrangement": "own_stream", "order": "largest_first", "outputs": "dropped", "group": "replay"}
    record = Record(
        kind="pool",
        environment=dict.fromkeys(ENVIRONMENT_KEYS),
        command="none",
        seed=0,
        settings={"subject": "default"},
        points=[point | {"group": "model", "reserved_bytes": 7, "predicted_bytes": 7}]
        + [point | {"reserved_bytes": 3 * MIB, "predicted_bytes": 0}],
    )
    swept = seqs_sweep(CONFIG, (1, 2, 8, 64))
    figure = seqs_figure(swept, 6, SOURCE, pool=record)
    graphs, static = [trace for trace in figure.data if trace.legendgroup == DEFAULT]
    assert graphs.x == static.x == (1, 2, 8, 64) and graphs.y == (1, 2, 8, 8)
    assert static.y[1] == pytest.approx(swept[DEFAULT][1].static_buffer_bytes / MIB)
    (star,) = [trace for trace in figure.data if trace.marker.symbol == "star"]
    assert (star.x, star.y) == ((6,), (3.0,))
    assert title(figure).startswith("<b>From max_num_seqs 8 on the default plan grows no more: 8 graphs up to 32 rows")
    assert len(seqs_figure(swept, 6, SOURCE).data) == len(figure.data) - 1


def test_ticks_are_left_out_by_distance_and_the_last_stays() -> None:
    assert thinned([1, 2, 4, 100, 178, 180], 180) == [1, 100, 180]
    assert thinned([], 10) == []
