"""One row of a sweep's table for each design point: settings, plan, memory, steps by mode and modelled step time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from replay_sim.config.errors import printable
from replay_sim.explore.sweep_plans import config_of, plan_of
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload, schedule_of
from replay_sim.explore.sweep_score import step_columns, time_columns
from replay_sim.explore.sweep_steps import (
    CountedSchedule,
    CountedSteps,
    DispatchedSteps,
    count_schedule,
    dispatch_steps,
)
from replay_sim.plan import CapturePlan, plan_cost
from replay_sim.workload.settings import SchedulerSettings

Row = dict[str, Any]
Times = Callable[[DesignPoint, SweptWorkload, DispatchedSteps, CapturePlan], Row]
"""The columns of a row that say how long steps take and where that is from: modelled here, or measured."""

SETTINGS = (
    "window",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_speculative_tokens",
    "cudagraph_mode",
    "max_cudagraph_capture_size",
    "decoder_replay_trim_threshold",
)
KNOBS = ("config", "workload", *SETTINGS, "plan")
"""The columns that say which design a row is; settings are those asked for."""
COLUMNS = (
    "point",
    *KNOBS,
    "cudagraph_capture_sizes",
    "decoder_replay_cudagraph_capture_sizes",
    "num_replay_graphs",
    "num_model_graphs",
    "num_full_graphs",
    "static_buffer_bytes",
    "break_buffer_bytes",
    "steps",
    "full_steps",
    "piecewise_steps",
    "eager_steps",
    "replay_steps",
    "replay_graph_steps",
    "num_tokens",
    "padded_tokens",
    "replay_rows",
    "padded_rows",
    "expected_step_ms",
    "replay_off_step_ms",
    "speedup",
    "workload_s",
    "extrapolated_share",
    "source",
    "outside",
    "error",
)
"""Of every row, in order; what a failed point lacks is None.

Sizes are lists. *_steps count steps of the model's mode, those with a replay batch and those of them in a graph.
num_tokens and replay_rows are real ones, padded_* have pads. expected_step_ms is the mean of all steps, and
replay_off_step_ms that of the same steps on the same model graphs without replay; speedup is theirs by it, workload_s
the seconds of all steps. extrapolated_share of these are of steps that the model never saw, for the reasons in outside;
source says what the times were modelled by or measured on, error why a point failed; each is empty if there is nothing
to say.
"""
SIZES = ("cudagraph_capture_sizes", "decoder_replay_cudagraph_capture_sizes")
TIMES = ("expected_step_ms", "replay_off_step_ms", "speedup", "workload_s", "extrapolated_share")
SAID = ("source", "outside", "error")
LARGEST_COUNT = (1 << 63) - 1


def modelled(point: DesignPoint, workload: SweptWorkload, steps: DispatchedSteps, plan: CapturePlan) -> Row:
    """Times by the bundled step-time model."""
    return time_columns(steps, plan)


def run_group(points: Sequence[DesignPoint], workload: SweptWorkload, times: Times = modelled) -> list[Row]:
    """A row for each point, in order; points of one schedule share its simulation. A point that fails is a row."""
    group = _Group(workload, times)
    return [group.row(point) for point in points]


def failed_row(point: DesignPoint, reason: str) -> Row:
    """The row of a point that has no result, for a reason of one line or several."""
    return dict.fromkeys(COLUMNS) | _asked(point) | dict.fromkeys(SAID, "") | {"error": _one_line(reason)}


def is_row_of(points: Sequence[DesignPoint], row: Row) -> bool:
    """Whether a row from a file is one that `run_group` can have made of a point; `points` are all, by index.

    It has the columns, the knobs of its point, finite figures of the column's type, and none beside an error.
    """
    index = row.get("point")
    if row.keys() != set(COLUMNS) or type(index) is not int or not 0 <= index < len(points):
        return False
    asked = _asked(points[index])
    if repr({name: row[name] for name in asked}) != repr(asked):
        return False
    if not all(isinstance(row[name], str) and row[name].isprintable() for name in SAID):
        return False
    figures = [name for name in COLUMNS if name not in (*asked, *SAID)]
    if row["error"]:
        return all(row[name] is None for name in figures)
    return all(_is_figure(name, row[name]) for name in figures)


def _is_figure(name: str, value: object) -> bool:
    if name in TIMES:
        return isinstance(value, float) and 0 <= value < math.inf
    if name in SIZES:
        return isinstance(value, list) and all(map(_is_count, value))
    return _is_count(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _asked(point: DesignPoint) -> Row:
    """The columns that say which design a point is."""
    row: Row = {"point": point.index, "config": point.config_name, "workload": point.workload, "plan": point.plan}
    return row | {name: point.asked(name) for name in SETTINGS}


def _one_line(text: str) -> str:
    """A reason fit for a table: a GPU's errors have several lines."""
    return printable(" ".join(text.split()))


class _Group:
    """The schedules of a workload and their steps at every window asked for, each made once."""

    def __init__(self, workload: SweptWorkload, times: Times) -> None:
        self.workload, self.times = workload, times
        self._schedules: dict[SchedulerSettings, CountedSchedule] = {}
        self._steps: dict[tuple[SchedulerSettings, int], CountedSteps] = {}

    def row(self, point: DesignPoint) -> Row:
        """The row of a point; whatever it raises is its `error`."""
        try:
            return failed_row(point, "") | self._result(point)
        except ValueError as error:
            return failed_row(point, str(error))
        except Exception as error:
            return failed_row(point, f"{type(error).__name__}: {error}")

    def _result(self, point: DesignPoint) -> Row:
        """What a row says beside its knobs."""
        config = config_of(point)
        steps = self._steps_of(schedule_of(point), config.window)
        plan = plan_of(point, config, steps)
        cost = plan_cost(plan)
        dispatched = dispatch_steps(steps, plan)
        return {
            "cudagraph_capture_sizes": list(plan.model_sizes),
            "decoder_replay_cudagraph_capture_sizes": list(plan.replay_sizes),
            "num_replay_graphs": cost.num_replay_graphs,
            "num_model_graphs": cost.num_model_graphs,
            "num_full_graphs": cost.num_full_graphs,
            "static_buffer_bytes": cost.static_buffer_bytes,
            "break_buffer_bytes": cost.break_buffer_bytes,
            **step_columns(dispatched),
            **self.times(point, self.workload, dispatched, plan),
        }

    def _steps_of(self, settings: SchedulerSettings, window: int) -> CountedSteps:
        if settings not in self._schedules:
            self._schedules[settings] = count_schedule(self.workload.requests(), settings)
        if (settings, window) not in self._steps:
            self._steps[settings, window] = self._schedules[settings].at_window(window)
        return self._steps[settings, window]
