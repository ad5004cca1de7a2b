"""Model sizes, trim threshold and replay sizes together, against every choice tried (issue 6, P8)."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.plan.joint import JointPlanner, JointSizes, MixedSteps, joint_optimum, trade_offs

WINDOW = 3
LARGEST = 12


class TableCosts:
    """Costs drawn for every size; `growing` ones do not fall as sizes grow."""

    source = "drawn"

    def __init__(self, seed: int, growing: bool) -> None:
        rng = np.random.default_rng(seed)
        kinds = ("plain", "break", "eager_plain", "eager_break", "rows_graph", "rows_eager")
        self.us = {}
        for kind in kinds:
            drawn = rng.integers(0, 40, LARGEST + 1)
            self.us[kind] = np.cumsum(drawn // 6) + drawn[0] if growing else drawn

    def model_us(self, padded_tokens: int, mode: str, breaks: bool) -> float:
        kind = ("break" if breaks else "plain") if mode == "PIECEWISE" else ("eager_break" if breaks else "eager_plain")
        return float(self.us[kind][padded_tokens])

    def replay_us(self, padded_rows: int, graph: bool) -> float:
        return float(self.us["rows_graph" if graph else "rows_eager"][padded_rows])


def cost_of(steps: list, costs: TableCosts, models: tuple, threshold: int | None, rows_sizes: tuple) -> float:
    """A step's mean cost, by the dispatch rules D1-D3 and G3 said again, a step at a time."""
    total = weights = 0.0
    for tokens, rows, weight in steps:
        size = min((size for size in models if size >= tokens), default=None)
        if size is None:
            replays = rows < tokens
            us = costs.model_us(tokens, "NONE", replays)
        else:
            replays = threshold is not None and size >= threshold
            us = costs.model_us(size, "PIECEWISE", replays)
        if replays:
            padded = min((size for size in rows_sizes if size >= rows), default=None)
            us += costs.replay_us(rows, False) if padded is None else costs.replay_us(padded, True)
        total += us * weight
        weights += weight
    return total / weights


def subsets(values: set, most: int) -> list:
    return [chosen for count in range(most + 1) for chosen in combinations(sorted(values), count)]


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    pairs = draw(st.lists(st.tuples(st.integers(1, LARGEST), st.integers(1, 6)), min_size=1, max_size=7, unique=True))
    steps = [(max(tokens, rows), rows, draw(st.integers(1, 9))) for tokens, rows in pairs]
    models = set(draw(st.lists(st.integers(1, LARGEST), max_size=5, unique=True)))
    kept = set(draw(st.lists(st.integers(1, LARGEST), max_size=2, unique=True)))
    replays = set(draw(st.lists(st.integers(1, 6), max_size=4, unique=True)))
    costs = TableCosts(draw(st.integers(0, 10**6)), draw(st.booleans()))
    return steps, models, kept, replays, costs, draw(st.integers(0, 3)), draw(st.integers(0, 3))


def planner_of(steps: list, models: set, kept: set, replays: set, costs: TableCosts) -> JointPlanner:
    tokens, rows, weights = (np.array(column) for column in zip(*steps, strict=True))
    mixed = MixedSteps(tokens, rows, weights.astype(float))
    return JointPlanner(mixed, costs, model_candidates=models, replay_candidates=replays, kept_sizes=kept)


def thresholds_of(models: set, kept: set) -> list:
    return [None, *sorted(size for size in models | kept if size > WINDOW)]


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_the_best_model_sizes_for_given_replay_sizes_are_those_of_all_subsets(case: tuple) -> None:
    """Exact for every threshold and every number of graphs, whatever the costs."""
    steps, models, kept, replays, costs, others, count = case
    planner = planner_of(steps, models, kept, replays, costs)
    rows_sizes = tuple(sorted(replays))[:count]
    for threshold in thresholds_of(models, kept):
        fixed = kept | ({threshold} - {None})
        optima = planner.model_optima(threshold, planner.replay_us(rows_sizes), len(fixed) + others)
        for most in range(others + 1):
            best = optima[min(most, len(optima) - 1)]
            choices = [tuple(sorted({*fixed, *chosen})) for chosen in subsets(models - fixed, most)]
            least = min(cost_of(steps, costs, chosen, threshold, rows_sizes) for chosen in choices)
            assert best.expected_cost == pytest.approx(least, abs=1e-9)
            assert set(best.sizes) >= fixed and len(best.sizes) <= len(fixed) + most
            assert cost_of(steps, costs, best.sizes, threshold, rows_sizes) == pytest.approx(least, abs=1e-9)
            expected = planner.expected_us(best.sizes, threshold, rows_sizes)
            assert expected == pytest.approx(least, abs=1e-9)
        if fixed:
            assert planner.model_optima(threshold, planner.replay_us(rows_sizes), len(fixed) - 1) == []


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_the_best_replay_sizes_for_given_model_sizes_are_those_of_all_subsets(case: tuple) -> None:
    """Rows of steps that have no replay batch take no graph."""
    steps, models, kept, replays, costs, most, _ = case
    planner = planner_of(steps, models, kept, replays, costs)
    sizes = tuple(sorted(models | kept))
    for threshold in thresholds_of(models, kept):
        best = planner.replay_optima(sizes, threshold, most)[-1]
        least = min(cost_of(steps, costs, sizes, threshold, chosen) for chosen in subsets(replays, most))
        assert best.expected_cost == pytest.approx(least, abs=1e-9)
        assert cost_of(steps, costs, sizes, threshold, best.sizes) == pytest.approx(least, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_the_joint_choice_is_no_better_than_all_choices_and_no_worse_than_its_starts(case: tuple) -> None:
    """Issue 6: with the threshold, which couples model and replay sizes; from every start, it is the best of all."""
    steps, models, kept, replays, costs, others, most = case
    models = set(sorted(models)[:4])
    planner = planner_of(steps, models, kept, replays, costs)
    starts = subsets(replays, most)
    limit = len(kept) + 1 + others
    choice = joint_optimum(planner, thresholds_of(models, kept), starts, max_model_graphs=limit, max_replay_graphs=most)
    assert choice is not None and set(choice.model_sizes) >= kept and len(choice.model_sizes) <= limit
    assert len(choice.replay_sizes) <= most
    said = cost_of(steps, costs, choice.model_sizes, choice.trim_threshold, choice.replay_sizes)
    assert choice.expected_us == pytest.approx(said, abs=1e-9)
    least = min(
        cost_of(steps, costs, tuple(sorted({*kept, *chosen})), threshold, rows_sizes)
        for threshold in [None, *range(WINDOW + 1, LARGEST + 2)]
        for chosen in subsets(models - kept, limit - len(kept))
        for rows_sizes in starts
    )
    assert choice.expected_us == pytest.approx(least, abs=1e-9)


def test_from_one_start_the_joint_choice_stands_still_where_one_part_alone_cannot_better_it() -> None:
    """The known limit: the halves are exact, the alternation is not; it is still no worse than where it began."""
    beaten = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rows = rng.integers(1, 7, 6)
        steps = [(int(max(row, rng.integers(1, LARGEST + 1))), int(row), 1) for row in rows]
        costs = TableCosts(seed, growing=True)
        models, replays = set(range(1, LARGEST + 1)), set(range(1, 7))
        planner = planner_of(steps, models, set(), replays, costs)
        arguments = {"max_model_graphs": 2, "max_replay_graphs": 2}
        one = joint_optimum(planner, thresholds_of(models, set()), [(1, 4)], **arguments)
        all_starts = joint_optimum(planner, thresholds_of(models, set()), subsets(replays, 2), **arguments)
        assert one is not None and all_starts is not None
        assert all_starts.expected_us <= one.expected_us + 1e-9
        start = planner.model_optima(one.trim_threshold, planner.replay_us((1, 4)), 2)[-1]
        assert one.expected_us <= start.expected_cost + 1e-9
        beaten += one.expected_us > all_starts.expected_us + 1e-9
    assert beaten < 12


def test_more_graphs_of_either_kind_never_cost_more() -> None:
    """The whole trade-off curve."""
    steps = [(tokens, min(tokens, 6), 1 + tokens % 3) for tokens in range(1, LARGEST + 1)]
    planner = planner_of(steps, set(range(1, LARGEST + 1)), {2, 5}, set(range(1, 7)), TableCosts(3, growing=True))
    choice = JointSizes((2, 5, 8), 8, (3, 6), 0.0)
    grid = trade_offs(planner, choice, max_model_graphs=6, max_replay_graphs=3)
    assert len(grid) == 4 and all(2 <= len(curve) <= 4 for curve in grid)
    for curve in grid:
        costs = [point.expected_us for point in curve]
        assert costs == sorted(costs, reverse=True)
    assert all({2, 5, 8} <= set(point.model_sizes) for curve in grid for point in curve)


def test_steps_without_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        planner_of([(4, 2, 0)], {4}, set(), {2}, TableCosts(0, True))
