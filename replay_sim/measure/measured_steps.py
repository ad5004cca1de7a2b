"""The measured steps that a model is fitted to and judged by, read from `steps` records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np

from replay_sim.config.shapes import SHAPES, DecoderShape
from replay_sim.measure.records import Point, Record
from replay_sim.measure.roofline import rates_of
from replay_sim.measure.step_case import case_of_point
from replay_sim.measure.step_features import Floats, ModelStep

ARM_NAMES = (
    "eager_off",
    "eager_replay",
    "piecewise_off",
    "piecewise_replay_eager",
    "piecewise_replay_graphs",
    "piecewise_replay_one_launch",
    "full",
)
"""The arms of a `steps` record (product.md, Measuring), as figures show them."""


@attrs.frozen(kw_only=True)
class StepPoint:
    """One measured step: `arm`, `sweep`, whether it is kept from fitting, and its medians in microseconds.

    `device_us` is None where the step was not profiled.
    """

    arm: str
    sweep: str
    step: ModelStep
    held_out: bool
    step_us: float
    host_us: float
    device_us: float | None


def shape_of_point(shape: DecoderShape, point: Point) -> DecoderShape:
    """`shape` with the point's window and experts of this rank."""
    window, experts = point["window"], point["num_local_experts"]
    assert isinstance(window, int) and isinstance(experts, int)
    return attrs.evolve(shape, window=window, num_local_experts=experts)


def measured_steps(records: Iterable[Record]) -> list[StepPoint]:
    """The points of `steps` records; KeyError names a key or a shape that is not known."""
    return [point for record in records for point in _of_record(record)]


def _of_record(record: Record) -> Iterator[StepPoint]:
    shape, rates = SHAPES[str(record.settings["model"])], rates_of(record.settings)
    for point in record.points:
        device_us = point["device_us"]
        yield StepPoint(
            arm=str(point["arm"]),
            sweep=str(point["sweep"]),
            step=ModelStep(
                shape_of_point(shape, point),
                case_of_point(point),
                rates,
                launch_us=_number(point, "launch_us"),
            ),
            held_out=bool(point["held_out"]),
            step_us=_number(point, "step_us"),
            host_us=_number(point, "host_us"),
            device_us=None if device_us is None else _number(point, "device_us"),
        )


def _number(point: Point, key: str) -> float:
    value = point[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return float(value)


def columns(points: Sequence[StepPoint]) -> tuple[Floats, Floats, Floats]:
    """step_us, host_us and device_us float64 (P) each; NaN where a step was not profiled."""
    device = [np.nan if point.device_us is None else point.device_us for point in points]
    return (
        np.array([point.step_us for point in points]),
        np.array([point.host_us for point in points]),
        np.array(device),
    )
