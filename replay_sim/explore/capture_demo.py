"""A small function with one eager break, captured and replayed: order, bits, live values, Python calls and memory."""

from __future__ import annotations

from collections import Counter

import attrs
import pandas as pd
import torch

from replay_sim.capture import BreakableGraph, CaptureBackend, capture, eager_break, warm_up
from replay_sim.capture.host import HostBackend
from replay_sim.measure.run_steps import make_backend

ROWS, WIDTH = 8, 16
MIB = 1 << 20
ARENA_BYTES = 1 << 30
MODES = {"PIECEWISE": False, "FULL": True}
"""Whether breaks are captured as they are."""


class SmallFunction:
    """relu(x @ weight), then a break that multiplies by the live `scale`, then + x; all (ROWS, WIDTH) float32.

    `calls` counts how often Python ran the function and the break.
    """

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).to(device)
        self.scale = 1.0
        self.calls: Counter[str] = Counter(function=0, scale_break=0)

    def __call__(self) -> torch.Tensor:
        """Run it on what `x` and `scale` are now."""
        self.calls["function"] += 1
        u = torch.mm(self.x, self.weight).relu()
        out = torch.empty_like(u)
        scale_break(u, out, self)
        return out + self.x


@eager_break
def scale_break(u: torch.Tensor, out: torch.Tensor, live: SmallFunction) -> None:
    """Writes `u` times the scale of this step into `out`, as attention writes by the metadata of this step (C4, C5)."""
    live.calls["scale_break"] += 1
    torch.mul(u, live.scale, out=out)


def bytes_in_use(backend: CaptureBackend, pool: object) -> int:
    """Bytes of the pool's blocks that are not free."""
    if isinstance(backend, HostBackend):
        assert isinstance(pool, int)
        return backend.arena.allocator.allocated_bytes(pool)
    handles = pool.handles  # type: ignore[attr-defined]
    segments = torch.cuda.memory_snapshot()
    return sum(segment["allocated_size"] for segment in segments if tuple(segment["segment_pool_id"]) in handles)


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """How many float32 elements differ in any bit."""
    return int((left.contiguous().view(torch.int32) != right.contiguous().view(torch.int32)).sum())


class CaptureDemo:
    """The small function captured in both modes into one pool: PIECEWISE, which breaks, and FULL, which does not."""

    def __init__(self, backend: CaptureBackend | None = None, seed: int = 0) -> None:
        self.backend = backend or make_backend("auto")
        self.pool, self.stream = self.backend.make_pool(), self.backend.make_stream()
        self.function = SmallFunction(self.backend.device, seed)
        self.graphs: dict[str, BreakableGraph] = {}
        self._seed = seed

    def capture(self) -> dict[str, BreakableGraph]:
        """Warm up on the capture stream, then capture in each mode (C1, C8)."""
        with self.backend.on_stream(self.stream), torch.no_grad():
            warm_up(self.function, self.backend)
        self.function.calls = Counter(dict.fromkeys(self.function.calls, 0))
        for mode, breaks_are_captured in MODES.items():
            self.graphs[mode] = capture(
                self.function,
                backend=self.backend,
                pool=self.pool,
                stream=self.stream,
                breaks_are_captured=breaks_are_captured,
                name=mode,
            )
        return self.graphs

    def live_table(self, scales: tuple[float, ...] = (1.0, 3.0, -0.5)) -> pd.DataFrame:
        """For new inputs and each live scale: elements in which a replay of each mode differs from eager (C5)."""
        generator = torch.Generator().manual_seed(self._seed + 1)
        lines = {}
        for scale in scales:
            self.function.x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
            self.function.scale = scale
            expected = self.function().clone()
            lines[scale] = [differing(graph.replay(), expected) for graph in self.graphs.values()]
        self.function.scale = 1.0
        columns = [f"{mode}: elements that differ" for mode in self.graphs]
        return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis("scale of the step")

    def calls_table(self, replays: int = 5) -> pd.DataFrame:
        """How often Python runs the function and its break in `replays` replays of each mode (C2)."""
        lines = {}
        for mode, graph in self.graphs.items():
            before = Counter(self.function.calls)
            for _ in range(replays):
                graph.replay()
            lines[mode] = [self.function.calls[name] - before[name] for name in before]
        columns = [f"Python calls of {name}" for name in self.function.calls]
        return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis(f"{replays} replays of")

    def memory_table(self) -> pd.DataFrame:
        """Bytes of the pool after the captures, reserved and in use by any tensor (C3, C8)."""
        lines = [self.backend.reserved_bytes(self.pool), bytes_in_use(self.backend, self.pool)]
        return pd.DataFrame({"bytes": lines}, index=["reserved by the pool", "in use"])


@attrs.frozen
class Poison:
    """The output of a graph before and after its first replay, on the host backend (C12)."""

    before: torch.Tensor
    after: torch.Tensor

    def table(self) -> pd.DataFrame:
        """The first elements of the first row, and how many of all are NaN."""
        lines = {
            when: [*tensor[0, :4].tolist(), int(tensor.isnan().sum()), tensor.numel()]
            for when, tensor in (("before the first replay", self.before), ("after it", self.after))
        }
        columns = [*(f"[0, {column}]" for column in range(4)), "NaN", "of"]
        return pd.DataFrame.from_dict(lines, orient="index", columns=columns).round(4)


def poison(seed: int = 0) -> Poison:
    """Capture the small function on the host backend and look at its output before anything was replayed (C12)."""
    graph = CaptureDemo(HostBackend(ARENA_BYTES), seed).capture()["PIECEWISE"]
    before = graph.outputs.clone()
    return Poison(before, graph.replay().clone())


def order_table(sizes: tuple[int, ...] = (8192, 6144, 4096, 2048)) -> pd.DataFrame:
    """MiB that a pool has reserved after each capture, a line a capture and a column an order (C8).

    Of `(x * 2).relu()` on `sizes` rows of 4 KiB, by shapes alone under the CUDA caching allocator's rules.
    """
    falling, rising = sorted(sizes, reverse=True), sorted(sizes)
    columns = {
        "largest first": _reserved(falling),
        "smallest first": _reserved(rising),
        "largest first, outputs held": _reserved(falling, hold_outputs=True),
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(1, len(sizes) + 1, name="captures"))


def _reserved(order: list[int], *, hold_outputs: bool = False) -> list[int]:
    backend = HostBackend(ARENA_BYTES, shapes_only=True)
    pool, stream = backend.make_pool(), backend.make_stream()
    x = torch.empty(max(order), 1024)
    graphs, reserved = [], []
    for rows in order:

        def function(rows: int = rows) -> torch.Tensor:
            return (x[:rows] * 2).relu()

        graphs.append(capture(function, backend=backend, pool=pool, stream=stream, hold_outputs=hold_outputs))
        reserved.append(backend.reserved_bytes(pool) // MIB)
    return reserved
