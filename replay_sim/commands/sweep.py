"""`replay-sim sweep`: a grid of designs through simulation or measurement, and their table."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from replay_sim.commands import _options
from replay_sim.config.errors import printable
from replay_sim.progress import progress_bar

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager
    from types import FrameType

    from replay_sim.explore.sweep_grid import Axes
    from replay_sim.explore.sweep_measured import MeasuredTimes
    from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload
    from replay_sim.explore.sweep_rows import Row

MOST_POINTS = 1_000_000
ALL_FAILED = 1
"""The exit status of a sweep of which no point ran."""
STOPS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
FROM_SIGNAL = 128
"""What a shell adds to the number of the signal that ended a process."""
MIB = 1 << 20


@click.command("sweep", short_help="A grid of designs, simulated or measured, and their table.")
@click.argument("configs", metavar="CONFIG...", nargs=-1, required=True)
@click.option(
    "--grid",
    "grid",
    metavar="NAME=VALUES",
    multiple=True,
    required=True,
    help="An axis, such as window=64,128, max_num_seqs=8:256:8, plan=default,optimal-4,eager or profile=conversation.",
)
@_options.trace
@click.option("--profile", metavar="NAME", help="Requests drawn from a bundled profile.  [default: conversation]")
@_options.requests
@_options.seed
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [default: one a core]")
@click.option("--dask", metavar="ADDRESS", help="Run on the workers of a Dask scheduler; needs the extra `dask`.")
@click.option(
    "--measure",
    is_flag=True,
    help="Time some steps of every design on this machine's GPUs, a process for each GPU, in place of the model.",
)
@click.option("--resume", is_flag=True, help="Go on with a sweep that was interrupted or killed.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), required=True, help="A .csv or a .json.")
@click.pass_context
def command(
    context: click.Context,
    configs: tuple[str, ...],
    grid: tuple[str, ...],
    trace: str | None,
    profile: str | None,
    requests: int,
    seed: int,
    workers: int | None,
    dask: str | None,
    measure: bool,
    resume: bool,
    out: Path,
) -> int:
    """Run every design of a grid, and write a table of settings, graphs, memory, steps by mode and step time.

    CONFIG is a preset's name or a JSON file; each is swept. Finished points are kept in FILE.points until the table is
    written: what was interrupted or killed goes on with --resume. Every request waits from the start. Step times are
    modelled, or with --measure those of steps that stand for all others, run on the reference decoder in its graphs.
    """
    from replay_sim.explore.sweep import run_sweep
    from replay_sim.explore.sweep_file import PointsFile
    from replay_sim.explore.sweep_grid import parse_grid
    from replay_sim.explore.sweep_points import fingerprint
    from replay_sim.explore.sweep_rows import is_row_of
    from replay_sim.explore.sweep_table import check_out, write_table

    began = time.perf_counter()
    check_out(out)
    _options.refuse_beside_trace(context, ("requests",) if measure else ("requests", "seed"))
    runner = _runner(dask, workers, measure, seed)
    axes = parse_grid(grid)
    workloads = _workloads(axes, trace, profile, requests, seed)
    points = _points(configs, axes, workloads)
    kept = out.with_name(out.name + ".points")
    mark, is_row = fingerprint(points, workloads, runner.times), partial(is_row_of, points)
    by_source = {workload.source: workload for workload in workloads}
    finished: Mapping[int, Row] = {}
    try:
        with _stopped_by_signals(), PointsFile(kept, mark, is_row, resume=resume) as file, runner.executor as executor:
            finished = file.rows
            rows = run_sweep(points, by_source, executor, file, progress=progress_bar, **runner.how)
            write_table(out, rows)
            file.remove()
    except _StoppedError as stopped:
        click.echo(f"replay-sim: {stopped}: {_kept(len(finished), len(points), kept)}", err=True)
        return stopped.status
    written = printable(str(out))
    click.echo(_as_text(rows, f"on {runner.where} in {time.perf_counter() - began:.1f} s: {written}"))
    if all(row["error"] for row in rows):
        click.echo(f"replay-sim: no point ran: all {len(rows):,} failed, each for the reason in {written}", err=True)
        return ALL_FAILED
    return 0


class _StoppedError(BaseException):
    """The sweep was interrupted or told to end, by a signal of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(STOPS[number])
        self.status = FROM_SIGNAL + number


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise _StoppedError at the first of STOPS; a second one ends the process where it is."""

    def stop(number: int, _: FrameType | None) -> None:
        for each in STOPS:
            signal.signal(each, lambda again, _: os._exit(FROM_SIGNAL + again))
        raise _StoppedError(number)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kept(finished: int, asked: int, path: Path) -> str:
    """What is left of a sweep that was stopped, and how to go on."""
    if not finished:
        return "no point had finished, and nothing is kept"
    where = printable(str(path))
    return f"{finished:,} of {asked:,} points are in {where}; the same command with --resume goes on with them"


def _workloads(axes: Axes, trace: str | None, profile: str | None, requests: int, seed: int) -> list[SweptWorkload]:
    """The workload of the trace or profile, or those of the grid's profiles, which leaves the axes."""
    from replay_sim.explore.sweep_grid import PROFILE
    from replay_sim.explore.sweep_points import SweptWorkload
    from replay_sim.workload.source import open_workload

    profiles = axes.pop(PROFILE, None)
    if profiles is not None and (trace is not None or profile is not None):
        raise ValueError("grid has profile: neither trace nor profile may be given with it")
    names = [profile] if profiles is None else [str(name) for name in profiles]
    opened = (open_workload(trace, profile=name, num_requests=requests, seed=seed) for name in names)
    return [SweptWorkload.of(*workload) for workload in opened]


def _points(configs: tuple[str, ...], axes: Axes, workloads: list[SweptWorkload]) -> tuple[DesignPoint, ...]:
    """The design points; ValueError for a config or a plan that is not known, and for too many."""
    from math import prod

    from replay_sim.config import load_config
    from replay_sim.explore.sweep_grid import PLAN
    from replay_sim.explore.sweep_plans import EXPLICIT, check_plans
    from replay_sim.explore.sweep_points import design_points

    plans = [str(name) for name in axes.pop(PLAN, (EXPLICIT,))]
    check_plans(plans)
    count = prod(map(len, (set(configs), workloads, plans, *axes.values())))
    if count > MOST_POINTS:
        raise ValueError(f"grid: {count:,} points are not allowed; at most {MOST_POINTS:,} are")
    return design_points({printable(name): load_config(name) for name in configs}, workloads, axes, plans)


@attrs.frozen
class _Runner:
    """What the points run on, that in words, how run_sweep is to run them there, and what measures their times."""

    executor: AbstractContextManager[Executor]
    where: str
    how: dict[str, Any]
    times: MeasuredTimes | None


def _runner(dask: str | None, workers: int | None, measure: bool, seed: int) -> _Runner:
    """The runner asked for; ValueError for several, and for a measurement without a GPU."""
    from replay_sim.explore.sweep_executors import cores, dask_cluster, process_pool

    given = [f"dask is {dask!r}"] * (dask is not None) + [f"workers is {workers}"] * (workers is not None)
    given += ["measure is given"] * measure
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: only one of them may be given")
    if measure:
        return _measuring(seed)
    if dask is not None:
        return _Runner(dask_cluster(dask), f"the Dask cluster at {dask}", {}, None)
    count = workers or cores()
    return _Runner(process_pool(count), _counted(count, "worker process", "worker processes"), {}, None)


def _measuring(seed: int) -> _Runner:
    """A process for each GPU, and a task for each point, whose failure is its own; ValueError without a GPU."""
    from replay_sim.config import FLASH_RANK
    from replay_sim.explore.sweep_executors import gpu_pool, visible_gpus
    from replay_sim.explore.sweep_measured import MeasuredTimes, run_measured

    gpus = visible_gpus()
    if not gpus:
        raise ValueError("measure: no CUDA device is available here; without --measure step times are modelled")
    times = MeasuredTimes("cuda", FLASH_RANK, seed)
    how = {"run": partial(run_measured, times=times), "group_points": 1}
    return _Runner(gpu_pool(gpus), _counted(len(gpus), "GPU", "GPUs"), how, times)


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _as_text(rows: list[Row], done: str) -> str:
    """What was done, why points failed, and the design of least time for the whole workload."""
    errors = Counter(row["error"] for row in rows if row["error"])
    lines = [f"{len(rows):,} points, {errors.total():,} of which failed, {done}"]
    lines += [f"{count:,} failed: {reason}" for reason, count in errors.most_common(3)]
    ran = [row for row in rows if not row["error"]]
    if ran:
        best = min(ran, key=lambda row: row["workload_s"])
        knobs = ", ".join(
            f"{name} {best[name]}" for name in ("window", "max_num_seqs", "max_num_batched_tokens", "plan")
        )
        memory = (best["static_buffer_bytes"] + best["break_buffer_bytes"]) / MIB
        lines += [
            f"Least time: {knobs}: {best['expected_step_ms']:,.2f} ms a step, {best['workload_s']:,.1f} s for the "
            f"workload, {best['speedup']:.2f} times as fast as without replay; {memory:,.0f} MiB of buffers.",
            f"Times are {best['source']}.",
        ]
        if best["outside"]:
            lines.append(f"Of them {best['extrapolated_share']:.1%} are extrapolated: {best['outside']}.")
    return "\n".join(lines)
