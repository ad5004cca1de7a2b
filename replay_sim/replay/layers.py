"""The replay layers: whether a forward runs them on the replay batch, and how they break out of a graph (L1-L8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture import eager_break
from replay_sim.replay.context import ForwardContext, get_forward_context, use_forward_context
from replay_sim.replay.graphs import ReplayGraphs
from replay_sim.replay.movement import gather_rows, scatter_into, zero_rows
from replay_sim.replay.row_tensors import RowTensors
from replay_sim.replay.static_buffers import StaticBuffers

RunLayers = Callable[[RowTensors], tuple[torch.Tensor, ...]]


@attrs.frozen
class ReplaySpec:
    """What a model's replay layers are made of (L1).

    `run_layers(inputs) -> outputs` runs them on any rows; `write_batch_kv(inputs)` writes the first replay layer's KV
    for every row; `metadata_keys` name the metadata that they read, `first_window_key` the first layer's window.
    """

    window: int
    run_layers: RunLayers
    write_batch_kv: Callable[[RowTensors], None]
    metadata_keys: tuple[str, ...]
    first_window_key: str


class ReplayLayers:
    """Runs the replay layers of one model, on the whole batch or on the replay batch.

    `break_buffers` are the outputs' fixed buffers, as long as the plan's largest model graph (L4). The trim threshold
    is this process's; the replay batch is the step's, read from the forward context.
    """

    def __init__(
        self, spec: ReplaySpec, inputs: StaticBuffers, break_buffers: StaticBuffers, trim_threshold: int | None
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.break_buffers = break_buffers
        self.trim_threshold = trim_threshold
        self.graphs: ReplayGraphs | None = None

    def uses_replay_batch(self, context: ForwardContext) -> bool:
        """L2, L7: a PIECEWISE graph by its padded size, a FULL one never, an eager forward if it has a replay batch."""
        if context.mode is CudagraphMode.PIECEWISE:
            return self.trim_threshold is not None and context.padded_tokens >= self.trim_threshold
        return context.mode is CudagraphMode.NONE and context.replay_batch is not None

    def __call__(self, inputs: RowTensors) -> tuple[torch.Tensor, ...]:
        """The replay layers' outputs, one row for each row of `inputs` (L2-L7).

        Raises ValueError naming an input that breaks the contract, a deferred one among them (L8).
        """
        context = get_forward_context()
        if not self.uses_replay_batch(context):
            return self.spec.run_layers(inputs)
        self.inputs.check(inputs)
        self.spec.write_batch_kv(inputs)
        if context.mode is CudagraphMode.PIECEWISE:
            targets = tuple(self.break_buffers.view(context.padded_tokens).values())
            replay_break(self, dict(inputs), targets)
            return targets
        rows, outputs = self.run_replay_batch(inputs)
        tokens = context.padded_tokens
        targets = tuple(output.new_empty((tokens, *output.shape[1:])) for output in outputs)
        scatter_into(rows, outputs, targets)
        return targets

    def run_replay_batch(self, inputs: RowTensors) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Run the layers on the step's replay batch, in its graph if it has one, else eagerly (L5).

        Eagerly, a batch of no rows runs on its pads: a rank without rows meets the other ranks' collectives (X2).
        Returns the kept rows' index and their outputs. Raises RuntimeError if the step has no replay batch (S5).
        """
        batch = get_forward_context().replay_batch
        if batch is None:
            raise RuntimeError(
                "this step has no replay batch, but its graph breaks out for one: a PIECEWISE graph of at least "
                f"trim_threshold {self.trim_threshold} padded tokens always needs it"
            )
        with use_forward_context(batch.context):
            if batch.context.mode is CudagraphMode.NONE and not batch.context.num_tokens:
                outputs = self.spec.run_layers(zero_rows(batch.context.padded_tokens, inputs))
                return batch.rows, tuple(output[:0] for output in outputs)
            if batch.context.mode is CudagraphMode.NONE:
                return batch.rows, self.spec.run_layers(gather_rows(batch.rows, inputs))
            if self.graphs is None:
                raise RuntimeError("the replay batch asks for a replay graph and none was captured")
            return batch.rows, self.graphs.run(batch.rows, inputs)


@eager_break
def replay_break(layers: ReplayLayers, inputs: RowTensors, targets: tuple[torch.Tensor, ...]) -> None:
    """The replay layers as one eager break of a model graph, whose outputs land in fixed buffers (L4)."""
    rows, outputs = layers.run_replay_batch(inputs)
    scatter_into(rows, outputs, targets)
