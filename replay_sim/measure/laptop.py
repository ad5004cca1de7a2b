"""What planning costs the laptop that it runs on: processor seconds and peak memory of each job, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tabulate import tabulate

from replay_sim.measure.records import Point
from replay_sim.progress import Progress, no_progress

LARGEST_PLAN = "b300-tp-recipe"
"""A preset whose default rule plans 32 replay sizes."""
ROWS, GRAPHS = 8192, 64
TRACE_REQUESTS = 19_366
"""As many as the published hour of Azure's conversation trace has."""


def _predict_pool() -> str:
    """Pool bytes of 32 replay sizes at full shapes, in every arrangement, from shapes alone."""
    from replay_sim.config import FLASH_RANK, load_config
    from replay_sim.decoder.pool_prediction import record_plan
    from replay_sim.plan.capture_plan import make_plan

    plan = make_plan(load_config(LARGEST_PLAN))
    memory = record_plan(FLASH_RANK, plan)
    memory.predict()
    return f"{memory.num_graphs} graphs, {len(plan.replay_sizes)} of them replay graphs"


def _choose_sizes(spikes: int) -> str:
    """The optimal sizes of 1 to 64 graphs for 8,192 distinct row counts (P8), every `spikes`-th a thousandfold."""
    from replay_sim.plan.optimal import optimal_sizes

    histogram = {row: 1000.0 if row % spikes == 0 else 1.0 for row in range(1, ROWS + 1)}
    size_costs = {size: 100 + size * 0.1 for size in range(1, ROWS + 1)}
    optima = optimal_sizes(histogram, size_costs, lambda rows: 300.0 + rows, GRAPHS)
    return f"{len(optima) - 1} plans"


def _schedule(num_requests: int) -> str:
    """Requests of the bundled profile through scheduler and dispatch, at 30 ms a step of virtual time."""
    from replay_sim.config import DEFAULT_PRESET, load_config
    from replay_sim.plan.capture_plan import make_plan
    from replay_sim.workload.scheduler import Scheduler
    from replay_sim.workload.settings import SchedulerSettings
    from replay_sim.workload.simulation import Simulation, planned_dispatch
    from replay_sim.workload.source import open_workload

    config = load_config(DEFAULT_PRESET)
    requests, _ = open_workload(num_requests=num_requests)
    settings = SchedulerSettings.from_config(config)
    dispatch = planned_dispatch(make_plan(config))
    simulation = Simulation()
    steps = Scheduler(requests, settings, dispatch=dispatch, step_time=lambda _: 0.03).steps()
    deque(simulation.watch(steps), maxlen=0)
    return f"{simulation.requests_finished} requests in {simulation.steps} steps"


JOBS: dict[str, Callable[[], str]] = {
    "pool bytes of 32 replay sizes": _predict_pool,
    f"optimal plans of {ROWS} row counts, flat": lambda: _choose_sizes(1),
    f"optimal plans of {ROWS} row counts, spikes": lambda: _choose_sizes(128),
    f"{TRACE_REQUESTS} requests scheduled": lambda: _schedule(TRACE_REQUESTS),
    "1000000 requests scheduled": lambda: _schedule(1_000_000),
}


def measure_laptop(names: Sequence[str] = tuple(JOBS), progress: Progress = no_progress) -> tuple[list[Point], str]:
    """Run each job in a fresh process: points and a table.

    `cpu_seconds` are the job's processor time, imports included; `peak_bytes` the whole process's. Raises RuntimeError
    with a process's last line if it fails.
    """
    points: list[Point] = []
    for name in progress(names, "jobs"):
        done = subprocess.run([sys.executable, "-m", __name__, name], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"job {name!r} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        points.append(json.loads(done.stdout))
    rows = [[p["job"], p["did"], p["cpu_seconds"], f"{int(p['peak_bytes'] or 0) / 2**20:,.0f}"] for p in points]
    return points, tabulate(rows, ("job", "did", "CPU s", "peak MiB"), tablefmt="pipe")


def _run_job(name: str) -> Point:
    began = time.process_time()
    did = JOBS[name]()
    seconds = time.process_time() - began
    return {"job": name, "did": did, "cpu_seconds": round(seconds, 3), "peak_bytes": _peak_bytes()}


def _peak_bytes() -> int | None:
    """The process's largest resident memory since it was started, not that of the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


if __name__ == "__main__":
    print(json.dumps(_run_job(sys.argv[1])))
