"""The trim threshold from measured points: curves, crossing and what a threshold costs, on points of a known law."""

import math

import numpy as np
import pytest

from replay_sim.measure.trim_curve import crossing, threshold_costs, trim_curves

SIZES = (256, 512, 768, 1024, 2048)
# Microseconds by padded tokens: without the break a line, with it a dearer start and half the slope: they cross at 800.
WITHOUT = {size: 1000.0 + size for size in SIZES}
WITH = {size: 1400.0 + size / 2 for size in SIZES}


def point(arm: str, tokens: int, step_us: float, *, spread: float = 0.0, reqs: int = 1, **changes):
    values = {
        "sweep": "threshold",
        "arm": arm,
        "num_tokens": tokens,
        "padded_tokens": min(size for size in SIZES if size >= tokens),
        "num_reqs": reqs,
        "longest_query": -(-tokens // reqs),
        "num_decodes": 0,
        "window": 128,
        "num_local_experts": 48,
        "step_us": step_us,
        "p10": step_us - spread,
        "p90": step_us + spread,
        "n": 9,
    }
    return values | changes


def points(spread: float = 0.0, **changes):
    arms = (("piecewise_off", WITHOUT), ("piecewise_replay_graphs", WITH))
    return [point(arm, size, law[size], spread=spread, **changes) for arm, law in arms for size in SIZES]


def test_the_crossing_is_where_both_lines_of_the_law_meet() -> None:
    (curve,) = trim_curves(points())
    assert curve.key.arm == "piecewise_replay_graphs" and curve.key.in_graphs
    found = crossing(curve)
    assert found.tokens == pytest.approx(800, rel=0.01), "1000 + t = 1400 + t / 2 at 800"
    assert found.low == found.high == found.tokens, "points without spread leave no doubt"
    assert "from 7" in found.text or "from 8" in found.text


def test_doubt_grows_with_the_points_spread_and_holds_the_truth() -> None:
    narrow, wide = (crossing(trim_curves(points(spread))[0]) for spread in (10.0, 100.0))
    assert narrow.low < 800 < narrow.high and wide.low < narrow.low < narrow.high < wide.high


def test_a_break_that_always_or_never_pays_has_no_crossing_inside_and_says_so() -> None:
    always = [point("eager_off", size, 2000.0) for size in SIZES]
    always += [point("eager_replay", size, 1000.0) for size in SIZES]
    never = [point("piecewise_off", size, 1000.0) for size in SIZES]
    never += [point("piecewise_replay_eager", size, 2000.0) for size in SIZES]
    eager, graphs = trim_curves(always + never)
    assert not eager.key.in_graphs and crossing(eager).tokens == 256 and "256 tokens" in crossing(eager).text
    assert crossing(graphs).tokens == math.inf and "does not pay up to 2048" in crossing(graphs).text


def test_points_of_other_windows_experts_requests_and_lengths_are_curves_of_their_own() -> None:
    mixed = points()
    mixed += points(window=512) + points(num_local_experts=8) + points(reqs=4) + points(reqs=4, longest_query=2000)
    mixed += [point("piecewise_off", 512, 1.0, num_decodes=1), point("piecewise_off", 512, 1.0, sweep="prompt")]
    curves = trim_curves(mixed)
    assert len(curves) == 5
    for curve in curves:
        assert curve.num_tokens.tolist() == list(SIZES)
        np.testing.assert_array_equal(curve.without_us, list(WITHOUT.values()))


def test_a_threshold_costs_what_its_steps_cost_one_by_one() -> None:
    """Against adding up every step of the histogram for every threshold."""
    (curve,) = trim_curves(points())
    histogram = {100: 3.0, 256: 1.0, 257: 2.0, 700: 5.0, 1000: 4.0, 2048: 1.0, 5000: 7.0}
    costs = threshold_costs(curve, histogram)
    assert costs.left_out == 7.0

    def by_hand(threshold: float) -> float:
        total = 0.0
        for tokens, weight in histogram.items():
            if tokens <= 2048:
                size = min(size for size in SIZES if size >= tokens)
                total += weight * (WITH if size >= threshold else WITHOUT)[size]
        return total / 16.0

    for threshold in (*SIZES, math.inf):
        assert costs.of(threshold) == pytest.approx(by_hand(threshold))
    assert costs.best == 1024, "of the sizes the first beyond 800"
    assert costs.of(900) == costs.of(1024) and costs.of(4096) == costs.of(math.inf)
    assert costs.regret(1024) == 0
    assert costs.regret(768) == pytest.approx(by_hand(768) / by_hand(1024) - 1) and costs.regret(768) > 0


def test_a_histogram_beyond_all_measured_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="2048 tokens"):
        threshold_costs(trim_curves(points())[0], {4096: 1.0})
