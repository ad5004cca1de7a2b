"""A workload through scheduler and dispatch, whole: a real preset on a real trace."""

import itertools

import pytest
from batch.oracles import dispatch_plainly

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config import load_config
from replay_sim.plan import make_plan
from replay_sim.workload.detect import read_trace
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile, profile_names
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import Simulation, planned_dispatch
from replay_sim.workload.trace import TraceRequest

PRESET = "b200-tp4-c32"
STEPS = 50


def run(requests, preset=PRESET, steps=None):
    """The simulation and its steps."""
    config = load_config(preset)
    scheduler = Scheduler(requests, SchedulerSettings.from_config(config), dispatch=planned_dispatch(make_plan(config)))
    simulation = Simulation()
    return simulation, list(simulation.watch(itertools.islice(scheduler.steps(), steps)))


def check(simulation, steps, preset=PRESET):
    """Every record equals the plain oracle's, and the counts are their sums."""
    plan = make_plan(load_config(preset))
    captured = {
        "PIECEWISE": set(plan.model_sizes),
        "FULL": set(plan.full_sizes),
        "REPLAY": set(plan.replay_sizes),
    }
    expected = [dispatch_plainly(step.batch, plan, captured) for step in steps]
    for step, plain in zip(steps, expected, strict=True):
        record = step.record
        replay_mode = None if record.replay_mode is None else record.replay_mode.value
        assert (record.mode.value, record.padded_tokens, replay_mode, record.replay_rows, record.padded_rows) == plain
    tokens = sum(step.batch.num_tokens for step in steps)
    replays = [
        (step.batch.num_tokens, rows, padded)
        for step, (_, _, mode, rows, padded) in zip(steps, expected, strict=True)
        if mode is not None
    ]
    assert simulation.steps == simulation.table.num_steps == len(steps)
    assert (simulation.tokens, simulation.token_pads) == (tokens, sum(plain[1] for plain in expected) - tokens)
    assert simulation.replay_steps == len(replays)
    assert simulation.replay_rows == sum(rows for _, rows, _ in replays)
    assert simulation.replay_pads == sum(padded - rows for _, rows, padded in replays)
    assert simulation.trimmed_rows == sum(tokens - rows for tokens, rows, _ in replays)


def test_fifty_steps_of_a_real_preset_on_the_azure_trace_end_with_their_table(shared):
    """D1-D4, G3, S8."""
    simulation, steps = run(read_trace(shared / "data/traces/AzureLLMInferenceTrace_conv.csv"), steps=STEPS)
    assert len(steps) == STEPS
    check(simulation, steps)
    assert {step.record.mode for step in steps} == {CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL}
    assert "| Runtime Mode" in simulation.table.markdown()


@pytest.mark.parametrize("profile", profile_names())
def test_fifty_steps_of_the_bundled_workloads_do_too(profile):
    """D1-D4, G3, S8."""
    simulation, steps = run(generate_requests(load_profile(profile), 200), steps=STEPS)
    assert len(steps) == STEPS
    check(simulation, steps)


def test_every_request_of_a_workload_finishes_and_every_token_is_computed():
    """Without draft tokens each output token but the last is computed once."""
    requests = list(generate_requests(load_profile("conversation"), 100))
    simulation, steps = run(requests, "h100-tp8-log")
    check(simulation, steps, "h100-tp8-log")
    assert simulation.requests_finished == 100
    assert simulation.tokens == sum(r.prompt_tokens + r.output_tokens - 1 for r in requests)


def test_shares_are_of_all_that_ran_and_zero_of_nothing():
    assert set(Simulation().as_dict().values()) == {0}
    simulation, _ = run([TraceRequest(0.0, 2000, 1, "a")])
    counts = simulation.as_dict()
    assert counts["replay_step_share"] == 1
    assert counts["token_pad_share"] == pytest.approx(46 / 2046)
    assert counts["trimmed_rows"] == 2000 - 128


def test_steps_without_a_record_are_refused():
    steps = Scheduler([TraceRequest(0.0, 5, 5, "a")], SchedulerSettings(4, 100)).steps()
    with pytest.raises(ValueError, match="step 0 has no record: the scheduler needs a dispatch"):
        list(Simulation().watch(steps))
