"""A workload scheduled under a config in virtual time, in halves, and tuned."""

import pytest

from replay_sim.config import load_config
from replay_sim.explore.tuning_costs import fitted_costs
from replay_sim.explore.tuning_score import score
from replay_sim.explore.workload_steps import scheduled_halves, tuned_workload
from replay_sim.plan import make_plan
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import planned_dispatch

CONFIG = load_config("default")
REQUESTS = list(generate_requests(load_profile("code"), 60, seed=1))


def test_both_halves_together_are_the_scheduled_steps_and_their_time() -> None:
    """Issue 6: a score from counts is the mean over the steps one by one."""
    costs = fitted_costs(CONFIG)
    seen, unseen = scheduled_halves(CONFIG, REQUESTS, costs)
    settings, dispatch = SchedulerSettings.from_config(CONFIG), planned_dispatch(make_plan(CONFIG))
    steps = list(Scheduler(REQUESTS, settings, dispatch=dispatch, step_time=costs.seconds).steps())
    assert seen.total() + unseen.total() == len(steps) and seen.total() - unseen.total() in (0, 1)
    expected = score(make_plan(CONFIG), seen + unseen, costs).expected_step_ms
    assert expected == pytest.approx(sum(step.seconds for step in steps) / len(steps) * 1e3)


def test_a_tuned_workload_holds_what_it_was_tuned_on_and_judged_on() -> None:
    workload = tuned_workload(CONFIG, REQUESTS, "sixty requests")
    assert workload.tuning.steps == workload.seen.total() and workload.source == "sixty requests"
    judged = workload.tuning.tuned
    assert judged.unseen == score(judged.plan, workload.unseen, workload.costs)
