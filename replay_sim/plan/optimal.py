"""The optimal plan: the replay sizes of least expected cost for a histogram of replay rows, exactly (P8)."""

from collections.abc import Callable, Mapping

import attrs
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PRUNING_PASSES = 4
SAMPLES, SAMPLED_POINTS = 2, 256


@attrs.frozen
class OptimalSizes:
    """The best replay sizes of at most so many graphs, ascending, and a replay batch's expected cost."""

    sizes: tuple[int, ...]
    expected_cost: float


def optimal_sizes(
    histogram: Mapping[int, float],
    size_costs: Mapping[int, float],
    eager_cost: Callable[[int], float],
    max_graphs: int,
) -> list[OptimalSizes]:
    """Return the optimum for at most 0, 1, .. `max_graphs` graphs, all from one run (P8).

    The list ends where no candidates are left that differ in what they hold. A replay batch takes the
    smallest captured size that holds its rows, and runs eagerly beyond the largest (G3).

    Let F(k, j) be the least cost of all batches that the j-th candidate holds, with at most k sizes of which
    the j-th is the largest, and W(j) their weight. F(k, j) is the least F(k - 1, i) + cost(j) (W(j) - W(i))
    over i <= j: the lowest of lines in cost(j). Where costs do not fall as sizes grow, i > j never wins, so
    that all j look up one lower hull of the points (W(i), F(k - 1, i)); else every j looks at every i.

    Args:
        histogram: weight of every count of replay rows; zero weights are left out.
        size_costs: cost of running the graph of every candidate size, in any one unit.
        eager_cost: cost of running a count of rows eagerly, in the same unit.
        max_graphs: most graphs.

    Raises:
        ValueError: an empty histogram, or a row count, size, weight or cost that is not finite and in range.
    """
    rows, weights = _checked("histogram", histogram)
    sizes, costs = _checked("size_costs", size_costs) if size_costs else (rows[:0], weights[:0])
    if max_graphs < 0 or not weights.sum() > 0:
        raise ValueError(f"max_graphs {max_graphs} must be at least 0, and the histogram have weight")
    rows, weights = rows[weights > 0], weights[weights > 0]
    eager = weights * [float(eager_cost(int(count))) for count in rows]
    if not np.isfinite(eager).all():
        raise ValueError("eager_cost must be finite for every row count of the histogram")
    held = np.searchsorted(rows, sizes, side="right")
    weight_up_to = np.concatenate([[0.0], weights.cumsum()])
    chosen = _distinct(weight_up_to[held], sizes, costs)
    zero = np.zeros(1, np.int64)
    sizes = np.concatenate([zero, sizes[chosen]])
    costs = np.concatenate([zero, costs[chosen]])
    held = np.concatenate([zero, held[chosen]])
    weight_held = weight_up_to[held]
    eager_beyond = np.concatenate([eager[::-1].cumsum()[::-1], [0.0]])[held]
    return _optima(sizes, costs, weight_held, eager_beyond, float(weights.sum()), max_graphs)


def _checked(name: str, figures: Mapping[int, float]) -> tuple[Ints, Floats]:
    """Return keys and values as arrays in ascending order of keys."""
    keys = np.array(sorted(figures), np.int64)
    values = np.array([figures[int(key)] for key in keys], np.float64)
    if not keys.size or keys[0] < 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"{name} must map positive integers to finite figures of at least 0")
    return keys, values


def _distinct(weight_held: Floats, sizes: Ints, costs: Floats) -> Ints:
    """Return the indices of the candidates that can win, ascending.

    Of sizes that hold the same batches only the cheapest can, the smallest of these if several are; one that
    holds none cannot.
    """
    order = np.lexsort((sizes, costs, weight_held))
    _, first = np.unique(weight_held[order], return_index=True)
    chosen = order[first]
    return chosen[weight_held[chosen] > 0]


def _optima(
    sizes: Ints, costs: Floats, weight_held: Floats, eager_beyond: Floats, total: float, max_graphs: int
) -> list[OptimalSizes]:
    """Run the recurrence and read off the optimum for every number of graphs."""
    best_before = _on_hull if (np.diff(costs[1:]) >= 0).all() else _of_all
    optima = [OptimalSizes((), float(eager_beyond[0]) / total)]
    least = costs * weight_held
    before: list[Ints] = [np.zeros(len(sizes), np.int64)]
    for _ in range(min(max_graphs, len(sizes) - 1)):
        last = int(np.argmin(least + eager_beyond))
        chosen = _traced(sizes, before, last)
        optima.append(OptimalSizes(chosen, float(least[last] + eager_beyond[last]) / total))
        before.append(best_before(least, weight_held, costs))
        least = least[before[-1]] + costs * (weight_held - weight_held[before[-1]])
    return optima


def _traced(sizes: Ints, before: list[Ints], last: int) -> tuple[int, ...]:
    """Return the sizes that lead to `last`; a step that stays where it is takes no size more."""
    chosen = set()
    for step in reversed(before):
        if last == 0:
            break
        chosen.add(int(sizes[last]))
        last = int(step[last])
    return tuple(sorted(chosen))


def _of_all(least: Floats, weight_held: Floats, costs: Floats) -> Ints:
    """For every j, the i <= j of least `least[i] - costs[j] * weight_held[i]`, by looking at every one."""
    lines = zip(range(1, len(costs) + 1), costs, strict=True)
    return np.array([np.argmin(least[:end] - cost * weight_held[:end]) for end, cost in lines], np.int64)


def _on_hull(least: Floats, weight_held: Floats, costs: Floats) -> Ints:
    """As `_of_all`, for costs that do not fall: the vertex where the lower hull's slope passes the cost."""
    vertices, slopes = _lower_hull(weight_held, least)
    found = vertices[np.searchsorted(slopes, costs, side="left")]
    return np.minimum(found, np.arange(len(costs)))


def _lower_hull(x: Floats, y: Floats) -> tuple[Ints, Floats]:
    """Return the vertices of the lower convex hull of points of ascending `x`, and the slopes between.

    What lies above the hull of a sample is no vertex; nor is what lies above the line between its neighbours. The
    first sample is even, the second, where many are left, the lowest points between those of the first.
    """
    points = np.arange(len(x))
    heights = np.zeros(len(x))
    for _ in range(SAMPLES):
        if len(points) <= SAMPLED_POINTS:
            break
        sampled, _ = _chained(points[_lowest_of_blocks(heights)], x, y)
        heights = y[points] - np.interp(x[points], x[sampled], y[sampled])
        points, heights = points[heights <= 0], heights[heights <= 0]
    for _ in range(PRUNING_PASSES):
        slopes = np.diff(y[points]) / np.diff(x[points])
        is_vertex = np.ones(len(points), bool)
        is_vertex[1:-1] = slopes[:-1] < slopes[1:]
        if is_vertex.all():
            return points, slopes
        points = points[is_vertex]
    return _chained(points, x, y)


def _lowest_of_blocks(heights: Floats) -> Ints:
    """Indices of the first and the last height, and of the first lowest of each of SAMPLED_POINTS blocks, ascending."""
    width = -(-len(heights) // SAMPLED_POINTS)
    whole = len(heights) // width
    lowest = np.arange(whole) * width + heights[: whole * width].reshape(whole, width).argmin(axis=1)
    return np.unique(np.concatenate([[0], lowest, [len(heights) - 1]]))


def _chained(points: Ints, x: Floats, y: Floats) -> tuple[Ints, Floats]:
    """The hull by one walk over the points that dropping those above their neighbours has left."""
    xs, ys = x[points].tolist(), y[points].tolist()
    top, stack, slopes = 0, [0], [-np.inf]
    for point in range(1, len(xs)):
        at, height = xs[point], ys[point]
        slope = (height - ys[top]) / (at - xs[top])
        while slope <= slopes[-1]:
            slopes.pop()
            stack.pop()
            top = stack[-1]
            slope = (height - ys[top]) / (at - xs[top])
        stack.append(point)
        slopes.append(slope)
        top = point
    return points[stack], np.array(slopes[1:])
