"""Prediction of pool bytes from shapes: a plan captured on a CPU without its tensors, in every arrangement (O1-O5)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator

import attrs
import torch

from replay_sim.capture.breakable_graph import tensors_in
from replay_sim.capture.graph_memory import GraphMemory, MemoryPlayer, MemoryRecorder
from replay_sim.capture.host import HostBackend
from replay_sim.config.shapes import DecoderShape
from replay_sim.decoder.ops.scratch import allocation_order
from replay_sim.decoder.step import Progress, StepRunner
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.replay.sharing import PoolSharing, SharingChoice

BLOCK_SIZE = 64
ARENA_BYTES = 256 << 30
MODEL_STREAM, REPLAY_STREAM = 1, 2
MODEL_POOL, REPLAY_POOL = 1, 2
REPLAY_PLACES = {
    PoolSharing.SHARED: (MODEL_STREAM, MODEL_POOL),
    PoolSharing.OWN_STREAM: (REPLAY_STREAM, MODEL_POOL),
    PoolSharing.OWN_POOL: (MODEL_STREAM, REPLAY_POOL),
}
"""Stream and pool of the replay graphs; the model graphs are on MODEL_STREAM in MODEL_POOL."""


@attrs.frozen
class PoolGrowth:
    """Reserved bytes that one group of graphs, "model" or "replay", adds over its whole capture (O5).

    `pool_bytes` are those of graph pools. What else a capture reserves is not predicted: library workspaces, which are
    listed by name, warm-ups, whose memory goes back with the cache, and the driver's own for the graphs.
    """

    arrangement: PoolSharing
    largest_first: bool
    outputs_held: bool
    group: str
    num_graphs: int
    pool_bytes: int


@attrs.frozen
class PlanMemory:
    """What the graphs of a plan allocate on a decoder shape, each recorded once.

    `before` is what was allocated before the first capture: weights, caches and buffers; `libraries` what libraries
    allocate once on each stream. `model_graphs` (PIECEWISE), `full_graphs` and `replay_graphs` are by descending
    size. `workspaces` are the (name, bytes) that libraries keep, `scratch` the (operation, name, most bytes) that
    operations use inside.
    `static_bytes` are the replay layers' input buffers (B1), `break_bytes` their output buffers (L4).
    """

    before: GraphMemory
    libraries: GraphMemory
    model_graphs: tuple[GraphMemory, ...]
    full_graphs: tuple[GraphMemory, ...]
    replay_graphs: tuple[GraphMemory, ...]
    workspaces: tuple[tuple[str, int], ...]
    scratch: tuple[tuple[str, str, int], ...]
    static_bytes: int
    break_bytes: int
    sharing: SharingChoice
    seconds: float

    @property
    def num_graphs(self) -> int:
        """Graphs of both groups."""
        return len(self.model_graphs) + len(self.full_graphs) + len(self.replay_graphs)

    def in_order(self, largest_first: bool) -> tuple[tuple[GraphMemory, ...], tuple[GraphMemory, ...]]:
        """The model graphs, PIECEWISE before FULL, and the replay graphs, in the order of their capture (C8)."""
        step = 1 if largest_first else -1
        return (*self.model_graphs[::step], *self.full_graphs[::step]), self.replay_graphs[::step]

    def predict(self, *, largest_first: bool = True, hold_outputs: bool = False) -> tuple[PoolGrowth, ...]:
        """The growth by the model graphs and then by the replay graphs, in each arrangement (O1-O3).

        `hold_outputs` keeps the outputs of every graph alive (D5).
        """
        # One allocator serves all arrangements: blocks of another stream or pool are no candidates (O2).
        player = make_player()
        player.play(self.before)
        model, replay = self.in_order(largest_first)

        def capture(graphs: Iterable[GraphMemory], stream: int, pool: int) -> int:
            def play() -> None:
                for memory in graphs:
                    player.play(memory, stream, pool, holds_outputs=hold_outputs)

            return _growth(player, play)

        model_bytes = capture((self.libraries, *model), MODEL_STREAM, MODEL_POOL)
        shared = capture(replay, *REPLAY_PLACES[PoolSharing.SHARED])
        own_stream = capture((self.libraries, *replay) if replay else (), *REPLAY_PLACES[PoolSharing.OWN_STREAM])
        own_pool = capture(replay, *REPLAY_PLACES[PoolSharing.OWN_POOL])
        replay_bytes = {
            PoolSharing.SHARED: shared,
            PoolSharing.OWN_STREAM: own_stream,
            PoolSharing.OWN_POOL: own_pool,
        }
        return tuple(
            PoolGrowth(sharing, largest_first, hold_outputs, group, len(graphs), grown)
            for sharing in PoolSharing
            for group, graphs, grown in (("model", model, model_bytes), ("replay", replay, replay_bytes[sharing]))
        )


def make_player() -> MemoryPlayer:
    """A player that holds the pools of both groups."""
    player = MemoryPlayer()
    for pool in (MODEL_POOL, REPLAY_POOL):
        player.allocator.retain_pool(pool)
    return player


def _growth(player: MemoryPlayer, work: Callable[[], None]) -> int:
    """Reserved bytes in graph pools that `work` adds."""
    before = _in_pools(player)
    work()
    return _in_pools(player) - before


def _in_pools(player: MemoryPlayer) -> int:
    return player.allocator.reserved_bytes() - player.allocator.reserved_bytes(None)


def record_plan(shape: DecoderShape, plan: CapturePlan, progress: Progress = lambda sizes, _: sizes) -> PlanMemory:
    """Capture all graphs of `plan` by shapes alone, the way that they are captured on a GPU.

    `shape` takes the plan's window. Nothing is computed and no tensor of the decoder takes memory. Raises what
    planning and capturing raise.
    """
    began = time.perf_counter()
    backend = HostBackend(ARENA_BYTES, shapes_only=True, allocation_order=allocation_order)
    recorder = MemoryRecorder(backend.arena.allocator)
    blocks = -(-max(plan.max_num_batched_tokens, plan.largest_size) // BLOCK_SIZE)
    shape = attrs.evolve(shape, window=plan.window)
    runner: StepRunner = backend.run_plain(
        StepRunner, shape, plan, backend, num_blocks=blocks, max_blocks=blocks, block_size=BLOCK_SIZE
    )
    before = recorder.cut("weights, caches and buffers")
    with backend.on_stream(runner.stream):
        backend.run_plain(_use_libraries)
    libraries = recorder.cut("library workspaces")
    graphs = _capture_all(runner, backend, recorder, progress)
    return PlanMemory(
        before=before,
        libraries=libraries,
        model_graphs=tuple(graphs["PIECEWISE"]),
        full_graphs=tuple(graphs["FULL"]),
        replay_graphs=tuple(graphs["replay"]),
        workspaces=tuple(dict.fromkeys((scratch.name, scratch.nbytes) for scratch, _ in backend.kept)),
        scratch=_largest_scratch(backend),
        static_bytes=runner.replay_layers.inputs.nbytes,
        break_bytes=runner.replay_layers.break_buffers.nbytes,
        sharing=runner.sharing,
        seconds=time.perf_counter() - began,
    )


def _capture_all(
    runner: StepRunner, backend: HostBackend, recorder: MemoryRecorder, progress: Progress
) -> dict[str, list[GraphMemory]]:
    """Captures all graphs, largest first; what each allocated, by kind."""
    cut: dict[str, list[GraphMemory]] = {"PIECEWISE": [], "FULL": [], "replay": []}
    captured = {"PIECEWISE": runner.model_graphs, "FULL": runner.full_graphs}

    def watched(sizes: Iterable[int], kind: str) -> Iterator[int]:
        for size in progress(sizes, kind):
            yield size
            graph = captured[kind][size] if kind in captured else runner.replay_graphs.graphs[0]
            storages = [tensor.untyped_storage() for tensor in tensors_in(graph.outputs)]
            addresses = [backend.arena.address_of(storage.data_ptr()) for storage in storages]
            cut[kind].append(recorder.cut(graph.name, addresses))
            gc.freeze()

    # Each capture begins with a collection (C9), which need not look at what was made before. What somebody else froze
    # cannot be told apart after, and stays frozen.
    frozen_before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        runner.capture_model_graphs(watched)
        runner.capture_replay_graphs(watched)
    finally:
        if not frozen_before:
            gc.unfreeze()
    return cut


def _use_libraries() -> None:
    """One call of each library that keeps a workspace."""
    torch.mm(torch.empty(1, 1), torch.empty(1, 1))


def _largest_scratch(backend: HostBackend) -> tuple[tuple[str, str, int], ...]:
    """Operation, name and most bytes of all scratch, the largest first."""
    largest: dict[tuple[str, str], int] = {}
    for key, scratch in backend.scratch_used():
        if scratch.kept:
            continue
        largest[key, scratch.name] = max(scratch.nbytes, largest.get((key, scratch.name), 0))
    return tuple(sorted(((*key, nbytes) for key, nbytes in largest.items()), key=lambda row: -row[2]))
