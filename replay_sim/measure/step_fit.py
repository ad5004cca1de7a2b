"""Fits the step-time model to the bundled records, and says how wrong it is on points that it did not see (issue 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from replay_sim.measure.least_squares import fit_positive
from replay_sim.measure.measured_calls import MeasuredCalls, measured_calls
from replay_sim.measure.measured_steps import ARM_NAMES, StepPoint, columns, measured_steps
from replay_sim.measure.records import Record, bundled_records, write_record
from replay_sim.measure.roofline import Rates, rates_of
from replay_sim.measure.step_features import Floats, step_arrays
from replay_sim.measure.step_form import PRIORS, Coefficients, operation_us, step_times
from replay_sim.measure.step_model import (
    FITTED_FILE,
    HOST_BOUND,
    HOST_SHARE,
    ArmError,
    StepModel,
    compared,
    write_model,
)

HOST_WEIGHT, DEVICE_WEIGHT, CALL_WEIGHT = 0.3, 0.7, 0.7
"""How much a relative error of a host's, a device's or an operation's time counts beside one of a step's."""
OUTLIER = 0.05
"""A relative error from which on a point counts as one that the host's noise spoilt."""
PRIOR_WEIGHT = 0.003
RECORDS = Path(__file__).parents[1] / "records"


def fit_coefficients(points: Sequence[StepPoint], calls: MeasuredCalls | None = None) -> dict[str, float]:
    """The coefficients of PRIORS that fit the points that are not held out; relative errors, outliers damped.

    `calls` are operations timed apart, which say what of a step's time is whose. Raises ValueError when no point is
    left to fit.
    """
    seen = [point for point in points if not point.held_out]
    if not seen:
        raise ValueError(f"{len(points)} points, all held out: none is left to fit")
    arrays = step_arrays([point.step for point in seen])
    step_us, host_us, device_us = columns(seen)
    profiled = ~np.isnan(device_us)
    names = list(PRIORS)

    def residuals(values: Floats) -> Floats:
        named = dict(zip(names, values.tolist(), strict=True))
        times = step_times(arrays, named)
        return np.concatenate(
            [
                np.log(times.step / step_us),
                HOST_WEIGHT * np.log(times.host / host_us),
                DEVICE_WEIGHT * np.log(times.device[profiled] / device_us[profiled]),
                *([] if calls is None else [CALL_WEIGHT * np.log(operation_us(calls.ops, named) / calls.device_us)]),
            ]
        )

    start = np.array(list(PRIORS.values()))
    weight = PRIOR_WEIGHT * len(seen) ** 0.5
    fitted = fit_positive(residuals, start, outlier=OUTLIER, prior_weight=weight)
    return {name: float(f"{value:.6g}") for name, value in zip(names, fitted.tolist(), strict=True)}


def step_errors(points: Sequence[StepPoint], coefficients: Coefficients) -> tuple[Floats, Floats, Floats]:
    """Predicted over measured, less one, of step, host and device time, float64 (P) each; NaN where not measured."""
    times = step_times(step_arrays([point.step for point in points]), coefficients)
    step_us, host_us, device_us = columns(points)
    return times.step / step_us - 1, times.host / host_us - 1, times.device / device_us - 1


def held_out_errors(points: Sequence[StepPoint], coefficients: Coefficients) -> dict[str, ArmError]:
    """The error of step time on held-out points, by arm and of `all`."""
    held = [point for point in points if point.held_out]
    if not held:
        return {}
    errors = np.abs(step_errors(held, coefficients)[0])
    arms = np.array([point.arm for point in held])
    groups = {arm: errors[arms == arm] for arm in ARM_NAMES if (arms == arm).any()} | {"all": errors}
    return {name: _arm_error(of) for name, of in groups.items()}


def host_bound_error(points: Sequence[StepPoint], coefficients: Coefficients) -> dict[str, ArmError]:
    """The error on the points, held out or not, whose step the host bounded, as HOST_BOUND; empty if none was."""
    bound = [point for point in points if point.host_us >= HOST_SHARE * point.step_us]
    return {HOST_BOUND: _arm_error(np.abs(step_errors(bound, coefficients)[0]))} if bound else {}


def _arm_error(errors: Floats) -> ArmError:
    median, p95 = np.percentile(errors, (50, 95))
    return ArmError(median=round(float(median), 5), p95=round(float(p95), 5), n=len(errors))


def error_table(points: Sequence[StepPoint], coefficients: Coefficients) -> str:
    """Errors by arm and sweep as markdown: of all points the median signed one, of held-out ones median and p95."""
    from tabulate import tabulate

    step, host, device = (100 * error for error in step_errors(points, coefficients))
    held = np.array([point.held_out for point in points])
    keys = [(point.arm, point.sweep) for point in points]
    everything = [(arm, "all") for arm, _ in keys], [("all", "all")] * len(keys)
    rows: list[list[Any]] = []
    for names in (keys, *everything):
        for name in sorted(set(names)):
            of = np.array([key == name for key in names])
            seen, kept = np.abs(step[of & ~held]), np.abs(step[of & held])
            signed = [np.nanmedian(values[of]) if (~np.isnan(values[of])).any() else None for values in (host, device)]
            rows.append([*name, int(of.sum()), *_both(seen), *_both(kept), np.median(step[of]), *signed])
    headers = ["arm", "sweep", "n", "fit |%|", "fit p95", "held |%|", "held p95", "step %", "host %", "device %"]
    return tabulate(rows, headers, tablefmt="pipe", floatfmt=".1f")


def _both(errors: Floats) -> list[float | None]:
    return [float(value) for value in np.percentile(errors, (50, 95))] if len(errors) else [None, None]


def fit_model(records: Mapping[str, Record]) -> StepModel:
    """The model fitted to `steps` and `calls` records by name, all of one GPU and one decoder shape.

    Raises ValueError for records that differ in that, and for none.
    """
    points = measured_steps(record for record in records.values() if record.kind == "steps")
    calls = measured_calls(record for record in records.values() if record.kind == "calls")
    gpus = {record.environment["gpu"] for record in records.values()}
    shapes = {str(record.settings["model"]) for record in records.values()}
    if len(gpus) != 1 or len(shapes) != 1:
        raise ValueError(
            f"records of GPUs {sorted(map(str, gpus))} and models {sorted(shapes)}: allowed is one of each"
        )
    coefficients = fit_coefficients(points, calls)
    rates = [rates_of(record.settings) for record in records.values()]
    launch_us = [point.step.launch_us for point in points]
    provenance = sorted({record.provenance for record in records.values()})
    return StepModel(
        shape=shapes.pop(),
        rates=Rates(float(np.median([of.bandwidth for of in rates])), float(np.median([of.matmul for of in rates]))),
        launch_us=round(float(np.median(launch_us)), 3),
        launch_bounds=(min(launch_us), max(launch_us)),
        provenance=f"{len(points)} points of {', '.join(sorted(records))}, {'; '.join(provenance)}",
        seed=min(record.seed for record in records.values()),
        coefficients=coefficients,
        errors=held_out_errors(points, coefficients) | host_bound_error(points, coefficients),
        domain=domain_of(points),
    )


def with_predictions(record: Record, model: StepModel) -> Record:
    """A `steps` record with predicted_us of each point: at the rates of its run and the speed of its host."""
    steps = [point.step for point in measured_steps([record])]
    predicted = step_times(step_arrays(steps), model.coefficients).step.round(1).tolist()
    points = [point | {"predicted_us": us} for point, us in zip(record.points, predicted, strict=True)]
    return attrs.evolve(record, points=points)


def fitted_records() -> dict[str, Record]:
    """The bundled records of a GPU that the bundled model is fitted to, by name."""
    kinds = "steps", "calls"
    return {name: record for kind in kinds for name, record in bundled_records(kind) if record.environment["gpu"]}


def domain_of(points: Sequence[StepPoint]) -> dict[str, dict[str, tuple[int, int]]]:
    """The least and the most of what steps are compared by, by arm: of the points that were fitted."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for point in points:
        if point.held_out:
            continue
        seen = found.setdefault(point.arm, {})
        for key, value in compared(point.step.shape, point.step.case).items():
            least, most = seen.get(key, (value, value))
            seen[key] = min(least, value), max(most, value)
    return {arm: found[arm] for arm in ARM_NAMES if arm in found}


def main() -> None:
    """Fit the bundled records, write the model beside this module and its predictions into them, print its errors."""
    records = fitted_records()
    model = fit_model(records)
    write_model(model, Path(__file__).with_name(FITTED_FILE))
    steps = {name: record for name, record in records.items() if record.kind == "steps"}
    for name, record in steps.items():
        write_record(with_predictions(record, model), RECORDS / name)
    print(error_table(measured_steps(steps.values()), model.coefficients))


if __name__ == "__main__":
    main()
