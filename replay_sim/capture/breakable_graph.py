"""A breakable graph: an ordered list of captured segments and eager breaks, and the capture that makes it (C1-C11)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from replay_sim.capture.backend import CaptureBackend, CaptureError, Segment
from replay_sim.capture.eager_break import refuse_nested_capture, set_current_recorder
from replay_sim.capture.guard import enter_guards_once

WARM_UP_LIMIT = 8


@attrs.frozen
class EagerBreak:
    """A recorded break: the function and its arguments, every tensor among them held weakly (C3)."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    def replay(self) -> None:
        """Run the function again; what it reads of this step it reads from the live forward context (C5)."""
        self.function(*self.args, **self.kwargs)


@attrs.frozen
class BreakableGraph:
    """Segments and breaks in order, with the captured function's outputs held weakly (C1, C8)."""

    name: str
    entries: tuple[Segment | EagerBreak, ...]
    outputs: Any

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The captured segments, each one graph launch."""
        return tuple(entry for entry in self.entries if not isinstance(entry, EagerBreak))

    @property
    def num_breaks(self) -> int:
        """How many eager breaks a replay runs."""
        return len(self.entries) - len(self.segments)

    @property
    def num_operations(self) -> int:
        """Operations captured in all segments: on a GPU the nodes of their graphs, kernels and copies."""
        return sum(segment.num_operations for segment in self.segments)

    def replay(self) -> Any:
        """Run segments and breaks in order on the captured addresses and return the outputs (C2).

        The outputs live in the graph's pool: the next replay of any graph that shares it may overwrite them.
        """
        for entry in self.entries:
            entry.replay()
        return self.outputs


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in it, also inside tuples, lists and dicts, replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(change, item) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, also inside tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


class _Recording:
    """One capture in progress in one thread."""

    def __init__(self, backend: CaptureBackend, pool: Any, stream: Any, breaks_are_captured: bool) -> None:
        self.backend, self.pool, self.stream = backend, pool, stream
        self.breaks_are_captured = breaks_are_captured
        self.inside_break = False
        self.in_segment = False
        self.entries: list[Segment | EagerBreak] = []

    def begin(self) -> None:
        self.in_segment = True
        self.backend.begin_segment(self.pool, self.stream)

    def end(self) -> None:
        segment = self.backend.end_segment()
        self.in_segment = False
        if segment is not None:
            self.entries.append(segment)

    def abort(self) -> None:
        self.entries.clear()
        if self.in_segment:
            self.in_segment = False
            self.backend.abort_segment()

    def run_break(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self.backend.check_break()
        self.end()
        self.inside_break = True
        try:
            result = self.backend.run_plain(function, *args, **kwargs)
        finally:
            self.inside_break = False
        _check_returns_nothing_new(function, args, kwargs, result)
        weak_ref = self.backend.weak_ref
        self.entries.append(EagerBreak(function, map_tensors(weak_ref, args), map_tensors(weak_ref, kwargs)))
        self.begin()
        return result


def _check_returns_nothing_new(function: Callable[..., Any], args: tuple, kwargs: dict, result: Any) -> None:
    """C4: at replay nobody would read a tensor that the break makes anew."""
    given = {id(tensor) for tensor in tensors_in((args, kwargs))}
    fresh = [tensor for tensor in tensors_in(result) if id(tensor) not in given]
    if fresh:
        raise CaptureError(
            f"eager break {function.__qualname__} returned a new tensor of shape {tuple(fresh[0].shape)}: the next "
            "segment would read the address of the capture, not of the replay. Write into a tensor passed as an "
            "argument and return None"
        )


class _Collector:
    """The process's garbage collector, off while any thread captures and then as it was before (C9)."""

    lock = threading.Lock()
    captures = 0
    was_enabled = False


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collects garbage, keeps the collector off inside, restores it after, also on an error (C9).

    Where threads capture side by side, the first collects and the last restores: a collection in one thread may free
    a graph in the middle of another's capture.
    """
    counted = 0
    try:
        with _Collector.lock:
            if not _Collector.captures:
                enter_guards_once()
                gc.collect()
                _Collector.was_enabled = gc.isenabled()
            _Collector.captures, counted = _Collector.captures + 1, 1
            gc.disable()
        yield
    finally:
        with _Collector.lock:
            _Collector.captures -= counted
            if not _Collector.captures and _Collector.was_enabled:
                gc.enable()


def warm_up(function: Callable[[], Any], backend: CaptureBackend) -> int:
    """Runs `function` until a run leaves no new live memory behind; returns the number of runs (C8).

    Call it on the capture stream: libraries keep a workspace per stream. Raises CaptureError if every one of
    WARM_UP_LIMIT runs still allocates.
    """
    for run in range(1, WARM_UP_LIMIT + 1):
        before = backend.live_bytes()
        backend.run_plain(function)
        grown = backend.live_bytes() - before
        if grown <= 0:
            return run
    raise CaptureError(
        f"each of {WARM_UP_LIMIT} warm-up runs left new memory behind, the last {grown} bytes: a captured function "
        "must not keep what it allocates. Make its buffers before the capture"
    )


def capture(
    function: Callable[[], Any],
    *,
    backend: CaptureBackend,
    pool: Any,
    stream: Any,
    breaks_are_captured: bool = False,
    hold_outputs: bool = False,
    name: str = "graph",
) -> BreakableGraph:
    """Capture one call of `function` as a breakable graph (C1-C11).

    The function's inputs are the tensors that it closes over: a replay reads the same addresses. With
    `breaks_are_captured` (a FULL graph) eager breaks are captured as they are. An exception leaves no trace: the
    stream is not capturing, the pool's blocks are free again, and the original error is raised (C7). Raises
    CaptureError for a nested capture and one on a backend that another thread uses (C6), an empty graph, another
    current device (C11), a break that returns a new tensor (C4), and what cannot be captured (C10). `hold_outputs`
    keeps the outputs' memory from reuse, for study (D5 of the known faults): by default they are held weakly and live
    until the next graph of the pool runs (C8).
    """
    refuse_nested_capture(name)
    backend.check_ready()
    recording = _Recording(backend, pool, stream, breaks_are_captured)
    with backend.capturing(name), garbage_collection_paused(), backend.on_stream(stream), torch.no_grad():
        try:
            set_current_recorder(recording)
            recording.begin()
            outputs = function()
            recording.end()
        except BaseException:
            recording.abort()
            raise
        finally:
            set_current_recorder(None)
        if all(isinstance(entry, EagerBreak) for entry in recording.entries):
            raise CaptureError(f"{name!r} captured no operation: an empty graph has nothing to replay")
        kept = outputs if hold_outputs else map_tensors(backend.weak_ref, outputs)
        return BreakableGraph(name, tuple(recording.entries), kept)
