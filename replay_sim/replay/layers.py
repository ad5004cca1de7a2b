"""The replay layers: whether a forward runs them on the replay batch, and how they break out of a graph (L1-L8)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs
import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture import eager_break
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.context import ForwardContext, ReplayBatch, get_forward_context, use_forward_context
from replay_sim.replay.graphs import ReplayForm, ReplayGraphs
from replay_sim.replay.movement import gather_rows, scatter_into, zero_rows
from replay_sim.replay.row_ops import check_inputs, store_addresses
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

    `break_buffers` are the outputs' fixed buffers, at least as long as the plan's largest model graph (L4). The trim
    threshold is this process's; the replay batch is the step's, read from the forward context. `input_addresses` int64
    (inputs,) says on the device where the step's inputs lie. `graphs` are of either form, and may change between steps.
    """

    def __init__(
        self, spec: ReplaySpec, inputs: StaticBuffers, break_buffers: BreakBuffers, trim_threshold: int | None
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.break_buffers = break_buffers
        self.trim_threshold = trim_threshold
        device = next(iter(inputs.tensors.values())).device
        self.input_addresses = torch.zeros(len(inputs.specs), dtype=torch.int64, device=device)
        self.graphs: ReplayGraphs | None = None

    def uses_replay_batch(self, context: ForwardContext) -> bool:
        """L2, L7: a PIECEWISE graph by its padded size, a FULL one never, an eager forward if it has a replay batch."""
        if context.mode is CudagraphMode.PIECEWISE:
            return self.trim_threshold is not None and context.padded_tokens >= self.trim_threshold
        return context.mode is CudagraphMode.NONE and context.replay_batch is not None

    def graph_sizes(self, num_tokens: int) -> Collection[int]:
        """The sizes that a step of so many tokens can be dispatched to (G3).

        One-launch graphs write into the break buffers, and serve no step of more tokens than those hold.
        """
        if self.graphs is None or (self._is_one_launch() and num_tokens > self.break_buffers.max_rows):
            return ()
        return self.graphs.sizes

    def _is_one_launch(self) -> bool:
        return self.graphs is not None and self.graphs.form is ReplayForm.ONE_LAUNCH

    def __call__(self, inputs: RowTensors) -> tuple[torch.Tensor, ...]:
        """The replay layers' outputs, one row for each row of `inputs` (L2-L7).

        Raises ValueError naming an input that breaks the contract, a deferred one among them (L8).
        """
        context = get_forward_context()
        if not self.uses_replay_batch(context):
            return self.spec.run_layers(inputs)
        self.inputs.check(inputs)
        tokens = context.padded_tokens
        if context.mode is CudagraphMode.PIECEWISE:
            return self._into_break_buffers(inputs, tokens, replay_break)
        batch = self._replay_batch()
        if self._is_one_launch() and batch.context.mode is CudagraphMode.PIECEWISE:
            return self._into_break_buffers(inputs, tokens, ReplayLayers.run_into_break_buffers)
        self.spec.write_batch_kv(inputs)
        with use_forward_context(batch.context):
            outputs = self._run_rows(batch, inputs)
        fresh = tuple(output.new_empty((tokens, *output.shape[1:])) for output in outputs)
        scatter_into(batch.rows, outputs, fresh)
        return fresh

    def _into_break_buffers(
        self, inputs: RowTensors, tokens: int, run: Callable[[ReplayLayers, RowTensors], None]
    ) -> tuple[torch.Tensor, ...]:
        """What a step that fills the break buffers does around `run`, which does so; inputs are refused before KV."""
        targets = tuple(self.break_buffers.view(tokens).values())
        check_inputs(inputs)
        self.spec.write_batch_kv(inputs)
        store_addresses(self.input_addresses, {spec.name: inputs[spec.name] for spec in self.inputs.specs})
        run(self, dict(inputs))
        return targets

    def run_into_break_buffers(self, inputs: RowTensors) -> None:
        """Run the layers on the step's replay batch, in its graph if it has one, and fill the break buffers (L4-L6).

        Raises RuntimeError if the step has no replay batch (S5).
        """
        batch = self._replay_batch()
        if self.graphs is not None and batch.context.mode is not CudagraphMode.NONE:
            self.graphs.run_into(self.break_buffers, batch, inputs)
            return
        with use_forward_context(batch.context):
            outputs = self._run_rows(batch, inputs)
            self.break_buffers.scatter(outputs, batch.rows, batch.context.num_rows, batch.output_row_of)

    def _run_rows(self, batch: ReplayBatch, inputs: RowTensors) -> Sequence[torch.Tensor]:
        """The kept rows' outputs, from a breakable graph or eagerly (L5).

        Eagerly, a batch of no rows runs on its pads: a rank without rows meets the other ranks' collectives (X2).
        """
        if batch.context.mode is CudagraphMode.NONE and not batch.context.num_tokens:
            outputs = self.spec.run_layers(zero_rows(batch.context.padded_tokens, inputs))
            return tuple(output[:0] for output in outputs)
        if batch.context.mode is CudagraphMode.NONE:
            return self.spec.run_layers(gather_rows(batch.rows, inputs))
        if self.graphs is None:
            raise RuntimeError("the replay batch asks for a replay graph and none was captured")
        return self.graphs.run(batch.rows, inputs)

    def _replay_batch(self) -> ReplayBatch:
        batch = get_forward_context().replay_batch
        if batch is None:
            raise RuntimeError(
                "this step has no replay batch, but its graph breaks out for one: a PIECEWISE graph of at least "
                f"trim_threshold {self.trim_threshold} padded tokens always needs it"
            )
        return batch


@eager_break
def replay_break(layers: ReplayLayers, inputs: RowTensors) -> None:
    """The replay layers as one eager break of a model graph, whose outputs land in the break buffers (L4)."""
    layers.run_into_break_buffers(inputs)
