"""The host backend: captures on a CPU by recording dispatched operations, with the rules of CUDA graphs (C12)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from replay_sim.capture.arena import POISON, Arena
from replay_sim.capture.backend import DEFAULT_STREAM_ERROR, CaptureBackend, CaptureError, seen_as
from replay_sim.capture.guard import HostAccessGuard, check_innermost
from replay_sim.capture.host_tape import Claim, HostTape, TapeRecorder
from replay_sim.capture.ledger import Ledger
from replay_sim.capture.shape_recorder import AllocationOrder, Scratch, ShapeRecorder, ShapeRule, ShapeSegment

DEFAULT_STREAM = 0


@attrs.frozen
class HostSegment:
    """A recorded stretch of operations; a replay runs them on the addresses that they were recorded with."""

    tape: HostTape
    backend: HostBackend

    @property
    def num_operations(self) -> int:
        """How many operations a replay runs."""
        return len(self.tape)

    def replay(self) -> None:
        """Run the tape (C2)."""
        self.backend.running = self.tape
        try:
            self.tape.replay()
        finally:
            self.backend.running = None


class HostBackend(CaptureBackend):
    """Captures on a CPU: operations are recorded and not run, and what they would write holds poison.

    Tensors of a capture live in an arena under the addresses of the CUDA caching allocator's rules: when one dies,
    its bytes are used again by what is captured next. `arena_bytes` is virtual memory; what is not touched costs
    nothing. `shapes_only` neither poisons nor can replay: it measures memory for tensors of any size.
    """

    name = "host"

    def __init__(
        self,
        arena_bytes: int = 64 << 30,
        *,
        shapes_only: bool = False,
        allocation_order: AllocationOrder = lambda operation, args: None,
    ) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.arena = Arena(arena_bytes)
        self.shapes_only = shapes_only
        self.allocation_order = allocation_order
        self.shape_rules: dict[Any, ShapeRule] = {}
        self.kept: dict[tuple[Scratch, int], npt.NDArray[np.uint8]] = {}
        self.ledger: Ledger | None = None
        self.running: HostTape | None = None
        self._pools = 0
        self._streams = 0
        self._current_stream = DEFAULT_STREAM
        self._recording: tuple[TapeRecorder | ShapeRecorder, HostAccessGuard] | None = None
        self._entered = ExitStack()

    def make_pool(self) -> int:
        """A new pool of the arena's allocator."""
        self._pools += 1
        self.arena.allocator.retain_pool(self._pools)
        return self._pools

    def make_stream(self) -> int:
        """A new stream: a number that keeps blocks apart."""
        self._streams += 1
        return self._streams

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Makes `stream` current; a CPU runs in order anyway."""
        before, self._current_stream = self._current_stream, stream
        try:
            yield
        finally:
            self._current_stream = before

    def check_ready(self) -> None:
        """A CPU can always capture."""

    def begin_segment(self, pool: int, stream: int) -> None:
        """Starts to record."""
        if stream == DEFAULT_STREAM:
            raise CaptureError(DEFAULT_STREAM_ERROR)
        recorder: TapeRecorder | ShapeRecorder = (
            ShapeRecorder(self, pool, stream, forbids=True) if self.shapes_only else TapeRecorder(self, pool, stream)
        )
        self._recording, self._entered = (recorder, HostAccessGuard()), ExitStack()
        for mode in self._recording:
            self._entered.enter_context(mode)

    def check_break(self) -> None:
        """Refuses a break inside a mode that the captured function entered."""
        if self._recording is not None:
            check_innermost(*self._recording)

    def _stop(self) -> TapeRecorder | ShapeRecorder:
        if self._recording is None:
            raise CaptureError("no segment is being recorded: end_segment needs a begin_segment before it")
        recorder, _ = self._recording
        self._recording = None
        self._entered.close()
        return recorder

    def end_segment(self) -> HostSegment | ShapeSegment | None:
        """Ends the segment; None when nothing was recorded."""
        recorder = self._stop()
        if isinstance(recorder, ShapeRecorder):
            return ShapeSegment(recorder.num_operations) if recorder.num_operations else None
        return HostSegment(recorder.tape, self) if len(recorder.tape) else None

    def abort_segment(self) -> None:
        """Ends the segment and drops its tape; its tensors are freed as the caller's references go."""
        if self._recording is not None:
            self._stop()

    def run_plain(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a warm-up or a break; by shapes alone, its operations only allocate, outside of all pools."""
        if not self.shapes_only:
            return function(*args, **kwargs)
        with ShapeRecorder(self, None, self._current_stream, forbids=False):
            return function(*args, **kwargs)

    def allocate_bytes(self, nbytes: int, pool: int | None, stream: int) -> npt.NDArray[np.uint8]:
        """Memory of `nbytes` > 0 bytes, whose end as an object is its free event."""
        address = self.arena.allocator.malloc(nbytes, stream, pool)
        owner = self.arena.view(address, nbytes)
        weakref.finalize(owner, self.arena.allocator.free_later, address).atexit = False
        return owner

    def keep_ledger(self) -> Ledger:
        """From here on, a ledger is kept of what captures allocate; ValueError if it would come too late."""
        if self.shapes_only or self.arena.allocator.reserved_bytes():
            raise ValueError("a checker needs a host backend with data, and must be made before its first capture")
        if self.ledger is None:
            self.ledger = Ledger(self.arena)
        return self.ledger

    def allocate(self, like: torch.Tensor, pool: int, stream: int, tape: HostTape, operation: str) -> torch.Tensor:
        """A tensor with the shape, strides and dtype of the meta tensor `like`, in the pool's memory, poisoned.

        A kept ledger enters it as made by `operation` of the tape.
        """
        nbytes = like.untyped_storage().nbytes()
        if nbytes == 0:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        owner = self.allocate_bytes(nbytes, pool, stream)
        owner.fill(POISON)
        flat = torch.frombuffer(owner, dtype=torch.uint8)
        made = flat.view(like.dtype).as_strided(like.shape, like.stride())
        if self.ledger is not None:
            tape.entries.append(Claim(self.ledger, self.ledger.enter(owner, made, operation, tape.name)))
        return made

    def scratch_used(self) -> Iterator[tuple[str, Scratch]]:
        """Each operation with scratch, on each of the shapes that were recorded, and that scratch."""
        for (operation, *_), rule in self.shape_rules.items():
            for step in rule.order:
                if isinstance(step, Scratch):
                    yield str(operation), step

    def weak_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same arena memory that owns no block; a tensor outside of the arena is returned as it is.

        Memory outside of pools is never handed out twice, so a strong reference to it keeps nothing from reuse.
        """
        storage = tensor.untyped_storage()
        if tensor.numel() == 0 or not self.arena.contains(storage.data_ptr()):
            return tensor
        window = self.arena.view_at(storage.data_ptr(), storage.nbytes())
        with torch.inference_mode(False), torch.no_grad():
            weak = seen_as(torch.frombuffer(window, dtype=torch.uint8), tensor)
        if self.ledger is not None:
            self.ledger.alias(window, weak, tensor)
        return weak

    def live_bytes(self) -> int:
        """Always 0: a CPU keeps no workspace that a capture could allocate by accident."""
        return 0

    def reserved_bytes(self, pool: int | None = None) -> int:
        """Bytes of the segments of `pool`, or of all pools."""
        allocator = self.arena.allocator
        return allocator.reserved_bytes() if pool is None else allocator.reserved_bytes(pool)

    def empty_cache(self) -> None:
        """Empties the arena's cache."""
        self.arena.allocator.empty_cache()

    def synchronize(self) -> None:
        """Nothing to wait for."""
