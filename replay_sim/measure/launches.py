"""What one step launched and how long its kernels ran, from one profiled run of it (issue 4, point 4)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from replay_sim.batch.dispatch import CudagraphMode, StepRecord

CALLS_A_SESSION = 40
"""Calls profiled in one session: starting one costs more than a step, and its event buffers are bounded."""
SYNCHRONIZE = "cudaDeviceSynchronize"
GRAPH_LAUNCH = "cudaGraphLaunch"
KERNEL_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel")
NO_WORK = ("Sync", "Stream Wait Event")
"""Ends and names of device events that wait and do not work."""


class IncompleteTraceError(RuntimeError):
    """A trace that does not hold the work of every call that was made."""


@attrs.frozen
class TraceEvent:
    """One event of a trace: nanoseconds of one clock; `on_device` for work of the GPU, else a call of the host."""

    name: str
    start_ns: int
    duration_ns: int
    on_device: bool


@attrs.frozen
class Launches:
    """Of one call: microseconds of its kernels and copies, how many they were, and launches by kind.

    `kernel_launches` are launches of one kernel each; the kernels of a graph count as one of `graph_launches`.
    """

    device_us: float
    device_operations: int
    graph_launches: int
    kernel_launches: int


def profile_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> list[Launches | None]:
    """Run each call once under the profiler; None for each where there is no GPU whose launches could be counted.

    None as well, with a warning, for the calls of a session whose trace came out incomplete. Calls must have run
    before: what a first run loads is not theirs.
    """
    if device.type != "cuda":
        return [None] * len(calls)
    found: list[Launches | None] = []
    for start in range(0, len(calls), CALLS_A_SESSION):
        session = calls[start : start + CALLS_A_SESSION]
        try:
            found += split_launches(_trace(session, device), len(session))
        except IncompleteTraceError as error:
            warnings.warn(f"launches of {len(session)} calls are not counted: {error}", stacklevel=2)
            found += [None] * len(session)
    _leave_the_driver(device)
    return found


def _trace(calls: Sequence[Callable[[], object]], device: torch.device, *, leave: bool = False) -> list[TraceEvent]:
    from torch.profiler import ProfilerActivity, profile

    os.environ["TEARDOWN_CUPTI"] = "1" if leave else "0"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize(device)
            for call in calls:
                call()
                torch.cuda.synchronize(device)
    results: Any = profiler.profiler
    return _trace_events(results.kineto_results.events())


def _leave_the_driver(device: torch.device) -> None:
    """Makes the profiler leave, else every later launch takes the host twice as long.

    It takes a session of its own: one that ends with leaving sees nothing if others came before it.
    """
    _trace([lambda: torch.zeros(1, device=device)], device, leave=True)


def _trace_events(events: Iterable[Any]) -> list[TraceEvent]:
    on_device = torch.autograd.DeviceType.CUDA
    return [
        TraceEvent(event.name(), event.start_ns(), event.duration_ns(), event.device_type() == on_device)
        for event in events
    ]


def split_launches(events: Iterable[TraceEvent], num_calls: int) -> list[Launches]:
    """The launches of each call in a trace in which the host waited for the device before and after every one.

    A call's work lies before the end of the wait that follows it. Raises IncompleteTraceError if the trace holds the
    work of another number of calls.
    """
    spans: list[list[TraceEvent]] = [[]]
    for event in sorted(events, key=lambda event: event.start_ns + (event.name == SYNCHRONIZE) * event.duration_ns):
        if event.name == SYNCHRONIZE:
            spans.append([])
        elif _is_launch(event) or _is_work(event):
            spans[-1].append(event)
    found = [_launches(span) for span in spans if span]
    if len(found) != num_calls:
        raise IncompleteTraceError(f"the profiler saw the work of {len(found)} calls, and {num_calls} were made")
    return found


def _is_launch(event: TraceEvent) -> bool:
    return not event.on_device and (event.name == GRAPH_LAUNCH or event.name.startswith(KERNEL_LAUNCHES))


def _is_work(event: TraceEvent) -> bool:
    return event.on_device and not event.name.endswith(NO_WORK)


def _launches(events: Sequence[TraceEvent]) -> Launches:
    work = [event for event in events if _is_work(event)]
    launches = [event.name for event in events if _is_launch(event)]
    graphs = launches.count(GRAPH_LAUNCH)
    device_us = sum(event.duration_ns for event in work) / 1e3
    return Launches(round(device_us, 1), len(work), graphs, len(launches) - graphs)


def check_launches(arm: str, record: StepRecord, launches: Launches | None) -> None:
    """Refuse an arm whose step in graphs launched none, or whose eager step launched one: RuntimeError names both."""
    if launches is None:
        return
    in_graphs = record.mode is not CudagraphMode.NONE or record.replay_mode is CudagraphMode.PIECEWISE
    if in_graphs != (launches.graph_launches > 0):
        replay_mode = None if record.replay_mode is None else record.replay_mode.value
        raise RuntimeError(
            f"arm {arm} ran {record.num_tokens} tokens in mode {record.mode.value}, its replay batch in {replay_mode}, "
            f"and launched {launches.graph_launches} graphs: it did not run what its name says"
        )
