"""What the bundled steps say, as tables: the roofline's share, where the break pays, the model's errors (issue 4)."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
from tabulate import tabulate

from replay_sim.config.shapes import SHAPES
from replay_sim.measure.measured_steps import ARM_NAMES, measured_steps
from replay_sim.measure.records import Point, bundled_records
from replay_sim.measure.step_fit import error_table
from replay_sim.measure.step_model import StepModel, bundled_model
from replay_sim.measure.trim_curve import PAIRS, crossing, trim_curves
from replay_sim.measure.trim_model import modelled_crossings

HOST_SPEEDS = (5.5, 6.4, 9.0)
"""Microseconds of a small launch: the fastest, the median and a slow moment of the host that was measured."""


@attrs.frozen
class RooflineShare:
    """limit_us over step_us of `n` steps: 10th percentile, median and 90th; 1 is as fast as the device allows."""

    n: int
    p10: float
    median: float
    p90: float


def roofline_shares(points: Iterable[Point]) -> dict[tuple[str, int], RooflineShare]:
    """The roofline's share of step time by arm and local experts, of the points of `steps` records."""
    shares: dict[tuple[str, int], list[float]] = {}
    for point in points:
        experts, limit_us, step_us = point["num_local_experts"], point["limit_us"], point["step_us"]
        assert isinstance(experts, int) and isinstance(limit_us, int | float) and isinstance(step_us, int | float)
        shares.setdefault((str(point["arm"]), experts), []).append(limit_us / step_us)
    found = {}
    for (arm, experts), of in sorted(shares.items(), key=lambda item: (ARM_NAMES.index(item[0][0]), item[0][1])):
        p10, median, p90 = (float(value) for value in np.percentile(of, (10, 50, 90)))
        found[arm, experts] = RooflineShare(len(of), p10, median, p90)
    return found


def roofline_table(points: Iterable[Point]) -> str:
    """`roofline_shares` as markdown."""
    rows = [[*key, *attrs.astuple(share)] for key, share in roofline_shares(points).items()]
    return tabulate(rows, ["arm", "local experts", "n", "p10", "median", "p90"], tablefmt="pipe", floatfmt=".2f")


def crossing_table(points: Iterable[Point]) -> str:
    """Where the break begins to pay as measured, by arm, requests, experts and window, as markdown."""
    rows = []
    for curve in trim_curves(points):
        key = curve.key
        lengths = "equal" if key.equal_lengths else "unequal"
        rows.append([key.arm, key.num_local_experts, key.window, key.num_reqs, lengths, crossing(curve).text])
    headers = ["arm with the break", "local experts", "window", "requests", "lengths", "the break"]
    return tabulate(rows, headers, tablefmt="pipe")


def modelled_crossing_table(model: StepModel) -> str:
    """Where the break begins to pay as modelled, by arm, local experts, requests and the host's speed, as markdown.

    Asked for at every 128 tokens from 32 above the requests' windows on, up to 8,192.
    """
    rows = []
    for arm in PAIRS:
        for experts in (8, 48, 96):
            shape = attrs.evolve(SHAPES[model.shape], num_local_experts=experts)
            for reqs in (1, 4, 16):
                tokens = range(reqs * shape.window + 32, 8193, 128)
                at = modelled_crossings(model, shape, arm, tokens, HOST_SPEEDS, reqs)
                rows.append([arm, experts, reqs, *(_crossing_text(count, tokens[0]) for count in at)])
    headers = ["arm with the break", "local experts", "requests", *(f"{speed} µs a launch" for speed in HOST_SPEEDS)]
    return tabulate(rows, headers, tablefmt="pipe")


def _crossing_text(count: float, least: int) -> str:
    return f"{least:,} or fewer" if count <= least else f"{count:,.0f}"


def main() -> None:
    """Print all tables of the bundled records of a GPU, and of the model that is fitted to them."""
    records = [record for _, record in bundled_records("steps") if record.environment["gpu"]]
    points = [point for record in records for point in record.points]
    model = bundled_model()
    print("Roofline over step time\n", roofline_table(points), sep="\n")
    print("\nWhere the break pays, measured\n", crossing_table(points), sep="\n")
    if model is not None:
        print(f"\nWhere the break pays, {model.source}\n", modelled_crossing_table(model), sep="\n")
        print("\nErrors of the model\n", error_table(measured_steps(records), model.coefficients), sep="\n")


if __name__ == "__main__":
    main()
