"""What a capture refuses and what it leaves behind: each case tried for real, and another capture right after it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import attrs
import pandas as pd
import torch

from replay_sim.capture import BreakableGraph, CaptureBackend, CaptureError, capture, eager_break
from replay_sim.capture.eager_break import current_recorder
from replay_sim.explore.capture_demo import ROWS, WIDTH, bytes_in_use, differing
from replay_sim.measure.run_steps import make_backend


class Place:
    """A backend with a pool and a stream, and an input x (ROWS, WIDTH) float32."""

    def __init__(self, backend: CaptureBackend | None = None) -> None:
        self.backend = backend or make_backend("auto")
        self.pool, self.stream = self.backend.make_pool(), self.backend.make_stream()
        self.x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(self.backend.device)

    def capture(self, function: Callable[[], object]) -> BreakableGraph:
        """Capture into the pool."""
        return capture(function, backend=self.backend, pool=self.pool, stream=self.stream)

    def next_capture_works(self) -> bool:
        """Whether a capture now, and its replay, give the bits of an eager call."""
        graph = self.capture(lambda: self.x * 2 + 1)
        return differing(graph.replay(), self.x * 2 + 1) == 0


@eager_break
def returns_new(x: torch.Tensor) -> torch.Tensor:
    """A break that must not be: it returns a tensor that it makes."""
    return x + 1


@eager_break
def raises_in_break(error: BaseException) -> None:
    """A break that fails."""
    raise error


def _another_thread(place: Place) -> None:
    """Capture on the same backend from another thread, and raise here what it raised there."""
    raised: list[CaptureError] = []

    def work() -> None:
        try:
            place.capture(lambda: place.x + 1)
        except CaptureError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in raised:
        raise error


Case = Callable[[Place], object]
REFUSED: dict[str, tuple[str, Case]] = {
    "read a value on the host": ("C10", lambda place: (place.x * 2).sum().item()),
    "branch on a value": ("C10", lambda place: bool((place.x > 0).any())),
    "find where something holds": ("C10", lambda place: (place.x > 0).nonzero()),
    "index with a mask": ("C10", lambda place: place.x[place.x > 0]),
    "make a tensor of host data": ("C10", lambda place: place.x + torch.tensor([1.0], device=place.x.device)),
    "return a new tensor from a break": ("C4", lambda place: returns_new(place.x * 2)),
    "capture inside a capture": ("C6", lambda place: place.capture(lambda: place.x * 2)),
    "capture from a second thread": ("C6", _another_thread),
    "capture nothing": ("C11", lambda place: None),
}
"""What is tried inside a capture, by what it is, with the clause that forbids it."""


@attrs.frozen
class Refusal:
    """One case: its clause, the message of the CaptureError, empty if there was none, and whether the next works."""

    tried: str
    clause: str
    message: str
    next_capture_works: bool


def refusals(backend: CaptureBackend | None = None) -> tuple[Refusal, ...]:
    """Try each case of REFUSED inside a capture, one after the other, in one pool (C4, C6, C10, C11)."""
    place = Place(backend)
    found = []
    for tried, (clause, case) in REFUSED.items():
        message = ""
        try:
            place.capture(lambda case=case: case(place))  # type: ignore[misc]
        except CaptureError as error:
            message = str(error)
        found.append(Refusal(tried, clause, message, place.next_capture_works()))
    return tuple(found)


def refusals_table(found: tuple[Refusal, ...]) -> pd.DataFrame:
    """A line a case."""
    lines = [(case.clause, case.message, case.next_capture_works) for case in found]
    index = pd.Index([case.tried for case in found], name="tried in a capture")
    return pd.DataFrame(lines, index=index, columns=["clause", "refused with", "next capture works"])


@attrs.frozen
class Aftermath:
    """What an exception in a capture leaves behind (C7, C9).

    `seen` is the very exception that the caller gets; `is_capturing` whether the thread still captures;
    `bytes_in_use` of the pool; `collector_inside` and `collector_after` whether garbage is collected by itself.
    """

    where: str
    seen: str
    is_original: bool
    is_capturing: bool
    bytes_in_use: int
    collector_inside: bool
    collector_after: bool
    next_capture_works: bool


def _in_a_segment(place: Place, error: BaseException) -> None:
    place.x.mul(2).relu()
    raise error


def _in_a_break(place: Place, error: BaseException) -> None:
    place.x.mul(2).relu()
    raises_in_break(error)


RAISED: dict[str, tuple[Callable[[Place, BaseException], None], BaseException]] = {
    "in a segment": (_in_a_segment, ValueError("wrong in a segment")),
    "in a break": (_in_a_break, ValueError("wrong in a break")),
    "an interrupt in a break": (_in_a_break, KeyboardInterrupt("stopped by hand")),
}
"""Where the captured function raises, and what."""


def aftermaths(backend: CaptureBackend | None = None) -> tuple[Aftermath, ...]:
    """Raise each case of RAISED inside a capture and look at what is left; the collector is on before (C7, C9)."""
    place = Place(backend)
    gc.enable()
    return tuple(_aftermath(place, where, function, error) for where, (function, error) in RAISED.items())


def _aftermath(
    place: Place, where: str, function: Callable[[Place, BaseException], None], error: BaseException
) -> Aftermath:
    inside: list[bool] = []

    def captured() -> None:
        inside.append(gc.isenabled())
        function(place, error)

    seen, is_original = "", False
    try:
        place.capture(captured)
    except BaseException as caught:
        seen, is_original = f"{type(caught).__name__}: {caught}", caught is error
        caught.__traceback__ = None  # its frames hold the tensors of the capture
    return Aftermath(
        where=where,
        seen=seen,
        is_original=is_original,
        is_capturing=current_recorder() is not None,
        bytes_in_use=bytes_in_use(place.backend, place.pool),
        collector_inside=inside[0],
        collector_after=gc.isenabled(),
        next_capture_works=place.next_capture_works(),
    )


def aftermath_table(found: tuple[Aftermath, ...]) -> pd.DataFrame:
    """A column a case, a line for each thing that could be left behind."""
    names = {
        "seen": "the caller sees",
        "is_capturing": "a capture still runs",
        "bytes_in_use": "pool bytes in use",
        "collector_inside": "garbage collector on, inside",
        "collector_after": "garbage collector on, after",
        "next_capture_works": "next capture works",
    }
    columns = {case.where: [getattr(case, name) for name in names] for case in found}
    return pd.DataFrame(columns, index=list(names.values()))
