"""The one-launch graphs: the whole replay region, from row metadata to scatter, in one graph a size (B2, L6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from replay_sim.capture import BreakableGraph
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.context import ReplayBatch
from replay_sim.replay.graphs import ReplayForm, ReplayGraphs
from replay_sim.replay.row_ops import gather_by_address
from replay_sim.replay.row_tensors import RowTensors


class OneLaunchGraphs(ReplayGraphs):
    """Replay graphs of one segment each, for models whose attention and KV writes read the device alone.

    A graph writes the row metadata of the batch that is staged on the device (`write_rows(size)`), gathers the rows of
    the inputs that `addresses` int64 (inputs,) points to, runs the layers with their breaks captured, and scatters into
    `targets`. All that differs between steps is read on the device, so the host launches and does no more. A model with
    a break that must read the host, or whose grid follows the batch, keeps the breakable form.

    A pool shared with the model graphs is as safe as with breakable graphs (O1): the nodes of a graph run in order, the
    gather stands before every node that writes memory of the pool, and it copies the model graph's tensors into the
    static buffers, which lie outside of the pool, as does all that the scatter writes.
    """

    form = ReplayForm.ONE_LAUNCH
    kind = "one-launch replay graph"

    def __init__(
        self, *, write_rows: Callable[[int], None], addresses: torch.Tensor, targets: BreakBuffers, **place: Any
    ) -> None:
        super().__init__(**place)
        self._write_rows, self._addresses, self._targets = write_rows, addresses, targets

    def _capture_one(self, size: int) -> BreakableGraph:
        """All inputs are absent in the warm-up: the tensors of an earlier step may be gone."""
        with self._backend.on_stream(self._stream):
            self._addresses.zero_()
        return super()._capture_one(size)

    def _captured(self, batch: ReplayBatch, size: int) -> Sequence[torch.Tensor]:
        self._write_rows(size)
        buffers = self.buffers.view(size)
        rows, num_rows = batch.rows, batch.context.num_rows
        gather_by_address(tuple(buffers.values()), self._addresses, rows, num_rows, size)
        self._targets.scatter(self._run_layers(buffers), rows, num_rows, batch.output_row_of)
        return ()

    def run_into(self, targets: BreakBuffers, batch: ReplayBatch, inputs: RowTensors) -> None:
        """Launch the graph of the batch's padded size; the inputs' addresses and the batch are on the device.

        What the graph reads and writes must not have moved (B4): a step checks that before it runs anything. Raises
        RuntimeError for a size that was not captured and other targets than the graphs'.
        """
        graph = self.graph_of(batch.context)
        if targets is not self._targets:
            raise RuntimeError(
                "the graphs were captured with other break buffers: write into those, never replace them"
            )
        graph.replay()

    def run(self, rows: torch.Tensor, inputs: RowTensors) -> tuple[torch.Tensor, ...]:
        """Raises RuntimeError: a graph that scatters has no outputs to return."""
        raise RuntimeError("a one-launch graph scatters into its break buffers and returns nothing: call run_into")
