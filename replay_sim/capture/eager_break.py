"""The mark of an eager break: a function that ends the segment being captured and runs live at replay (C1)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from replay_sim.capture.backend import CaptureError

P = ParamSpec("P")
R = TypeVar("R")


class Recorder(Protocol):
    """What a running capture offers to eager breaks."""

    breaks_are_captured: bool
    inside_break: bool

    def run_break(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Ends the segment, runs the break, records it and starts the next segment."""


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def current_recorder() -> Recorder | None:
    """The capture running in this thread, or None (C6)."""
    return _current.recorder


def refuse_nested_capture(name: str) -> None:
    """Raises CaptureError while a capture runs in this thread (C6); also for what would prepare a capture there."""
    if _current.recorder is not None:
        raise CaptureError(
            f"cannot capture {name!r} while another capture runs in this thread: capture the graphs one after the "
            "other; a break that needs a graph replays one that was captured before"
        )


def set_current_recorder(recorder: Recorder | None) -> None:
    """Makes `recorder` this thread's capture; only `capture` calls it."""
    _current.recorder = recorder


def eager_break(function: Callable[P, R]) -> Callable[P, R]:
    """Marks `function` as an eager break (C1).

    Called while a PIECEWISE capture records, it ends the segment, runs, is recorded for replay, and a new segment
    starts. Outside a capture, in a FULL capture and inside another break it runs as it is. It writes into tensors
    that it was given and returns None or one of them (C4); its tensors are passed as arguments, plain or in tuples,
    lists and dicts, so that they can be held weakly (C3). Per-step state is read from the forward context (C5).
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = _current.recorder
        if recorder is None or recorder.breaks_are_captured or recorder.inside_break:
            return function(*args, **kwargs)
        return recorder.run_break(function, args, kwargs)

    return call
