"""The bundled model: it is the fit of the bundled records, and as accurate on what it did not see as it says."""

import attrs
import numpy as np
import pytest

from replay_sim.config.shapes import FLASH_RANK
from replay_sim.measure.measured_calls import measured_calls
from replay_sim.measure.measured_steps import measured_steps, shape_of_point
from replay_sim.measure.step_case import case_of_point
from replay_sim.measure.step_fit import fit_coefficients, fit_model, fitted_records, step_errors
from replay_sim.measure.step_form import operation_us
from replay_sim.measure.step_model import HOST_BOUND, bundled_model

MODEL = bundled_model()
RECORDS = fitted_records()
STEPS = [record for record in RECORDS.values() if record.kind == "steps"]
RAW = [(record, point) for record in STEPS for point in record.points]
ARMS = {
    "eager_off",
    "full",
    "eager_replay",
    "piecewise_off",
    "piecewise_replay_eager",
    "piecewise_replay_graphs",
    "piecewise_replay_one_launch",
}
# What it reaches today, a little above; the issue asks for a median of 3 %, a p95 of 8 % and no arm's median above 5 %.
MEDIAN, P95, MEDIAN_OF_ARM, P95_OF_ARM = 0.008, 0.03, 0.012, 0.035
LESS_SURE = {"eager_off": (0.012, 0.11), "full": (0.025, 0.04)}
"""Median and 95th percentile of the arms that decodes run as: short steps, of which experts a few tokens pick."""


def absolute_errors(arm: str | None = None) -> np.ndarray:
    """Of the predictions in the records, on held-out points."""
    held = [point for _, point in RAW if point["held_out"] and arm in (None, point["arm"])]
    return np.array([abs(point["predicted_us"] / point["step_us"] - 1) for point in held])


@pytest.fixture(scope="module")
def refit():
    return fit_model(RECORDS)


def test_the_bundled_file_is_what_its_records_fit_to(refit) -> None:
    """Issue 4, point 2; other machines may round otherwise."""
    alike = ("shape", "rates", "launch_us", "launch_bounds", "provenance", "seed", "domain")
    assert all(getattr(refit, name) == getattr(MODEL, name) for name in alike)
    assert refit.coefficients == pytest.approx(MODEL.coefficients, rel=0.01)
    assert refit.errors.keys() == MODEL.errors.keys()
    for arm, error in MODEL.errors.items():
        assert attrs.astuple(refit.errors[arm]) == pytest.approx(attrs.astuple(error), abs=5e-4)


def test_the_predictions_in_the_records_are_the_models() -> None:
    predicted = [point["predicted_us"] for _, point in RAW]
    measured = np.array([point["step_us"] for _, point in RAW])
    errors = step_errors(measured_steps(STEPS), MODEL.coefficients)[0]
    np.testing.assert_allclose(predicted, (errors + 1) * measured, rtol=1e-4)


def test_errors_on_held_out_points_are_as_said_and_within_the_target() -> None:
    """Issue 4, point 2: recomputed from the records alone; they fail here when they worsen."""
    assert {point["arm"] for _, point in RAW} == ARMS == MODEL.errors.keys() - {"all", HOST_BOUND}
    for arm in (*ARMS, "all"):
        errors = absolute_errors(None if arm == "all" else arm)
        said = MODEL.errors[arm]
        assert said.n == len(errors) >= (5 if arm == "full" else 20)
        found = float(np.median(errors)), float(np.percentile(errors, 95))
        assert found == pytest.approx((said.median, said.p95), abs=5e-4)
        most = (MEDIAN, P95) if arm == "all" else LESS_SURE.get(arm, (MEDIAN_OF_ARM, P95_OF_ARM))
        assert found[0] <= most[0] and found[1] <= most[1]


def test_a_prediction_by_the_public_way_is_as_accurate() -> None:
    """At the model's own rates."""
    errors = []
    for _, point in RAW:
        if not point["held_out"]:
            continue
        found = MODEL.predict(shape_of_point(FLASH_RANK, point), case_of_point(point), point["launch_us"])
        assert found.arm == point["arm"] and found.error in (MODEL.errors[found.arm], MODEL.errors[HOST_BOUND])
        errors.append(abs(found.step_us / point["step_us"] - 1))
    assert len(errors) > 100
    assert np.median(errors) < 0.01 and np.percentile(errors, 95) < 0.035


def test_it_reaches_experts_windows_and_an_arm_that_it_was_not_fitted_to() -> None:
    """It interpolates and extrapolates by what it counts: no table of what was measured could."""

    def unseen(point) -> bool:
        shape = point.step.shape
        other = shape.num_local_experts == 96 or shape.window in (64, 256)
        return other or point.arm == "piecewise_replay_one_launch"

    points = [attrs.evolve(point, held_out=unseen(point)) for point in measured_steps(STEPS)]
    calls = measured_calls(record for record in RECORDS.values() if record.kind == "calls")
    held = [point for point in points if point.held_out]
    errors = np.abs(step_errors(held, fit_coefficients(points, calls))[0])
    experts = np.array([point.step.shape.num_local_experts for point in held])
    assert len(held) > 150 and (experts == 96).sum() == 36
    assert np.median(errors) < 0.012 and np.percentile(errors, 95) < 0.04
    assert np.median(errors[experts == 96]) < 0.025


def test_operations_timed_apart_are_met_too() -> None:
    """What a step's parts take is not only right in sum: products and attention, alone, within a quarter."""
    calls = measured_calls(record for record in RECORDS.values() if record.kind == "calls")
    errors = np.abs(operation_us(calls.ops, MODEL.coefficients) / calls.device_us - 1)
    assert len(errors) == 18
    assert np.median(errors) < 0.07 and errors.max() < 0.25


def test_a_slower_host_is_felt_where_launches_bound_and_hidden_where_the_device_does() -> None:
    """Eight experts and few tokens against 48 and many, on a host at its fastest and at its slowest."""
    times = {}
    for _, point in RAW:
        key = point["arm"], point["num_tokens"], point["num_local_experts"]
        if point["sweep"] == "experts" and key in (("eager_replay", 512, 8), ("piecewise_off", 8192, 48)):
            shape, case = shape_of_point(FLASH_RANK, point), case_of_point(point)
            times[key[0]] = [MODEL.predict(shape, case, launch_us).step_us for launch_us in (5.5, 11.0)]
    launched, bound = times["eager_replay"], times["piecewise_off"]
    assert launched[1] / launched[0] == pytest.approx(2, rel=0.02)
    assert bound[1] / bound[0] < 1.02


def test_steps_that_the_host_bounds_are_said_to_be_less_certain() -> None:
    """A few, fitted ones among them: too few are held out. No model is steadier than the host that it models."""
    bound = [point for _, point in RAW if point["host_us"] >= 0.97 * point["step_us"]]
    errors = [abs(point["predicted_us"] / point["step_us"] - 1) for point in bound]
    said = MODEL.errors[HOST_BOUND]
    assert said.n == len(bound) >= 10 and {"eager_off", "eager_replay"} <= {point["arm"] for point in bound}
    assert (np.median(errors), np.percentile(errors, 95)) == pytest.approx((said.median, said.p95), abs=5e-4)
    assert said.median < 0.06 and said.p95 < 0.2
    point = next(p for p in bound if (p["arm"], p["num_tokens"], p["sweep"]) == ("eager_replay", 512, "experts"))
    assert MODEL.predict(shape_of_point(FLASH_RANK, point), case_of_point(point), 9.0).error == said


def test_a_host_of_another_speed_and_full_graphs_are_said_to_be_outside() -> None:
    (point,) = (p for _, p in RAW if (p["sweep"], p["arm"], p["num_tokens"]) == ("prompt", "eager_off", 2048))
    shape, case = shape_of_point(FLASH_RANK, point), case_of_point(point)
    assert MODEL.predict(shape, case).inside, "the records' median speed"
    assert "launch_us 50.0 is outside" in MODEL.predict(shape, case, 50.0).outside
    assert "full" in MODEL.domain
