"""A stack of small layers whose breaks can be chosen: captured, replayed, compared with eager, its launches counted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.capture import BreakableGraph, capture, eager_break
from replay_sim.capture.breakable_graph import EagerBreak
from replay_sim.capture.host import HostBackend
from replay_sim.capture.host_tape import ALLOCATE_ONLY, is_view
from replay_sim.explore.timeline import TimelineEntry, timeline_of

WIDTH, MOST_ROWS = 32, 64
ARENA_BYTES = 1 << 28
BREAKS = {
    "none": (),
    "attention": ("attention",),
    "attention, KV write": ("attention", "kv_write"),
    "attention, KV write, experts": ("attention", "kv_write", "experts"),
}
"""What of each layer breaks out of a PIECEWISE graph, by name."""


class LayerStack:
    """Layers of norm, projection, KV write, attention, projection, experts; activations (rows, WIDTH) float32.

    KV write and attention read `live_rows`, the step's rows without pads, as they would read attention metadata: what
    captures them fixes it. `breaking` names the functions that break.
    """

    def __init__(self, num_layers: int, breaking: tuple[str, ...], rows: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * WIDTH**-0.5

        self.rows = self.live_rows = rows
        self.x = random(rows, WIDTH)
        self.kv = [torch.zeros(MOST_ROWS, WIDTH) for _ in range(num_layers)]
        self.weights = [[random(WIDTH, WIDTH) for _ in range(5)] for _ in range(num_layers)]
        self._run = {name: BREAKING[name] if name in breaking else plain for name, plain in PLAIN.items()}

    def __call__(self) -> torch.Tensor:
        """Run all layers on `x`; rows beyond `live_rows` are pads and mean nothing."""
        x = self.x
        for kv, (wq, wkv, wo, w1, w2) in zip(self.kv, self.weights, strict=True):
            u = _norm(x)
            self._run["kv_write"](torch.mm(u, wkv), kv, self)
            out = torch.empty_like(u)
            self._run["attention"](torch.mm(u, wq), kv, out, self)
            x = x + torch.mm(out, wo)
            u, out = _norm(x), torch.empty_like(x)
            self._run["experts"](u, w1, w2, out)
            x = x + out
        return x

    def draw(self, seed: int) -> None:
        """Fresh inputs at the same address."""
        self.x.copy_(torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(seed)))


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


def kv_write(new: torch.Tensor, kv: torch.Tensor, live: LayerStack) -> None:
    """Writes the live rows of `new` into the cache."""
    kv[: live.live_rows].copy_(new[: live.live_rows])


def attention(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, live: LayerStack) -> None:
    """Every live row attends to all live rows of the cache; pads keep what they hold."""
    rows = live.live_rows
    weights = torch.softmax(torch.mm(q[:rows], kv[:rows].t()), 1)
    torch.mm(weights, kv[:rows], out=out[:rows])


def experts(u: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, out: torch.Tensor) -> None:
    """Two products with a relu between them."""
    torch.mm(torch.mm(u, w1).relu(), w2, out=out)


PLAIN: dict[str, Callable[..., None]] = {"attention": attention, "kv_write": kv_write, "experts": experts}
BREAKING = {name: eager_break(function) for name, function in PLAIN.items()}


class OperationCount(TorchDispatchMode):
    """Counts the operations that run under it; views and bare allocations launch nothing and do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        self.operations += not is_view(operation) and operation not in ALLOCATE_ONLY
        return operation(*args, **(kwargs or {}))


@attrs.frozen
class StackCapture:
    """One capture of a stack, and what a step with it and without it launches.

    `entries` are its segments and breaks in order; `operations` are captured in its segments, `break_operations` run
    eagerly in its breaks, `eager_operations` in a call without any graph. `differing` of `compared` elements of real
    rows differ in any bit between a replay and an eager call.
    """

    entries: tuple[TimelineEntry, ...]
    operations: int
    break_operations: int
    eager_operations: int
    differing: int
    compared: int

    @property
    def num_segments(self) -> int:
        """Segments, each one graph launch."""
        return sum(not entry.is_break for entry in self.entries)

    @property
    def num_breaks(self) -> int:
        """Breaks, each a call of Python."""
        return len(self.entries) - self.num_segments

    @property
    def launches(self) -> int:
        """What the host launches in a step with the graph: its segments and the operations of its breaks."""
        return self.num_segments + self.break_operations


@lru_cache(maxsize=512)
def capture_stack(num_layers: int, breaks: str, mode: str, size: int, step_rows: int) -> StackCapture:
    """Capture the stack at `size` rows in `mode`, PIECEWISE or FULL, and replay a step of `step_rows` rows on it.

    Captured on the host backend, whose operations stand for a GPU's kernels.
    """
    stack = LayerStack(num_layers, BREAKS[breaks], size)
    backend = HostBackend(ARENA_BYTES)
    with _short_collection():
        graph = capture(
            stack,
            backend=backend,
            pool=backend.make_pool(),
            stream=backend.make_stream(),
            breaks_are_captured=mode == "FULL",
        )
    stack.live_rows = step_rows
    stack.draw(seed=1)
    replayed = graph.replay()[:step_rows].clone()
    with torch.no_grad(), OperationCount() as eager:
        expected = stack()[:step_rows]
    return StackCapture(
        entries=timeline_of(graph, ()),
        operations=graph.num_operations,
        break_operations=_break_operations(graph),
        eager_operations=eager.operations,
        differing=int((replayed.view(torch.int32) != expected.view(torch.int32)).sum()),
        compared=expected.numel(),
    )


def _break_operations(graph: BreakableGraph) -> int:
    with torch.no_grad(), OperationCount() as counted:
        for entry in graph.entries:
            if isinstance(entry, EagerBreak):
                entry.replay()
    return counted.operations


@contextmanager
def _short_collection() -> Iterator[None]:
    """Sets aside what is there already: the collection before a capture (C9) then takes no time that a slider shows.

    Where a process has set aside something of its own, that stays as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
