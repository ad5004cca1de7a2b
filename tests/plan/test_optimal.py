"""Optimal sizes, against every subset of the candidates tried (P8)."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.plan import optimal
from replay_sim.plan.optimal import optimal_sizes


def cost_of(sizes: tuple[int, ...], histogram: dict, size_costs: dict, eager: dict) -> float:
    """Expected cost of a replay batch by the dispatch rule (G3)."""
    total = 0.0
    for rows, weight in histogram.items():
        size = min((size for size in sizes if size >= rows), default=None)
        total += weight * (eager[rows] if size is None else size_costs[size])
    return total / sum(histogram.values())


def least_by_search(histogram: dict, size_costs: dict, eager: dict, graphs: int) -> float:
    subsets = (sizes for count in range(graphs + 1) for sizes in combinations(size_costs, count))
    return min(cost_of(sizes, histogram, size_costs, eager) for sizes in subsets)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[dict, dict, dict]:
    rows = draw(st.lists(st.integers(1, 20), unique=True, min_size=1, max_size=8))
    weights = draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    weights[0] += 1
    candidates = sorted(draw(st.lists(st.integers(1, 24), unique=True, max_size=7)))
    costs = draw(st.lists(st.integers(0, 30), min_size=len(candidates), max_size=len(candidates)))
    if draw(st.booleans()):
        costs.sort()
    eager = {row: draw(st.integers(0, 60)) for row in rows}
    histogram = dict(zip(rows, weights, strict=True))
    return histogram, dict(zip(candidates, costs, strict=True)), eager


@settings(max_examples=1000, deadline=None)
@given(workload=workloads())
def test_the_optimum_of_every_number_of_graphs_is_that_of_all_subsets(
    workload: tuple[dict, dict, dict],
) -> None:
    """P8: with costs that grow with the size, and with any."""
    histogram, size_costs, eager = workload
    optima = optimal_sizes(histogram, size_costs, eager.__getitem__, len(size_costs))
    for graphs in range(len(size_costs) + 1):
        best = optima[min(graphs, len(optima) - 1)]
        assert len(best.sizes) <= graphs and list(best.sizes) == sorted(set(best.sizes))
        expected = least_by_search(histogram, size_costs, eager, graphs)
        assert best.expected_cost == pytest.approx(expected, abs=1e-9)
        assert cost_of(best.sizes, histogram, size_costs, eager) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(0, 9) | st.just(1000), min_size=40, max_size=120),
    base=st.integers(0, 50),
    graphs=st.integers(1, 12),
)
def test_growing_costs_give_the_optimum_of_the_plain_recurrence(weights: list[int], base: int, graphs: int) -> None:
    """P8: on histograms too long for subsets, where the hull takes more than its first passes."""
    rows = len(weights)
    histogram = {row: float(weight) for row, weight in enumerate(weights, 1)}
    histogram[rows] += 1
    costs = [0, *(base + row for row in range(1, rows + 1))]
    least = [[0.0] + [float("inf")] * rows]
    for _ in range(graphs):
        before = least[-1]
        row_costs = []
        for end in range(rows + 1):
            reach = [before[end]]
            weight = 0.0
            for start in range(end - 1, -1, -1):
                weight += histogram[start + 1]
                reach.append(before[start] + costs[end] * weight)
            row_costs.append(min(reach))
        least.append(row_costs)
    optima = optimal_sizes(histogram, dict(enumerate(costs[1:], 1)), lambda _: 1e9, graphs)
    total = sum(histogram.values())
    for count, best in enumerate(optima[1:], 1):
        assert best.expected_cost * total == pytest.approx(least[count][rows])


def test_more_graphs_never_cost_more() -> None:
    """P8."""
    optima = optimal_sizes({row: 1.0 for row in range(1, 65)}, {size: size for size in range(1, 65)}, float, 8)
    costs = [best.expected_cost for best in optima]
    assert len(optima) == 9 and costs == sorted(costs, reverse=True)


def test_rows_that_never_happen_take_no_graph() -> None:
    best = optimal_sizes({128: 3.0, 256: 0.0}, {128: 1.0, 256: 2.0}, lambda _: 10.0, 2)[-1]
    assert (best.sizes, best.expected_cost) == ((128,), 1.0)


def test_without_candidates_all_runs_eagerly() -> None:
    (only,) = optimal_sizes({8: 1.0, 16: 3.0}, {}, float, 4)
    assert (only.sizes, only.expected_cost) == ((), 14.0)


@pytest.mark.parametrize(
    ("histogram", "size_costs", "eager", "graphs"),
    [
        ({}, {1: 1.0}, 1.0, 1),
        ({1: 0.0}, {1: 1.0}, 1.0, 1),
        ({0: 1.0}, {1: 1.0}, 1.0, 1),
        ({1: -1.0}, {1: 1.0}, 1.0, 1),
        ({1: float("nan")}, {1: 1.0}, 1.0, 1),
        ({1: 1.0}, {0: 1.0}, 1.0, 1),
        ({1: 1.0}, {1: float("inf")}, 1.0, 1),
        ({1: 1.0}, {1: 1.0}, float("nan"), 1),
        ({1: 1.0}, {1: 1.0}, 1.0, -1),
    ],
)
def test_figures_that_mean_nothing_are_refused(histogram: dict, size_costs: dict, eager: float, graphs: int) -> None:
    with pytest.raises(ValueError):
        optimal_sizes(histogram, size_costs, lambda _: eager, graphs)


@pytest.mark.parametrize("spikes", [1, 128])
def test_8192_distinct_rows_have_an_optimum_for_each_number_of_up_to_64_graphs(spikes: int) -> None:
    """P8: each with as many sizes, and none dearer than with a graph less."""
    histogram = {row: 1000.0 if row % spikes == 0 else 1.0 for row in range(1, 8193)}
    size_costs = {size: 100 + size * 0.1 for size in range(1, 8193)}
    optima = optimal_sizes(histogram, size_costs, lambda rows: 300.0 + rows, 64)
    assert [len(optimum.sizes) for optimum in optima] == list(range(65))
    costs = [optimum.expected_cost for optimum in optima]
    assert costs == sorted(costs, reverse=True)


def test_the_hull_of_a_sample_leaves_out_no_vertex() -> None:
    """P8: histograms beyond the sample, with spikes, against every j looking at every i."""
    rng = np.random.default_rng(0)
    for spikes in (1, 50, 333):
        weight = np.cumsum(np.where(np.arange(2000) % spikes == 0, 1000.0, 1.0))
        costs = 50 + np.cumsum(rng.random(2000))
        least = weight * costs
        for _ in range(4):
            hull, every = optimal._on_hull(least, weight, costs), optimal._of_all(least, weight, costs)
            index = np.arange(2000)
            assert (hull <= index).all() and len(least) > optimal.SAMPLED_POINTS
            by_hull = least[hull] + costs * (weight - weight[hull])
            assert by_hull == pytest.approx(least[every] + costs * (weight - weight[every]), rel=1e-12)
            least = by_hull


@pytest.mark.parametrize("count", [1000, 1024, 2001])
def test_every_point_of_a_convex_curve_is_a_vertex_the_last_too(count: int) -> None:
    """P8: more points than a sample has."""
    x = np.arange(float(count))
    vertices, slopes = optimal._lower_hull(x, x * x)
    assert vertices.tolist() == list(range(count)) and slopes.tolist() == [2.0 * i + 1 for i in range(count - 1)]
