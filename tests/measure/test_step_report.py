"""Tables of the bundled steps: the roofline's share by hand, and crossings that agree between points and model."""

import attrs
import numpy as np
import pytest

from replay_sim.config.shapes import FLASH_RANK
from replay_sim.measure.records import bundled_records
from replay_sim.measure.step_model import bundled_model
from replay_sim.measure.step_report import (
    HOST_SPEEDS,
    crossing_table,
    modelled_crossing_table,
    roofline_shares,
    roofline_table,
)
from replay_sim.measure.trim_curve import crossing, trim_curves
from replay_sim.measure.trim_model import modelled_crossings

POINTS = [point for _, record in bundled_records("steps") if record.environment["gpu"] for point in record.points]
MODEL = bundled_model()


def test_the_rooflines_share_is_that_of_the_points_and_below_one() -> None:
    """Issue 4, point 1: no step is faster than what the device allows."""
    shares = roofline_shares(POINTS)
    eager = [p["limit_us"] / p["step_us"] for p in POINTS if (p["arm"], p["num_local_experts"]) == ("eager_off", 96)]
    assert shares["eager_off", 96].n == len(eager) == 6
    assert shares["eager_off", 96].median == pytest.approx(np.median(eager))
    assert max(p["limit_us"] / p["step_us"] for p in POINTS) < 1
    assert sum(share.n for share in shares.values()) == len(POINTS)
    assert roofline_table(POINTS).count("\n") == len(shares) + 1


def test_measured_and_modelled_crossings_agree_where_points_bracket_one() -> None:
    """Issue 4, point 3: equal prompts, a rank of 48 experts, in graphs with an eager break, with doubt from both."""
    for reqs in (4, 16):
        (curve,) = (
            curve
            for curve in trim_curves(POINTS)
            if attrs.astuple(curve.key) == ("piecewise_replay_eager", 128, 48, reqs, True)
        )
        measured = crossing(curve)
        tokens = range(reqs * 128 + 32, 8193, 64)
        (modelled,) = modelled_crossings(MODEL, FLASH_RANK, curve.key.arm, tokens, [MODEL.launch_us], reqs)
        assert measured.low - 100 < modelled < measured.high + 100
        assert np.isfinite(measured.tokens)


def test_where_launches_bound_the_threshold_follows_the_hosts_speed() -> None:
    """Eight experts: eager replay pays the later the slower the host; in one launch it always pays."""
    shape = attrs.evolve(FLASH_RANK, num_local_experts=8)
    tokens = range(160, 8193, 64)
    eager = modelled_crossings(MODEL, shape, "eager_replay", tokens, HOST_SPEEDS)
    assert 600 < eager[0] < eager[1] < eager[2] < 2500
    assert modelled_crossings(MODEL, shape, "piecewise_replay_one_launch", tokens, HOST_SPEEDS) == [160] * 3


def test_both_tables_have_a_row_a_curve() -> None:
    assert crossing_table(POINTS).count("\n") == len(trim_curves(POINTS)) + 1
    table = modelled_crossing_table(MODEL)
    assert table.count("\n") == 4 * 3 * 3 + 1 and "160 or fewer" in table
