"""A sweep for a notebook: run on this machine's cores and kept as a table, and some of it run again step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from replay_sim.config import ServingConfig
from replay_sim.explore.sweep import run_sweep
from replay_sim.explore.sweep_best import TIME
from replay_sim.explore.sweep_executors import cores, process_pool
from replay_sim.explore.sweep_file import PointsFile
from replay_sim.explore.sweep_grid import Setting
from replay_sim.explore.sweep_plans import config_of, plan_of
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload, design_points, fingerprint, schedule_of
from replay_sim.explore.sweep_rows import is_row_of
from replay_sim.explore.sweep_steps import count_schedule
from replay_sim.explore.sweep_table import table_of
from replay_sim.explore.tuning_costs import fitted_costs
from replay_sim.progress import progress_bar
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.simulation import Simulation, planned_dispatch

COUNTED = ("steps", "num_tokens", "padded_tokens", "replay_rows", "padded_rows")


class SweepStudy:
    """A config swept over axes and plans on one workload: its `points`, and their rows as `table`."""

    def __init__(
        self,
        name: str,
        config: ServingConfig,
        workload: SweptWorkload,
        axes: Mapping[str, Sequence[Setting]],
        plans: Sequence[str],
    ) -> None:
        self.workload = workload
        self.points = design_points({name: config}, [workload], axes, plans)
        self.table = self._run()

    def _run(self) -> pd.DataFrame:
        mark, is_row = fingerprint(self.points, [self.workload]), partial(is_row_of, self.points)
        with tempfile.TemporaryDirectory() as folder, process_pool(cores()) as executor:
            with PointsFile(Path(folder) / "points", mark, is_row, resume=False) as file:
                workloads = {self.workload.source: self.workload}
                return table_of(run_sweep(self.points, workloads, executor, file, progress=progress_bar))

    def step_by_step(self, indices: Iterable[int]) -> pd.DataFrame:
        """These points with nothing shared: every step of the point's own schedule dispatched and timed by itself.

        Two rows a point, the table's figures and the steps'; a column for what is counted, and one for TIME.
        """
        names = [*COUNTED, TIME]
        rows = {}
        for index in indices:
            point, row = self.points[index], self.table.loc[index]
            simulation = simulated(point, self.workload)
            stepped = simulation.as_dict() | {
                "num_tokens": simulation.tokens,
                "padded_tokens": simulation.tokens + simulation.token_pads,
                "padded_rows": simulation.replay_rows + simulation.replay_pads,
                TIME: simulation.step_times.total_s,
            }
            rows[index, "in the table"] = [row[name] for name in names]
            rows[index, "step by step"] = [stepped[name] for name in names]
        found = pd.DataFrame.from_dict(rows, orient="index", columns=names).astype(dict.fromkeys(COUNTED, int))
        found.index = pd.MultiIndex.from_tuples(rows, names=["point", ""])
        return found


def simulated(point: DesignPoint, workload: SweptWorkload) -> Simulation:
    """The workload under a point's own plan, step by step in virtual time; all requests are there at 0 s."""
    config = config_of(point)
    settings = schedule_of(point)
    plan = plan_of(point, config, count_schedule(workload.requests(), settings).at_window(config.window))
    costs, simulation = fitted_costs(config), Simulation()
    dispatch = planned_dispatch(plan)
    scheduler = Scheduler(workload.requests(), settings, dispatch=dispatch, step_time=costs.seconds)
    for _ in simulation.watch(scheduler.steps()):
        pass
    return simulation
