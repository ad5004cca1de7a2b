"""Figures of a tuning and of ranks: what they draw is what was counted, and their titles say what it is."""

import pytest
from explore.tuning_cases import PlainCosts, drawn_steps

from replay_sim.config import load_config
from replay_sim.explore.figures_ranks import ranks_figure
from replay_sim.explore.figures_tuning import curves_figure, gains_figure, plans_on_steps_figure, steps_figure
from replay_sim.explore.tuning import tune
from replay_sim.explore.tuning_steps import is_full
from replay_sim.explore.tuning_table import PlanOnTrace, TableRow, TuningTable
from replay_sim.plan import make_plan
from replay_sim.workload.rank_simulation import Dealing, RankPadding

CONFIG, COSTS = load_config("default"), PlainCosts()


@pytest.fixture(scope="module")
def tuning():
    return tune(CONFIG, drawn_steps(CONFIG, 1, 80), drawn_steps(CONFIG, 2, 80), COSTS)


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def test_bars_of_steps_add_up_to_the_steps() -> None:
    """FULL, others, and replay batches, which are some of the others."""
    counts, plan = drawn_steps(CONFIG, 1, 80), make_plan(CONFIG)
    figure = steps_figure(counts, plan, "drawn")
    full, other, replay = (sum(trace.y) for trace in figure.data)
    assert full == sum(count for key, count in counts.items() if is_full(key, plan))
    assert full + other == counts.total() and 0 < replay < other
    assert f"{full / counts.total():.0%} of the steps are uniform decodes" in title(figure)


def test_the_curves_are_those_of_the_tuning_and_the_plans_lie_among_them(tuning) -> None:
    figure = curves_figure(tuning, "drawn")
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    curves = (tuning.replay_curve, tuning.model_curve)
    assert [list(line.y) for line in lines] == [[point.score.expected_step_ms for point in curve] for curve in curves]
    points = {(trace.name, trace.x[0]) for trace in figure.data if trace.mode == "markers"}
    assert {("tuned", len(tuning.tuned.plan.replay_sizes)), ("default", 16)} <= points
    assert "less time a step than the config's own 16 and 26" in title(figure)
    assert "trim threshold" in lines[0].customdata[0]


def test_a_plan_on_steps_has_its_sizes_and_as_many_traces_as_any_other(tuning) -> None:
    scores = {plan.name: plan.seen for plan in tuning.plans}
    counts = drawn_steps(CONFIG, 1, 80)
    figures = [plans_on_steps_figure(counts, plan.plan, scores, "drawn") for plan in tuning.plans]
    assert len({len(figure.data) for figure in figures}) == 1
    assert figures[2].data[1].x == tuning.tuned.plan.replay_sizes
    assert list(figures[2].data[2].x) == [score.expected_step_ms for score in scores.values()]


def on_trace(seen: float, unseen: float) -> PlanOnTrace:
    return PlanOnTrace(
        seen_step_ms=seen,
        unseen_step_ms=unseen,
        unseen_mixed_step_ms=None,
        seen_padded_rows=1,
        unseen_padded_rows=1,
        num_replay_graphs=2,
        num_model_graphs=3,
    )


def test_gains_are_drawn_as_they_are_losses_too() -> None:
    """Issue 6, point 4: what is gained or lost on the unseen half."""
    own, rows = on_trace(10, 10), []
    for trace, unseen in (("a.csv", 9.0), ("a.csv", 9.8), ("b.csv", 10.5)):
        more = {"config": "c", "alike": 1, "has_own_list": False, "steps": 9, "mixed_steps": 5}
        rows.append(TableRow(trace=trace, default=own, own=own, tuned=on_trace(9.0, unseen), **more))
    table = TuningTable(source="modelled", configs="configs.json", traces=("a.csv", "b.csv"), rows=tuple(rows))
    figure = gains_figure(table)
    assert list(figure.data[0].y) == pytest.approx([0.1, 0.02]) and list(figure.data[1].y) == pytest.approx([-0.05])
    assert "2.0% less time in the median and 10.0% at most; 1 of 3 get worse, by 5.00% at most" in title(figure)


def test_pads_are_drawn_against_ranks_for_both_ways_of_dealing() -> None:
    def padding(ranks: int, dealing: Dealing, share: float) -> RankPadding:
        return RankPadding(ranks, dealing, 10, 5, 0.0, 0.0, share, 0.1, 2 * share, 0.2)

    rows = [padding(1, dealing, 0.1) for dealing in Dealing]
    rows += [padding(8, Dealing.ROUND_ROBIN, 0.4), padding(8, Dealing.LEAST_LOAD, 0.37)]
    figure = ranks_figure(rows, "computed")
    assert len(figure.data) == 8 and list(figure.data[0].x) == [1, 8] and list(figure.data[0].y) == [0.1, 0.4]
    assert list(figure.data[4].y) == [0.2, 0.8]
    assert "from 10% on 1 to 40% on 8 ranks" in title(figure) and "at most 3 points" in title(figure)
