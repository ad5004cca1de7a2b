"""A workload's steps in virtual time under a config, counted in two halves: what is tuned on, and what is unseen."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from replay_sim.config import ServingConfig
from replay_sim.explore.tuning import Tuning, tune
from replay_sim.explore.tuning_costs import FittedCosts, fitted_costs
from replay_sim.explore.tuning_limits import Limits
from replay_sim.explore.tuning_steps import StepCounts, in_halves, step_keys
from replay_sim.plan import make_plan
from replay_sim.progress import Progress, no_progress
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import planned_dispatch
from replay_sim.workload.trace import TraceRequest


@attrs.frozen(eq=False)
class TunedWorkload:
    """A config tuned on a workload: the steps of both halves, their costs, the outcome, and the workload in words."""

    config: ServingConfig
    seen: StepCounts
    unseen: StepCounts
    costs: FittedCosts
    tuning: Tuning
    source: str


BUSIEST = "every draft token is accepted; the steps are those of the config's own plan, whatever plan is judged on them"
"""What is assumed of scheduled steps, in words."""


def scheduled_halves(
    config: ServingConfig,
    requests: Iterable[TraceRequest],
    costs: FittedCosts,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
) -> tuple[StepCounts, StepCounts]:
    """The first half of the steps and the second, scheduled under the config's own plan; arrivals count.

    Raises ValueError for requests that the scheduler refuses.
    """
    plan = make_plan(config)
    settings = SchedulerSettings.from_config(config, seed=seed)
    scheduler = Scheduler(requests, settings, dispatch=planned_dispatch(plan), step_time=costs.seconds)
    return in_halves(step_keys(progress(scheduler.steps(), "steps"), plan))


def tuned_workload(
    config: ServingConfig, requests: Iterable[TraceRequest], source: str, *, limits: Limits | None = None, seed: int = 0
) -> TunedWorkload:
    """Schedule the requests, which `source` says in words, and tune on the first half of their steps.

    Raises ValueError as `scheduled_halves` and `tune` do.
    """
    costs = fitted_costs(config)
    seen, unseen = scheduled_halves(config, requests, costs, seed=seed)
    return TunedWorkload(config, seen, unseen, costs, tune(config, seen, unseen, costs, limits), source)
