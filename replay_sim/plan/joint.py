"""The joint optimum: model sizes, trim threshold and replay sizes of least expected step time (P8, issue 6)."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.plan.optimal import OptimalSizes, optimal_sizes
from replay_sim.plan.step_costs import StepCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Curve = list[tuple[float, tuple[int, ...]]]
"""Summed cost and sizes for at most 0, 1, .. sizes."""
MOST_ROUNDS = 20


@attrs.frozen(eq=False)
class MixedSteps:
    """Steps that no FULL graph takes: `tokens` and kept `rows` int64 (n,), how often each occurs float64 (n,)."""

    tokens: Ints
    rows: Ints
    weights: Floats


@attrs.frozen
class JointSizes:
    """A choice of all three, sizes ascending, and a mixed step's expected microseconds.

    trim_threshold: the smallest model size that breaks, None if none does.
    """

    model_sizes: tuple[int, ...]
    trim_threshold: int | None
    replay_sizes: tuple[int, ...]
    expected_us: float


class JointPlanner:
    """Costs of mixed steps under any choice, and the optimum of one part given the other.

    A step takes the smallest model size that holds it and has a replay batch if that size breaks; beyond the
    largest it runs eagerly and has one if it trims (D1-D3). `kept_sizes` are model sizes that every choice has, as
    FULL graphs need them. `model_candidates` are the others to choose from, `replay_candidates` rows.
    """

    def __init__(
        self,
        steps: MixedSteps,
        costs: StepCosts,
        *,
        model_candidates: Iterable[int],
        replay_candidates: Iterable[int],
        kept_sizes: Iterable[int] = (),
    ) -> None:
        """ValueError if there are no steps."""
        if not steps.weights.sum() > 0:
            raise ValueError("steps must have weight: no step runs outside of FULL graphs")
        self.steps = steps
        self.kept_sizes = tuple(sorted(set(kept_sizes)))
        self.total_weight = float(steps.weights.sum())
        self._trims = steps.rows < steps.tokens
        sizes = self.model_candidates = tuple(sorted({*model_candidates, *self.kept_sizes}))
        self._plain_us = {size: costs.model_us(size, "PIECEWISE", False) for size in sizes}
        self._break_us = {size: costs.model_us(size, "PIECEWISE", True) for size in sizes}
        kinds = zip(steps.tokens.tolist(), self._trims.tolist(), strict=True)
        eager = {kind: costs.model_us(kind[0], "NONE", kind[1]) for kind in set(kinds)}
        pairs = zip(steps.tokens.tolist(), self._trims.tolist(), strict=True)
        self._eager_us = np.array([eager[pair] for pair in pairs], np.float64)
        rows = sorted(set(steps.rows.tolist()))
        self._rows = np.array(rows, np.int64)
        self._eager_rows_us = {row: costs.replay_us(row, False) for row in rows}
        self._graph_rows_us = {row: costs.replay_us(row, True) for row in sorted(set(replay_candidates))}
        self._segments: dict[tuple[int, int, bool, int], Curve] = {}

    def replayed(self, model_sizes: Sequence[int], threshold: int | None) -> tuple[Bools, Floats]:
        """Which steps have a replay batch, and every step's microseconds outside of the replay layers."""
        sizes = np.array([*model_sizes, 0], np.int64)
        index = np.searchsorted(sizes[:-1], self.steps.tokens)
        breaks = sizes >= threshold if threshold is not None else np.zeros(len(sizes), bool)
        us = np.array(
            [
                self._break_us[size] if broken else self._plain_us[size]
                for size, broken in zip(model_sizes, breaks[:-1], strict=True)
            ]
            + [0.0]
        )
        eager = index == len(model_sizes)
        return np.where(eager, self._trims, breaks[index]), np.where(eager, self._eager_us, us[index])

    def replay_us(self, replay_sizes: Sequence[int]) -> Floats:
        """What every step's rows take in the replay layers, if it has a replay batch (G3)."""
        index = np.searchsorted(np.array(replay_sizes, np.int64), self._rows)
        us = [
            self._eager_rows_us[row] if at == len(replay_sizes) else self._graph_rows_us[replay_sizes[at]]
            for row, at in zip(self._rows.tolist(), index.tolist(), strict=True)
        ]
        return np.array(us)[np.searchsorted(self._rows, self.steps.rows)]

    def expected_us(self, model_sizes: Sequence[int], threshold: int | None, replay_sizes: Sequence[int]) -> float:
        """A mixed step's expected microseconds under one choice."""
        has_batch, us = self.replayed(model_sizes, threshold)
        us = us + np.where(has_batch, self.replay_us(replay_sizes), 0.0)
        return float((us * self.steps.weights).sum()) / self.total_weight

    def replay_optima(self, model_sizes: Sequence[int], threshold: int | None, max_graphs: int) -> list[OptimalSizes]:
        """The best replay sizes for at most 0, 1, .. graphs, given the rest; a mixed step's expected cost (P8)."""
        has_batch, us = self.replayed(model_sizes, threshold)
        weights = np.where(has_batch, self.steps.weights, 0.0)
        outside = float((us * self.steps.weights).sum()) / self.total_weight
        if not weights.sum() > 0:
            return [OptimalSizes((), outside)]
        by_row = np.bincount(np.searchsorted(self._rows, self.steps.rows), weights, len(self._rows))
        histogram = dict(zip(self._rows.tolist(), by_row.tolist(), strict=True))
        optima = optimal_sizes(histogram, self._graph_rows_us, self._eager_rows_us.__getitem__, max_graphs)
        share = float(weights.sum()) / self.total_weight
        return [OptimalSizes(best.sizes, outside + share * best.expected_cost) for best in optima]

    def model_optima(self, threshold: int | None, replay_us: Floats, max_graphs: int) -> list[OptimalSizes]:
        """The best model sizes that hold `kept_sizes` and `threshold`, and then at most 0, 1, .. more.

        `replay_us` is what `replay_us` returns. Empty if `max_graphs` do not suffice for those that must be there.
        The sizes that must be there cut the steps into segments; which other sizes a segment has changes nothing
        outside of it, so that each is solved alone (P8) and graphs are shared out among them exactly.
        """
        fixed = sorted({*self.kept_sizes} | ({threshold} if threshold is not None else set()))
        others = max_graphs - len(fixed)
        if others < 0:
            return []
        curve: Curve = [(0.0, ())]
        for low, high in pairwise([0, *fixed, None]):
            assert low is not None
            curve = _shared_out(curve, self._segment(low, high, threshold, replay_us, others), others)
        return [OptimalSizes(tuple(sorted((*fixed, *sizes))), cost / self.total_weight) for cost, sizes in curve]

    def without_unused(self, choice: JointSizes) -> JointSizes:
        """The choice without the model sizes that no step takes and that need not be there: it costs as much."""
        sizes = np.array(choice.model_sizes, np.int64)
        taken = np.unique(np.searchsorted(sizes, self.steps.tokens))
        used = {*sizes[taken[taken < len(sizes)]].tolist(), *self.kept_sizes}
        threshold = choice.trim_threshold
        breaking = [size for size in used if threshold is not None and size >= threshold]
        return attrs.evolve(choice, model_sizes=tuple(sorted(used)), trim_threshold=min(breaking, default=None))

    def _segment(self, low: int, high: int | None, threshold: int | None, replay_us: Floats, most: int) -> Curve:
        """The curve of sizes between `low` and `high` for the steps above `low` that `high` holds; None holds all.

        Steps that none of these sizes holds run at `high`, or eagerly where that is None. Where sizes break, the replay
        layers cost the same whatever the size, so that they are left out of the choice and added after it.
        """
        breaks = threshold is not None and low >= threshold
        inside = self.steps.tokens > low
        if high is not None:
            inside &= self.steps.tokens <= high
        weights = self.steps.weights[inside]
        replayed = float((replay_us[inside] * weights).sum()) if breaks else 0.0
        if high is None:
            rest = self._eager_us + np.where(self._trims, replay_us, 0.0)
            curve = self._solved(low, high, breaks, inside, rest - replay_us if breaks else rest, most)
        elif high == threshold:
            curve = self._solved(low, high, breaks, inside, self._break_us[high] + replay_us, most)
        else:
            key = (low, high, breaks, most)
            if key not in self._segments:
                us = self._break_us[high] if breaks else self._plain_us[high]
                self._segments[key] = self._solved(low, high, breaks, inside, np.full_like(replay_us, us), most)
            curve = self._segments[key]
        return [(cost + replayed, sizes) for cost, sizes in curve]

    def _solved(self, low: int, high: int | None, breaks: bool, inside: Bools, rest: Floats, most: int) -> Curve:
        """The curve of one segment, from one run; `rest` is each step's cost where none of the sizes holds it."""
        weights = self.steps.weights[inside]
        if not weights.sum() > 0:
            return [(0.0, ())]
        tokens, place = np.unique(self.steps.tokens[inside], return_inverse=True)
        by_tokens = np.bincount(place, weights)
        mean = np.bincount(place, weights * rest[inside]) / np.where(by_tokens > 0, by_tokens, 1.0)
        eager = dict(zip(tokens.tolist(), mean.tolist(), strict=True))
        us = self._break_us if breaks else self._plain_us
        sizes = {size: cost for size, cost in us.items() if low < size and (high is None or size < high)}
        histogram = dict(zip(tokens.tolist(), by_tokens.tolist(), strict=True))
        optima = optimal_sizes(histogram, sizes, eager.__getitem__, most)
        return [(best.expected_cost * float(weights.sum()), best.sizes) for best in optima]


def _shared_out(first: Curve, second: Curve, most: int) -> Curve:
    """The best of two segments together for at most 0, 1, .. `most` sizes."""
    curve: Curve = []
    for count in range(min(len(first) + len(second) - 2, most) + 1):
        splits = [(i, count - i) for i in range(len(first)) if 0 <= count - i < len(second)]
        cost, i, j = min((first[i][0] + second[j][0], i, j) for i, j in splits)
        curve.append((cost, (*first[i][1], *second[j][1])))
    return curve


def joint_optimum(
    planner: JointPlanner,
    thresholds: Iterable[int | None],
    starts: Iterable[Sequence[int]],
    *,
    max_model_graphs: int,
    max_replay_graphs: int,
) -> JointSizes | None:
    """Return the best choice found, None if no threshold leaves room for the sizes that must be there.

    For every threshold, None for no break, and from every start, a list of replay sizes: the model sizes that are
    exactly best for these replay sizes, then the replay sizes that are exactly best for those, in turn until the
    cost falls no more. Each half is exact, and no half makes it worse; where both halves stand still the choice is
    best among those that differ in one part only, which need not be the best of all. So a choice that is given as
    its threshold and as a start is never beaten by what is returned.
    """
    best: JointSizes | None = None
    begins = [tuple(start) for start in starts]
    for threshold in thresholds:
        for start in begins:
            found = _alternated(planner, threshold, start, max_model_graphs, max_replay_graphs)
            if found is not None and (best is None or found.expected_us < best.expected_us):
                best = found
    return best


def trade_offs(
    planner: JointPlanner, choice: JointSizes, *, max_model_graphs: int, max_replay_graphs: int
) -> list[list[JointSizes]]:
    """For every number of model graphs, from those that must be there on, the curve of 0, 1, .. replay graphs.

    The threshold is that of `choice`; the model sizes are best for its replay sizes, the replay sizes for them.
    """
    threshold = choice.trim_threshold
    models = planner.model_optima(threshold, planner.replay_us(choice.replay_sizes), max_model_graphs)
    return [
        [
            planner.without_unused(JointSizes(model.sizes, threshold, replay.sizes, replay.expected_cost))
            for replay in planner.replay_optima(model.sizes, threshold, max_replay_graphs)
        ]
        for model in models
    ]


def _alternated(
    planner: JointPlanner, threshold: int | None, replay_sizes: tuple[int, ...], max_model: int, max_replay: int
) -> JointSizes | None:
    """The fixed point of both halves from one start."""
    found: JointSizes | None = None
    for _ in range(MOST_ROUNDS):
        models = planner.model_optima(threshold, planner.replay_us(replay_sizes), max_model)
        if not models:
            return None
        replays = planner.replay_optima(models[-1].sizes, threshold, max_replay)
        replay_sizes = replays[-1].sizes
        if found is not None and replays[-1].expected_cost >= found.expected_us * (1 - 1e-12):
            break
        found = JointSizes(models[-1].sizes, threshold, replay_sizes, replays[-1].expected_cost)
    return found
