"""Runs any function through capture and replay on a CPU: what CUDA would forbid in it, and what would go stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.overrides import BaseTorchFunctionMode

from replay_sim.capture.backend import CaptureError
from replay_sim.capture.breakable_graph import BreakableGraph, EagerBreak, capture, tensors_in, warm_up
from replay_sim.capture.checker import Checker
from replay_sim.capture.host import HostBackend, HostSegment
from replay_sim.capture.host_tape import Call
from replay_sim.capture.source_line import SourceLine, failing_line

ARENA_BYTES = 16 << 30
ROUNDS = 3
FIRST, SECOND = "the graph", "a second graph of the same function"


@attrs.frozen
class Finding:
    """One reason why the function is not safe in a graph; the message says the operation and the remedy.

    `kind` is forbidden (at capture), held (memory made inside the capture that stays), stale (read after others
    wrote it) or differs (a replay does not give what an eager call gives).
    """

    kind: str
    message: str
    source: SourceLine | None


@attrs.frozen
class CheckReport:
    """What was found, what the caller must know (notes), and what a capture is made of; bytes of the graph pool."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    num_segments: int = 0
    num_breaks: int = 0
    num_operations: int = 0
    pool_bytes: int = 0

    @property
    def is_safe(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def check_function(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    warms_up: bool = True,
    folder: Path | None = None,
) -> CheckReport:
    """Captures `function(*args, **kwargs)` twice, replays it on changed inputs, and compares with eager calls.

    The tensors among the arguments are the graph's inputs: their values are changed in place. `folder` holds the
    user's own files, whose lines are named first. Raises what the function raises when it runs eagerly.
    """
    return _Check(lambda: function(*args, **(kwargs or {})), tensors_in((args, kwargs or {})), folder).run(warms_up)


class _Check:
    """One function under check, with its input tensors."""

    def __init__(self, call: Callable[[], Any], inputs: list[torch.Tensor], folder: Path | None) -> None:
        self.call, self.inputs, self.folder = call, inputs, folder
        self.backend = HostBackend(ARENA_BYTES)
        self.checker = Checker(self.backend)
        self.pool, self.stream = self.backend.make_pool(), self.backend.make_stream()
        self.findings: list[Finding] = []

    def run(self, warms_up: bool) -> CheckReport:
        with torch.no_grad():
            if warms_up:
                with self.backend.on_stream(self.stream):
                    warm_up(self.call, self.backend)
            graph, second = self._capture(FIRST), None
            if graph is not None:
                second = self._capture(SECOND)
            if graph is None or second is None:
                return CheckReport(tuple(self.findings))
            self._find_held()
            try:
                for seed in range(ROUNDS):
                    self._compare(graph, seed)
                    with _restored(self._state(second)):
                        self.checker.replay(second)
            except CaptureError as error:
                self.findings.append(Finding("forbidden", str(error), None))
                return CheckReport(tuple(self.findings))
            self.findings += [Finding("stale", str(found), found.source) for found in self.checker.findings]
            with _restored(self._state(graph)):
                notes = tuple(self._stale_outputs(graph, second))
        return CheckReport(
            tuple(self.findings),
            notes,
            len(graph.segments),
            graph.num_breaks,
            graph.num_operations,
            self.backend.reserved_bytes(self.pool),
        )

    def _capture(self, name: str) -> BreakableGraph | None:
        """The graph; None with a finding if it cannot be captured."""
        try:
            return capture(self.call, backend=self.backend, pool=self.pool, stream=self.stream, name=name)
        except CaptureError as error:
            message, traceback = str(error), error.__traceback__
        except Exception as error:
            message = f"{type(error).__name__} in the capture, and not in an eager call: {error}"
            traceback = error.__traceback__
        self.findings.append(Finding("forbidden", message, failing_line(traceback, self.folder)))
        return None

    def _find_held(self) -> None:
        for made in self.checker.kept():
            message = (
                f"{made} is still held after the capture: it lies in the graphs' pool, where other graphs write over "
                "it. Make it before the capture, or let go of it"
            )
            self.findings.append(Finding("held", message, made.source))

    def _compare(self, graph: BreakableGraph, seed: int) -> None:
        """A replay against an eager call on the same inputs, random numbers and state; round 0 changes no input."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.inputs if seed else ():
            _change(tensor, generator)
        state = self._state(graph)
        with _restored(state):
            torch.manual_seed(seed)
            with self.checker.watching():
                replayed = [tensor.clone() for tensor in tensors_in(graph.replay())]
            replayed += [tensor.clone() for tensor in state]
        with _restored(state):
            torch.manual_seed(seed)
            with BaseTorchFunctionMode():  # without any mode, some modules take kernels that no capture takes
                expected = [tensor.clone() for tensor in tensors_in(self.call())]
            expected += [tensor.clone() for tensor in state]
        differing = [i for i, pair in enumerate(zip(replayed, expected, strict=False)) if not _same_bits(*pair)]
        if (differing or len(replayed) != len(expected)) and not any(f.kind == "differs" for f in self.findings):
            place = f"output {differing[0]}" if differing and differing[0] < len(expected) - len(state) else "its state"
            inputs = "changed inputs" if seed else "the inputs of the capture"
            message = (
                f"a replay on {inputs} gives other bits in {place} than an eager call: a value that Python holds or "
                "decides, such as a counter, a branch or a number, is fixed at capture. Keep it in a tensor, or "
                "use it in an eager break"
            )
            self.findings.append(Finding("differs", message, None))

    def _state(self, graph: BreakableGraph) -> list[torch.Tensor]:
        """The whole memory, as bytes, of all tensors outside of the pool that the graph or its breaks are given."""
        given = list(self.inputs)
        for entry in graph.entries:
            if isinstance(entry, EagerBreak):
                given += tensors_in((entry.args, entry.kwargs))
            elif isinstance(entry, HostSegment):
                calls = [call for call in entry.tape.entries if isinstance(call, Call)]
                given += tensors_in([(call.args, call.kwargs) for call in calls])
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in given}
        outside = [storage for pointer, storage in storages.items() if not self.backend.arena.contains(pointer)]
        return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in outside]

    def _stale_outputs(self, graph: BreakableGraph, second: BreakableGraph) -> Iterator[str]:
        """A note for each output that another graph of the pool writes over."""
        outputs = tensors_in(self.checker.replay(graph))
        self.checker.replay(second)
        for index, output in enumerate(outputs):
            if self.checker.is_stale(output):
                yield (
                    f"output {index}, {tuple(output.shape)} {str(output.dtype).removeprefix('torch.')}, lies in the "
                    "graphs' pool and goes stale at the next replay of any of them: read or copy it before"
                )


@contextmanager
def _restored(state: list[torch.Tensor]) -> Iterator[None]:
    """Gives the tensors their values back afterwards."""
    before = [tensor.clone() for tensor in state]
    try:
        yield
    finally:
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _change(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Other values of the same kind, in place: shuffled, and numbers that are not whole scaled by 0.5 to 1.5.

    An element that the tensor shows at several places, as after `expand`, is one value.
    """
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places += (torch.arange(size) * stride).view(-1, *(1,) * (tensor.dim() - dim - 1))
    places = places.unique()
    elements = tensor.as_strided((int(places[-1]) + 1,), (1,)) if len(places) else tensor.reshape(-1)
    if not tensor.is_complex():
        elements = elements.view(_BITS[tensor.dtype.itemsize])
    values = elements[places][torch.randperm(len(places), generator=generator)]
    if tensor.is_floating_point():
        numbers = values.view(tensor.dtype)
        factors = torch.rand(values.shape, generator=generator) + 0.5
        values = (numbers * factors.to(tensor.dtype)).view(values.dtype)
    elements[places] = values


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)
