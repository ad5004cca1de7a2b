"""The measured trim threshold: steps with and without the break, where they cross, what a wrong one costs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.measure.records import Point

Floats = npt.NDArray[np.float64]

PAIRS = {
    "eager_replay": "eager_off",
    "piecewise_replay_eager": "piecewise_off",
    "piecewise_replay_graphs": "piecewise_off",
    "piecewise_replay_one_launch": "piecewise_off",
}
"""Each arm with the break, and the arm that is the same but for it."""
SWEEPS = ("threshold", "window", "experts")
"""The sweeps whose points are prompts from their start, at several token counts."""
NORMAL_SPREAD = 2 * 1.2816
"""p90 - p10 of a normal distribution in its standard deviations."""
MEDIAN_ERROR = 1.2533
"""The standard error of a median of n, in standard deviations over the root of n."""
DRAWS = 2000


@attrs.frozen(order=True)
class CurveKey:
    """What the points of one curve share; `arm` is the one with the break."""

    arm: str
    window: int
    num_local_experts: int
    num_reqs: int
    equal_lengths: bool

    @property
    def in_graphs(self) -> bool:
        """Whether the step runs in a PIECEWISE graph, whose padded size decides on the break (D2)."""
        return self.arm != "eager_replay"


@attrs.frozen(eq=False)
class TrimCurve:
    """Step time in microseconds without and with the break, by ascending `num_tokens`; float64 (N) each but `key`.

    `padded_tokens` int64 (N) are those of the graph, or the tokens of an eager step. `errors` (N, 2) are the standard
    errors of both medians.
    """

    key: CurveKey
    num_tokens: npt.NDArray[np.int64]
    padded_tokens: npt.NDArray[np.int64]
    without_us: Floats
    with_us: Floats
    errors: Floats

    @property
    def gain(self) -> Floats:
        """What the break saves, as a share of the time without it; below 0 where it costs."""
        return 1 - self.with_us / self.without_us


@attrs.frozen
class Crossing:
    """The token count from which on the break pays, with the 5th and 95th percentile of its bootstrap.

    The smallest measured count where it pays at all of them, infinity where it does not pay at the largest.
    """

    tokens: float
    low: float
    high: float
    least_measured: int
    most_measured: int

    @property
    def text(self) -> str:
        """In words, with what was not measured said to be so."""
        if self.tokens <= self.least_measured:
            return f"pays from the smallest step measured on, {self.least_measured} tokens"
        if not np.isfinite(self.tokens):
            return f"does not pay up to {self.most_measured} tokens, the largest step measured"
        high = f"{self.high:.0f}" if np.isfinite(self.high) else f"more than {self.most_measured}"
        return f"pays from {self.tokens:.0f} tokens on (5th to 95th percentile {self.low:.0f} to {high})"


def trim_curves(points: Iterable[Point]) -> list[TrimCurve]:
    """The curves of `steps` points of SWEEPS, by key; only those of at least two token counts."""
    by_arm: dict[tuple[str, CurveKey], dict[int, Point]] = {}
    for point in points:
        if point["sweep"] not in SWEEPS or point["num_decodes"]:
            continue
        for arm, without in PAIRS.items():
            if point["arm"] in (arm, without):
                of = by_arm.setdefault((str(point["arm"]), _key(point, arm)), {})
                of[_count(point, "num_tokens")] = point
    curves = []
    for arm, key in sorted(by_arm):
        if arm != key.arm:
            continue
        broken, whole = by_arm[arm, key], by_arm.get((PAIRS[arm], key), {})
        tokens = sorted(broken.keys() & whole.keys())
        if len(tokens) > 1:
            curves.append(_curve(key, [whole[count] for count in tokens], [broken[count] for count in tokens]))
    return curves


def crossing(curve: TrimCurve, seed: int = 0) -> Crossing:
    """Where the break begins to pay for good: between the last count that loses and the next, by the gains there.

    The bootstrap draws both medians of every point anew from their standard errors.
    """
    random = np.random.default_rng(seed)
    noise = random.standard_normal((DRAWS, *curve.errors.shape)) * curve.errors
    drawn = [
        crossing_of(curve.num_tokens, 1 - (curve.with_us + with_) / (curve.without_us + without))
        for without, with_ in zip(noise[..., 0], noise[..., 1], strict=True)
    ]
    low, high = np.percentile(drawn, (5, 95), method="nearest")
    ends = int(curve.num_tokens[0]), int(curve.num_tokens[-1])
    return Crossing(crossing_of(curve.num_tokens, curve.gain), float(low), float(high), *ends)


@attrs.frozen
class ThresholdCosts:
    """Expected microseconds of a step by threshold, over a histogram of steps; infinity is no threshold at all.

    `left_out` is the weight of steps larger than what was measured, which no threshold concerns.
    """

    by_threshold: Mapping[float, float]
    left_out: float

    @property
    def best(self) -> float:
        """The threshold of least cost; the largest of equals, whose graphs break least."""
        return min(self.by_threshold, key=lambda threshold: (self.by_threshold[threshold], -threshold))

    def of(self, threshold: float) -> float:
        """The cost of any threshold: that of the smallest candidate at or above it."""
        return self.by_threshold[min(candidate for candidate in self.by_threshold if candidate >= threshold)]

    def regret(self, threshold: float) -> float:
        """What `threshold` costs more than the best, as a share of it."""
        return self.of(threshold) / self.by_threshold[self.best] - 1


def threshold_costs(curve: TrimCurve, histogram: Mapping[int, float]) -> ThresholdCosts:
    """What each threshold costs on steps whose weight by token count is `histogram`.

    A step takes the times of the smallest measured padded size that holds it, and breaks where that size is at least
    the threshold. Raises ValueError if no step is within what was measured.
    """
    sizes = sorted(set(curve.padded_tokens.tolist()))
    times = np.array([_at_size(curve, size) for size in sizes])
    weights, left_out = np.zeros(len(sizes)), 0.0
    for tokens, weight in histogram.items():
        index = bisect.bisect_left(sizes, tokens)
        if index < len(sizes):
            weights[index] += weight
        else:
            left_out += weight
    if not weights.sum() > 0:
        raise ValueError(f"histogram has no step of at most {sizes[-1]} tokens, the largest measured")
    without, with_ = (weights / weights.sum() * times.T).cumsum(axis=1)
    losses = {float(size): float(with_[-1] - _before(with_, i) + _before(without, i)) for i, size in enumerate(sizes)}
    return ThresholdCosts(losses | {float("inf"): float(without[-1])}, left_out)


def _key(point: Point, arm: str) -> CurveKey:
    tokens, reqs = _count(point, "num_tokens"), _count(point, "num_reqs")
    equal = _count(point, "longest_query") <= -(-tokens // reqs)
    return CurveKey(arm, _count(point, "window"), _count(point, "num_local_experts"), reqs, equal)


def _count(point: Point, key: str) -> int:
    value = point[key]
    assert isinstance(value, int), f"{key} is {value!r}"
    return value


def _curve(key: CurveKey, whole: Sequence[Point], broken: Sequence[Point]) -> TrimCurve:
    def column(points: Sequence[Point], name: str) -> Floats:
        return np.array([point[name] for point in points], np.float64)

    def error(points: Sequence[Point]) -> Floats:
        spread = (column(points, "p90") - column(points, "p10")) / NORMAL_SPREAD
        return MEDIAN_ERROR * spread / np.sqrt(column(points, "n"))

    return TrimCurve(
        key=key,
        num_tokens=column(whole, "num_tokens").astype(np.int64),
        padded_tokens=column(whole, "padded_tokens").astype(np.int64),
        without_us=column(whole, "step_us"),
        with_us=column(broken, "step_us"),
        errors=np.stack([error(whole), error(broken)], axis=1),
    )


def crossing_of(tokens: npt.NDArray[np.int64], gain: Floats) -> float:
    """The count of ascending `tokens` (N) from which on `gain` float64 (N) stays above 0, on the line between two.

    Infinity if the last is not above 0, the first count if all are.
    """
    losing = np.flatnonzero(gain <= 0)
    if not len(losing):
        return float(tokens[0])
    last = int(losing[-1])
    if last == len(tokens) - 1:
        return float("inf")
    share = gain[last] / (gain[last] - gain[last + 1])
    return float(tokens[last] + share * (tokens[last + 1] - tokens[last]))


def _at_size(curve: TrimCurve, size: int) -> tuple[float, float]:
    """Mean times without and with the break of the points padded to one size."""
    at = curve.padded_tokens == size
    return float(curve.without_us[at].mean()), float(curve.with_us[at].mean())


def _before(cumulative: Floats, index: int) -> float:
    return float(cumulative[index - 1]) if index else 0.0
