"""The replay graphs: one breakable graph per planned size, reading the static buffers (G1-G4)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture import (
    BreakableGraph,
    CaptureBackend,
    CaptureError,
    capture,
    garbage_collection_paused,
    refuse_nested_capture,
    warm_up,
)
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.context import (
    ForwardContext,
    ReplayBatch,
    get_forward_context,
    has_forward_context,
    use_forward_context,
)
from replay_sim.replay.movement import gather_into
from replay_sim.replay.row_tensors import RowTensors
from replay_sim.replay.static_buffers import StaticBuffers


class ReplayForm(enum.Enum):
    """How the replay region of a step runs in graphs."""

    BREAKABLE = "breakable"
    """Gather, a graph with eager breaks at each layer's attention, scatter: for any model."""
    ONE_LAUNCH = "one_launch"
    """All of it in one graph: for a model whose attention and KV writes can be captured."""


class ReplayGraphs:
    """Captures and runs the replay layers by padded size.

    `prepare(size)` sets up a replay batch of `size` rows the way a real step does (G1). `run_layers` maps inputs to
    outputs, all of as many rows. The graphs live in `pool` and are captured on `stream` (O1, O2).
    """

    form = ReplayForm.BREAKABLE
    kind = "replay graph"

    def __init__(
        self,
        *,
        backend: CaptureBackend,
        pool: Any,
        stream: Any,
        buffers: StaticBuffers,
        run_layers: Callable[[RowTensors], Sequence[torch.Tensor]],
        prepare: Callable[[int], ReplayBatch],
        hold_outputs: bool = False,
    ) -> None:
        self.buffers = buffers
        self._backend, self._pool, self._stream = backend, pool, stream
        self._run_layers, self._prepare, self._hold_outputs = run_layers, prepare, hold_outputs
        self._graphs: dict[int, BreakableGraph] = {}
        self.failed: dict[int, str] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending: what can be dispatched to (G3)."""
        return tuple(sorted(self._graphs))

    @property
    def graphs(self) -> tuple[BreakableGraph, ...]:
        """The captured graphs, by ascending size."""
        return tuple(self._graphs[size] for size in self.sizes)

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture a graph for each size in the order given; largest first lets the next reuse the memory (C8).

        A size whose capture raises is marked failed, leaves nothing that could be dispatched to, and its error is
        raised; the sizes captured before it stay. The garbage collector is collected once and off for all sizes (C9).
        Raises CaptureError while a step (G4) or another capture runs (C6).
        """
        refuse_nested_capture("replay graphs")
        if has_forward_context():
            raise CaptureError("replay graphs cannot be captured while a step runs: capture before serving")
        with garbage_collection_paused():
            for size in sizes:
                self._graphs.pop(size, None)
                try:
                    self.buffers.check_rows(size)
                    self._graphs[size] = self._capture_one(size)
                except BaseException as error:
                    self.failed[size] = f"{type(error).__name__}: {error}"
                    raise
                self.failed.pop(size, None)

    def _capture_one(self, size: int) -> BreakableGraph:
        with self._backend.on_stream(self._stream), torch.no_grad():
            batch = self._prepare(size)
            with use_forward_context(batch.context):
                warm_up(lambda: self._captured(batch, size), self._backend)
                return capture(
                    lambda: self._captured(batch, size),
                    backend=self._backend,
                    pool=self._pool,
                    stream=self._stream,
                    breaks_are_captured=self.form is ReplayForm.ONE_LAUNCH,
                    hold_outputs=self._hold_outputs,
                    name=f"{self.kind} of {size} rows",
                )

    def _captured(self, batch: ReplayBatch, size: int) -> Sequence[torch.Tensor]:
        """What a graph of `size` rows holds."""
        return self._run_layers(self.buffers.view(size))

    def graph_of(self, context: ForwardContext) -> BreakableGraph:
        """The graph of the context's padded size; RuntimeError for one that was not captured."""
        graph = self._graphs.get(context.padded_tokens)
        if graph is None or context.mode is not CudagraphMode.PIECEWISE:
            raise RuntimeError(
                f"no replay graph of {context.padded_tokens} rows was captured, only {list(self.sizes)}: "
                "dispatch decides by the captured sizes"
            )
        return graph

    def run_into(self, targets: BreakBuffers, batch: ReplayBatch, inputs: RowTensors) -> None:
        """Run the graph of the batch's padded size on its rows, and scatter its outputs (G2, L5, L6)."""
        with use_forward_context(batch.context):
            outputs = self.run(batch.rows, inputs)
            targets.scatter(outputs, batch.rows, batch.context.num_rows, batch.output_row_of)

    def run(self, rows: torch.Tensor, inputs: RowTensors) -> tuple[torch.Tensor, ...]:
        """Gather `rows` of the inputs, replay the graph of the context's padded size, return r output rows (G2).

        The outputs live in the graph's pool: read them before any other graph of that pool runs. Raises RuntimeError
        for a size that was not captured and a moved buffer (B4), ValueError for inputs or rows that do not fit (B3).
        """
        context = get_forward_context()
        graph = self.graph_of(context)
        self.buffers.check(inputs)
        self.buffers.check_addresses()
        gather_into(rows, inputs, self.buffers.tensors, context.padded_tokens)
        return tuple(output[: rows.shape[0]] for output in graph.replay())
