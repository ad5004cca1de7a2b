"""The step-time model: it recovers a known law, interpolates, and says how wrong it is and what it never saw."""

import attrs
import numpy as np
import pytest
from measure.synthetic_steps import ARMS, NONE, PIECEWISE, RATES, all_steps, make_law, measured, prefill_steps

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, StepRecord
from replay_sim.config.shapes import FLASH_RANK, TINY
from replay_sim.measure.roofline import PARTS, step_limit_us
from replay_sim.measure.step_costs import REGION_TOKENS, StepCosts
from replay_sim.measure.step_features import HOST_LAUNCH_US, expected_tiles, step_arrays
from replay_sim.measure.step_fit import domain_of, error_table, fit_coefficients, held_out_errors
from replay_sim.measure.step_form import PRIORS, experts_in_use, step_times
from replay_sim.measure.step_model import StepModel, arm_of, model_text, read_model

NOISE = 0.01


@pytest.fixture(scope="module")
def law() -> dict[str, float]:
    return make_law(seed=1)


@pytest.fixture(scope="module")
def points(law):
    return measured(law, seed=2, noise=NOISE)


@pytest.fixture(scope="module")
def model(points) -> StepModel:
    coefficients = fit_coefficients(points)
    return StepModel(
        shape="flash-rank",
        rates=RATES,
        launch_us=HOST_LAUNCH_US,
        launch_bounds=(HOST_LAUNCH_US, 2 * HOST_LAUNCH_US),
        provenance="synthetic points",
        seed=2,
        coefficients=coefficients,
        errors=held_out_errors(points, coefficients),
        domain=domain_of(points),
    )


def test_held_out_points_of_a_known_law_are_met_to_within_their_noise(model: StepModel) -> None:
    """Issue 4, point 2: the fit's own error is small beside a hundredth of noise."""
    assert model.errors["all"].n > 20
    assert model.errors["all"].median < NOISE * 1.2 and model.errors["all"].p95 < NOISE * 3
    assert {"eager_off", "piecewise_replay_graphs"} <= model.errors.keys()


def test_it_interpolates_between_the_token_counts_that_it_saw(model: StepModel, law: dict[str, float]) -> None:
    """Against the law without noise, at counts, requests and a window that no point had."""
    shape = attrs.evolve(FLASH_RANK, window=256)
    steps = prefill_steps(1237) + prefill_steps(3000, 3) + prefill_steps(1800, shape=shape)
    true = step_times(step_arrays([step for _, step in steps]), law).step
    found = np.array([model.predict(step.shape, step.case).step_us for _, step in steps])
    assert np.abs(found / true - 1).max() < 0.03


def test_a_prediction_carries_source_error_and_roofline(model: StepModel) -> None:
    for arm, step in prefill_steps(1000):
        found = model.predict(step.shape, step.case)
        assert found.arm == arm == arm_of(step.case)
        assert found.inside and found.outside is None
        assert found.source == "modelled, fitted to synthetic points" and found.error == model.errors[arm]
        assert found.limit_us == step_limit_us(step.shape, step.case, RATES) > 0


def test_it_says_when_it_is_asked_outside_what_it_saw(model: StepModel) -> None:
    (_, step), *_ = prefill_steps(1000)
    asked = {
        "num_tokens 100000": (FLASH_RANK, attrs.evolve(step.case, num_tokens=100_000, padded_tokens=100_000)),
        "window 64": (attrs.evolve(FLASH_RANK, window=64), step.case),
        "num_local_experts 192": (attrs.evolve(FLASH_RANK, num_local_experts=192), step.case),
        "num_reqs 500": (FLASH_RANK, attrs.evolve(step.case, num_reqs=500)),
        "model tiny": (TINY, step.case),
        "arm eager_replay_graphs": (FLASH_RANK, attrs.evolve(step.case, replay_mode=PIECEWISE, replay_rows=128)),
    }
    for reason, (shape, case) in asked.items():
        found = model.predict(shape, case)
        assert not found.inside and found.outside is not None and reason in found.outside
    renamed = attrs.evolve(FLASH_RANK, name="mine", max_position=4096, first_local_expert=48)
    assert model.predict(renamed, step.case).inside, "neither changes a time"


def test_the_host_hides_behind_the_device_only_while_it_is_ahead() -> None:
    """The two phases by hand: a slow host bounds the step, a fast one leaves the device's own time."""
    steps = [step for arm, step in prefill_steps(1024) if arm == "piecewise_replay_eager"]
    arrays = step_arrays(steps)
    slow, fast = ({name: value * factor if name.startswith("host.") else value for name, value in PRIORS.items()}
                  for factor in (100.0, 1e-3))  # fmt: skip
    late, early = step_times(arrays, slow), step_times(arrays, fast)
    assert late.step[0] == pytest.approx(late.host[0], rel=0.01) and late.step[0] > 3 * late.device[0]
    assert early.host[0] < 0.01 * early.step[0]
    assert early.step[0] > early.device[0] > 0.8 * early.step[0]
    np.testing.assert_array_equal(late.device, early.device)


def test_kernel_time_is_that_of_all_parts_and_grows_with_tokens() -> None:
    steps = [step for tokens in (256, 1024, 8192) for _, step in prefill_steps(tokens)]
    times = step_times(step_arrays(steps), PRIORS)
    assert times.busy.shape == (len(steps), len(PARTS))
    by_arm = times.device.reshape(3, len(ARMS))
    assert (np.diff(by_arm, axis=0) > 0).all()


def test_expected_tiles_are_those_of_drawn_rows() -> None:
    random = np.random.default_rng(0)
    for rows in (10, 1000, 8192):
        drawn = -(-random.binomial(rows, 1 / 64, 20_000) // 128)
        assert expected_tiles(rows, 1 / 64, 128) == pytest.approx(drawn.mean(), rel=0.02)
    assert expected_tiles(300, 1.0, 128) == 3


def test_experts_in_use_are_those_of_drawn_rows_evenly_and_unevenly_picked() -> None:
    random = np.random.default_rng(0)
    for load, spread in ((2.0, 0.0), (2.0, 1.0), (20.0, 1.5)):
        rows = load * np.exp(random.normal(0, spread, 200_000) - spread**2 / 2)
        found = experts_in_use(np.array([load]), np.array([spread]))
        assert found == pytest.approx((random.poisson(rows) > 0).mean(), rel=0.02)
    assert experts_in_use(np.zeros(1), np.ones(1)) == 0


def test_a_fit_is_the_same_every_time_and_uses_no_held_out_point(points, model: StepModel) -> None:
    changed = [attrs.evolve(point, step_us=1.0, host_us=1.0) if point.held_out else point for point in points]
    assert fit_coefficients(changed) == model.coefficients


def test_points_that_are_all_held_out_leave_nothing_to_fit(points) -> None:
    with pytest.raises(ValueError, match="none is left to fit"):
        fit_coefficients([attrs.evolve(point, held_out=True) for point in points])


def test_a_model_survives_its_file(model: StepModel) -> None:
    assert read_model(model_text(model)) == model


def test_the_table_of_errors_has_each_arm_and_sweep(points, model: StepModel) -> None:
    table = error_table(points, model.coefficients)
    assert all(f"| {arm} " in table for arm, _ in all_steps()) and "synthetic" in table


def record(tokens: int, rows: int, replay_mode: CudagraphMode | None, mode: CudagraphMode = PIECEWISE) -> StepRecord:
    return StepRecord(
        num_tokens=tokens,
        padded_tokens=tokens,
        mode=mode,
        replay_rows=rows,
        padded_rows=rows,
        replay_mode=replay_mode,
        reason=ReplayReason.GRAPH,
        num_reqs=max(1, rows // 128),
        model_reason=ModelReason.PIECEWISE,
    )


def test_costs_of_the_parts_add_up_to_the_step(model: StepModel) -> None:
    costs = StepCosts(model, FLASH_RANK)
    for tokens in (1024, 4096, 8192):
        whole = costs.seconds(record(tokens, 0, None)) * 1e6
        assert costs.model_us(tokens, PIECEWISE, False) == pytest.approx(whole)
        for rows, mode in ((128, PIECEWISE), (512, PIECEWISE), (1024, PIECEWISE), (512, NONE)):
            parts = costs.model_us(tokens, PIECEWISE, True) + costs.replay_us(rows, mode is PIECEWISE)
            exact = rows == 128 and mode is PIECEWISE or tokens == REGION_TOKENS
            step = costs.seconds(record(tokens, rows, mode)) * 1e6
            assert parts == pytest.approx(step, rel=1e-9 if exact else 0.1)


def test_costs_rise_with_rows_and_an_empty_step_is_free(model: StepModel) -> None:
    costs = StepCosts(model, FLASH_RANK)
    assert costs.replay_us(128, True) < costs.replay_us(512, True) < costs.replay_us(4096, True)
    assert costs.seconds(record(0, 0, None, NONE)) == 0
    assert costs.prediction(record(1024, 128, PIECEWISE)).arm == "piecewise_replay_graphs"
    assert StepCosts(model, FLASH_RANK, one_launch=True).prediction(record(1024, 128, PIECEWISE)).outside
