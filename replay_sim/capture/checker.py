"""The checker: finds reads of memory that another graph has since written, on the host backend (O1-O3, C8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.capture.breakable_graph import BreakableGraph, map_tensors, tensors_in
from replay_sim.capture.host import HostBackend
from replay_sim.capture.host_tape import is_view, written_arguments
from replay_sim.capture.ledger import Allocation, Ledger
from replay_sim.capture.source_line import SourceLine, calling_line

aten = torch.ops.aten

_READS_NOTHING = {
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
}
_WRITES_ALL = {aten.copy_, aten.zero_, aten.fill_, aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_}


@attrs.frozen
class StaleRead:
    """A read of `tensor`'s memory after `writer` took it; `writer` is `tensor` itself where its own graph did.

    `reader` is the graph that reads, or "eager code"; `never_run` that no replay has written the tensor at all.
    """

    tensor: Allocation
    writer: Allocation
    operation: str
    reader: str
    source: SourceLine | None
    never_run: bool

    @property
    def remedy(self) -> str:
        """What to do about it."""
        made, wrote = self.tensor.graph, self.writer.graph
        if self.reader not in (made, EAGER):
            return "make the tensor before the captures: what a capture makes is used again by the graphs of its pool"
        if self.never_run:
            return f"replay {made} before the tensor is read, or make it before the capture"
        if self.reader == made:
            return f"capture {wrote} on a stream or in a pool of its own, or keep the tensor in a buffer made before"
        if wrote == made:
            return f"copy the tensor before {made} runs again"
        return f"copy the tensor before {wrote} runs, or capture {wrote} on a stream or in a pool of its own"

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source is not None else ""
        read = f"{self.operation} in {self.reader}{where} reads {self.tensor}"
        if self.never_run:
            return f"{read}, which no replay has written: {self.remedy}"
        if self.writer == self.tensor:
            return f"{read}, which a later replay of {self.writer.graph} has written again: {self.remedy}"
        return f"{read}, over which {self.writer.graph} has written {self.writer}: {self.remedy}"


EAGER = "eager code"


class Checker:
    """Watches replays on a host backend; make it before the captures.

    Inside `watching()` every operation is checked: those of the graphs, of their breaks, and of the code that reads
    outputs. `findings` holds each stale read once.
    """

    def __init__(self, backend: HostBackend) -> None:
        self.backend = backend
        self.ledger: Ledger = backend.keep_ledger()
        self.findings: list[StaleRead] = []
        self._seen: set[tuple[int, int, str, str]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Checks all operations inside."""
        with _Watch(self):
            yield

    def replay(self, graph: BreakableGraph) -> Any:
        """Replay the graph under watch; its outputs as views that know which replay they came from."""
        with self.watching():
            return map_tensors(lambda tensor: tensor.view_as(tensor), graph.replay())

    def kept(self) -> tuple[Allocation, ...]:
        """What was made inside a capture and is still held, by none of the graphs: a memoised workspace."""
        return self.ledger.kept()

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether a read of `tensor` now would not see what was written to it."""
        return self._writer_over(tensor) is not None

    def _writer_over(self, tensor: torch.Tensor) -> Allocation | None:
        """Whose memory some of the tensor's is now; its own allocation if that was not written, or written again."""
        allocation = self.ledger.allocation_of(tensor)
        if allocation is None or tensor.numel() == 0:
            return None
        last = self.ledger.last_claim(allocation)
        writer = self.ledger.intruder(tensor, allocation) if last else allocation
        if writer is None and _claim_of(tensor) not in (None, last):
            return allocation
        return writer

    def check_read(self, tensor: torch.Tensor, operation: str) -> None:
        """Adds a finding if memory of `tensor` has been written by others since it was."""
        writer, allocation = self._writer_over(tensor), self.ledger.allocation_of(tensor)
        if writer is None or allocation is None:
            return
        tape = self.backend.running
        reader, source = (EAGER, calling_line()) if tape is None else (tape.name, tape.source)
        key = (allocation.serial, writer.serial, operation, reader)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(
                StaleRead(allocation, writer, operation, reader, source, not self.ledger.last_claim(allocation))
            )


class _Watch(TorchDispatchMode):
    """Checks what each operation reads and notes what it writes."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker, self._ledger = checker, checker.ledger

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if is_view(operation):
            return self._view(operation, args, kwargs)
        if operation.overloadpacket not in _READS_NOTHING:
            self._check(operation, args, kwargs)
        return operation(*args, **kwargs)

    def _view(self, operation: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        viewed = operation(*args, **kwargs)
        base = args[0]
        allocation = self._ledger.allocation_of(base) if isinstance(base, torch.Tensor) else None
        if allocation is not None:
            claim = _claim_of(base) or self._ledger.last_claim(allocation) or None
            for tensor in tensors_in(viewed):
                tensor._claim = claim  # type: ignore[attr-defined]
        return viewed

    def _check(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        written = written_arguments(operation, args, kwargs)
        overwrites = operation.overloadpacket in _WRITES_ALL or "out" in kwargs
        filled = {id(tensor) for tensor in written} if overwrites else set()
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in filled:
                self._checker.check_read(tensor, str(operation))
        for tensor in tensors_in(written) if overwrites else ():
            allocation = self._ledger.allocation_of(tensor)
            if allocation is not None and tensor.numel():
                self._ledger.write(tensor, allocation)


def _claim_of(tensor: torch.Tensor) -> int | None:
    """When the memory that this view was made of was last claimed; None for a tensor that is no such view."""
    return getattr(tensor, "_claim", None)
