"""The main job: plan a config, run a workload through it, tune on it, and run its first steps for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from replay_sim.config import FLASH_RANK, DecoderShape, ServingConfig, load_config
from replay_sim.config.errors import printable
from replay_sim.explore.workload_steps import TunedWorkload, tuned_workload
from replay_sim.measure.environment import describe_environment
from replay_sim.measure.run_steps import RunReport, execute_steps, make_backend
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.plan.summary import plan_summary
from replay_sim.progress import progress_bar
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import Simulation, planned_dispatch
from replay_sim.workload.source import DEFAULT_REQUESTS, open_workload
from replay_sim.workload.trace import TraceRequest


@attrs.frozen
class ExecutedRun:
    """Steps of the workload that the reference decoder really ran, and where."""

    report: RunReport
    environment: dict[str, Any]

    @property
    def is_on_gpu(self) -> bool:
        """Whether the run's times and bytes are a GPU's; those of the host backend are no claim about one."""
        return self.environment["gpu"] is not None

    @property
    def where(self) -> str:
        """One line for captions."""
        at = self.environment
        if not self.is_on_gpu:
            return f"run on the host backend, a CPU, torch {at['torch']}, {at['date']}; its times are no GPU's"
        return f"measured on {at['gpu']}, driver {at['driver']}, torch {at['torch']}, {at['date']}"


@attrs.frozen
class Job:
    """What was asked, what was planned, what the workload would dispatch, and what was run, if anything was.

    `tuned` is the config tuned on the workload, or why it could not be, in words.
    """

    config_name: str
    config: ServingConfig
    plan: CapturePlan
    shape: DecoderShape
    summary: dict[str, Any]
    workload: str
    simulation: Simulation
    tuned: TunedWorkload | str
    executed: ExecutedRun | None


def run_job(
    config_name: str,
    *,
    trace: str | Path | None = None,
    num_requests: int = DEFAULT_REQUESTS,
    seed: int = 0,
    execute: str | None = None,
    num_steps: int = 50,
) -> Job:
    """Plan, simulate and tune `config_name`, a preset or a JSON file, and run `num_steps` steps on `execute`.

    `trace` is a file of requests; without one `num_requests` are drawn from the bundled profile. `execute` is "auto",
    "host", "cuda", or None to run nothing. Raises ValueError for bad input of any kind.
    """
    config = load_config(config_name)
    plan = make_plan(config)
    opened, workload = open_workload(trace, num_requests=num_requests, seed=seed)
    requests = tuple(opened)
    backend = None if execute is None else make_backend(execute)
    settings = SchedulerSettings.from_config(config, seed=seed)
    simulation = Simulation()
    steps = Scheduler(requests, settings, dispatch=planned_dispatch(plan)).steps()
    for _ in progress_bar(simulation.watch(steps), "simulate"):
        pass
    executed = None
    if backend is not None:
        report = execute_steps(config, requests, num_steps=num_steps, backend=backend, seed=seed, progress=progress_bar)
        executed = ExecutedRun(report, describe_environment(backend.device))
    return Job(
        printable(Path(config_name).name),  # reports are read elsewhere
        config,
        plan,
        FLASH_RANK,
        plan_summary(config, plan, FLASH_RANK),
        workload,
        simulation,
        _tuned(config, requests, workload, seed),
        executed,
    )


def _tuned(config: ServingConfig, requests: tuple[TraceRequest, ...], workload: str, seed: int) -> TunedWorkload | str:
    """The config tuned on the first half of the workload's steps, or why it cannot be; none of it needs a device."""
    try:
        return tuned_workload(config, requests, workload, seed=seed)
    except ValueError as error:
        return str(error)
