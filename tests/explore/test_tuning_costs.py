"""The fitted model as the costs that tuning asks for: by mode's name, kept, with error, and with what it never saw."""

from collections import Counter

import attrs
import pytest
from explore.tuning_cases import drawn_steps

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable
from replay_sim.batch.request import Batch
from replay_sim.config import FLASH_RANK, load_config
from replay_sim.explore.tuning import tune
from replay_sim.explore.tuning_costs import FittedCosts, fitted_costs
from replay_sim.explore.tuning_limits import Limits, measured_capture_seconds
from replay_sim.explore.tuning_report import headline, keeps_own
from replay_sim.measure.roofline import Rates
from replay_sim.measure.step_costs import StepCosts
from replay_sim.measure.step_features import HOST_LAUNCH_US
from replay_sim.measure.step_form import PRIORS
from replay_sim.measure.step_model import ArmError, StepModel
from replay_sim.plan import make_plan
from replay_sim.workload.simulation import planned_dispatch

BOUNDS = {"num_tokens": (1, 4096), "window": (128, 128)}
MODEL = StepModel(
    shape="flash-rank",
    rates=Rates(4.2e12, 7.5e14),
    launch_us=HOST_LAUNCH_US,
    launch_bounds=(HOST_LAUNCH_US, HOST_LAUNCH_US),
    provenance="no points at all",
    seed=0,
    coefficients=PRIORS,
    errors={"all": ArmError(median=0.021, p95=0.064, n=30)},
    domain={arm: BOUNDS for arm in ("full", "piecewise_off", "piecewise_replay_graphs")},
)


def test_costs_are_the_models_under_the_modes_names() -> None:
    """Asked twice, they are the same."""
    config = load_config("default")
    costs, direct = FittedCosts(MODEL, config), StepCosts(MODEL, FLASH_RANK)
    for mode in CudagraphMode:
        for breaks in (False, True):
            expected = direct.model_us(1536, mode, breaks)
            assert costs.model_us(1536, mode.value, breaks) == costs.model_us(1536, mode.value, breaks) == expected > 0
    assert costs.replay_us(256, True) == direct.replay_us(256, True) != costs.replay_us(256, False)


def test_seconds_of_a_step_are_those_of_its_parts() -> None:
    """What virtual time passes is what plans are scored by."""
    config = load_config("default")
    costs = FittedCosts(MODEL, config)
    record = planned_dispatch(make_plan(config))(Batch.from_columns([1000, 6], [0, 50], [False, True]))
    assert record.has_replay_batch
    us = costs.model_us(record.padded_tokens, "PIECEWISE", True) + costs.replay_us(record.padded_rows, True)
    assert costs.seconds(record) == pytest.approx(us / 1e6)
    assert costs.seconds(attrs.evolve(record, num_tokens=0)) == 0


def test_the_source_carries_the_error_of_the_model() -> None:
    costs = FittedCosts(MODEL, load_config("default"))
    assert costs.source == ("modelled, fitted to no points at all; off by 2.1% (median) and 6.4% (p95) on 30 others")
    errors = MODEL.errors | {"host_bound": ArmError(median=0.05, p95=0.1, n=3)}
    costs = FittedCosts(attrs.evolve(MODEL, errors=errors), load_config("default"))
    assert costs.source.endswith("on 30 others, by 5.0% and 10.0% where the host is the bound")


def test_what_the_model_never_saw_is_said_with_its_share_of_steps_and_time() -> None:
    """Of this plan's steps only eager ones and those of more than 4,096 tokens are outside; and another window is."""
    config = load_config("default")
    plan = make_plan(config)
    costs = FittedCosts(MODEL, config)
    assert costs.guesses(plan, Counter({(6, 6, True): 1, (2000, 128, False): 1})) == ()
    (reason,) = costs.guesses(plan, Counter({(2000, 128, False): 3, (5000, 128, False): 1}))
    assert "25.0% of the steps" in reason and "num_tokens more than 4096" in reason
    wide = attrs.evolve(config, window=256)
    (reason,) = FittedCosts(MODEL, wide).guesses(make_plan(wide), Counter({(2000, 256, False): 1}))
    assert "100.0% of the time" in reason and "window more than 128" in reason
    sizes = {"cudagraph_capture_sizes": [64], "max_cudagraph_capture_size": 64}
    eager = attrs.evolve(config, decoder_replay_cudagraph_capture_sizes=[128], **sizes)
    first, second = costs.guesses(make_plan(eager), Counter({(2000, 128, False): 1, (90, 90, False): 2}))
    assert "eager_off was not measured" in first and "eager_replay_graphs was not measured" in second


def test_eager_runs_are_costed_at_the_ends_of_tiles_and_straight_between() -> None:
    """Within the error that a point has anyway of what is costed at every count."""
    costs, direct = FittedCosts(MODEL, load_config("default")), StepCosts(MODEL, FLASH_RANK)
    for tokens in (1, 64, 65, 1024, 1025, 1500, 8001):
        exact = direct.model_us(tokens, CudagraphMode.NONE, False)
        assert costs.model_us(tokens, "NONE", False) == pytest.approx(exact, rel=0.01)
        assert costs.replay_us(tokens, False) == pytest.approx(direct.replay_us(tokens, False), rel=0.01)


def test_a_config_is_tuned_by_the_fitted_form() -> None:
    """The form as it is, with few graphs: what it gives is no worse than the default."""
    config = load_config("default")
    costs = FittedCosts(MODEL, config)
    tuning = tune(config, drawn_steps(config, 4, 30), None, costs, Limits(max_graphs=4))
    assert tuning.tuned.seen.expected_step_ms <= tuning.own.seen.expected_step_ms
    assert tuning.tuned.seen.source == costs.source


def test_without_a_fitted_model_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay_sim.measure.step_model.bundled_model", lambda: None)
    with pytest.raises(ValueError, match="no step-time model is bundled"):
        fitted_costs(load_config("default"))


def test_of_a_dispatch_table_it_is_said_which_steps_were_never_measured() -> None:
    """FULL graphs where their arm is not among those measured, and counts of tokens beyond all that were."""
    config = load_config("default")
    dispatch, table = planned_dispatch(make_plan(config)), DispatchTable()
    for lengths, decode in (([6] * 4, True), ([6], True), ([5000], False), ([1000], False)):
        table.add(dispatch(Batch.from_columns(lengths, [9] * len(lengths), [decode] * len(lengths))))
    (long,) = FittedCosts(MODEL, config).guesses_of_table(table)
    assert "25.0% of the steps" in long and "from 1 to 4096" in long
    unmeasured = attrs.evolve(MODEL, domain={"piecewise_off": BOUNDS})
    full, _ = FittedCosts(unmeasured, config).guesses_of_table(table)
    assert "50.0% of the steps" in full and "arm full was not measured" in full


def test_a_margin_below_the_models_error_is_called_in_doubt() -> None:
    """The headline is what a reviewer takes away."""
    config = load_config("default")
    tuning = tune(config, drawn_steps(config, 4, 30), None, FittedCosts(MODEL, config), Limits(max_graphs=4))
    assert tuning.error == 0.021
    margin = 1 - tuning.tuned.seen.expected_step_ms / tuning.own.seen.expected_step_ms
    assert 0.001 < margin
    for error, doubted in ((2 * margin, True), (margin / 2, False), (None, False)):
        assert ("measure before you trust it" in headline(attrs.evolve(tuning, error=error))) == doubted


def test_a_config_to_keep_is_told_with_what_the_tuned_sizes_would_save() -> None:
    """The same step time from fewer graphs is a shorter start-up, which the reader weighs."""
    config = load_config("default")
    tuning = tune(config, drawn_steps(config, 4, 30), None, FittedCosts(MODEL, config), Limits(max_graphs=4))
    same = attrs.evolve(tuning, tuned=attrs.evolve(tuning.tuned, seen=tuning.own.seen))
    own, tuned = tuning.own.plan, tuning.tuned.plan
    replay, model = len(own.replay_sizes) - len(tuned.replay_sizes), len(own.model_sizes) - len(tuned.model_sizes)
    assert replay >= 12 and model >= 0
    told = headline(same)
    assert told.startswith("Keep the config: ") and keeps_own(same)
    assert f"; the tuned sizes capture {replay} replay and {model} piecewise graphs fewer, " in told
    seconds = measured_capture_seconds()
    assert told.endswith(f" {replay * seconds.replay + model * seconds.model:.1f} s at start-up.")
    assert "fewer" not in headline(attrs.evolve(same, tuned=tuning.own))
