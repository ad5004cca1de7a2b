"""Whole steps of the reference decoder: captures its graphs, dispatches each batch, and leaves its record (D1-D4)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from replay_sim.batch.addresses import FixedAddresses
from replay_sim.batch.dispatch import CudagraphMode, StepRecord, dispatch_step
from replay_sim.batch.metadata import BlockTables
from replay_sim.batch.request import Batch
from replay_sim.capture import (
    BreakableGraph,
    CaptureBackend,
    CaptureError,
    capture,
    garbage_collection_paused,
    refuse_nested_capture,
    warm_up,
)
from replay_sim.config.shapes import DecoderShape
from replay_sim.decoder.dummy_batch import dummy_decode, dummy_prefill
from replay_sim.decoder.kv_cache import KVCache
from replay_sim.decoder.layer import FIRST_REPLAY_WINDOW_KEY, REPLAY_WINDOW_KEY
from replay_sim.decoder.model import Decoder
from replay_sim.decoder.step_context import StepContextBuilder
from replay_sim.decoder.weights import DecoderWeights, make_weights
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.dummy_batch import check_cache_slots
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.context import ReplayBatch, has_forward_context, use_forward_context
from replay_sim.replay.graphs import ReplayForm, ReplayGraphs
from replay_sim.replay.layers import ReplayLayers, ReplaySpec
from replay_sim.replay.one_launch import OneLaunchGraphs
from replay_sim.replay.row_tensors import input_specs, output_specs
from replay_sim.replay.sharing import PoolSharing, SharingChoice, choose_sharing
from replay_sim.replay.static_buffers import StaticBuffers

if TYPE_CHECKING:
    from replay_sim.replay.ranks import RankAgreement

Progress = Callable[[Iterable[int], str], Iterable[int]]


@attrs.frozen
class StepOutput:
    """What one step returns: rows of the step without its pads, and its record.

    `hidden_states` (T, hc, h) and `pre_mix` (T, hc) as the replay layers return them, `late_aux` and `early_aux`
    (T, h) each. Outputs of graphs live in their pool or in the break buffers: read them before the next step.
    """

    hidden_states: torch.Tensor
    pre_mix: torch.Tensor
    late_aux: tuple[torch.Tensor, ...]
    early_aux: tuple[torch.Tensor, ...]
    record: StepRecord


def default_replay_form(backend: CaptureBackend) -> ReplayForm:
    """One launch on a GPU, where graphs that break are held up by the host; breakable graphs else."""
    return ReplayForm.ONE_LAUNCH if backend.name == "cuda" else ReplayForm.BREAKABLE


class StepRunner:
    """Runs steps of a decoder of `shape` by `plan` on `backend`, over one KV cache of `num_blocks` blocks.

    `max_blocks` bounds the blocks of one request. `sharing` overrides the pool sharing chosen from the model (O4), and
    without `largest_first` graphs are captured smallest first, with `hold_outputs` no graph reuses another's outputs:
    all three for study, the last two cost memory (O5). `weights` are those of another runner of the same shape, which
    then cost no memory again; without them they are drawn from `seed`. With an `agreement`, of the same plan, every
    dispatch is agreed with the other ranks (X1); a single rank has none. `replay_form` is that of the replay graphs: as
    one launch scatters eager steps too into the break buffers, these then hold `max_num_batched_tokens` rows.
    The cache has one block more, which only dummy batches write. Every step runs eagerly until
    `capture_model_graphs` and `capture_replay_graphs` were called. Raises ValueError for a plan of another window than
    the shape's or that is not the agreement's, and for sizes that the cache does not hold (A5).
    """

    def __init__(
        self,
        shape: DecoderShape,
        plan: CapturePlan,
        backend: CaptureBackend,
        *,
        num_blocks: int,
        max_blocks: int,
        block_size: int = 64,
        seed: int = 0,
        weights: DecoderWeights | None = None,
        agreement: RankAgreement | None = None,
        replay_form: ReplayForm = ReplayForm.BREAKABLE,
        sharing: PoolSharing | None = None,
        largest_first: bool = True,
        hold_outputs: bool = False,
    ) -> None:
        if shape.window != plan.window:
            raise ValueError(f"window {plan.window} of the plan differs from window {shape.window} of {shape.name}")
        if agreement is not None and agreement.plan != plan:
            raise ValueError(f"plan {plan} differs from the agreement's: {agreement.plan}")
        check_cache_slots(plan, num_blocks * block_size, max_blocks * block_size)
        self.shape, self.plan, self.backend = shape, plan, backend
        self.num_blocks, self.block_size = num_blocks, block_size
        self._largest_first, self._hold_outputs = largest_first, hold_outputs
        self._agreement = agreement
        device = backend.device
        cache = KVCache(shape, (num_blocks + 1) * block_size, device)
        self.decoder = Decoder(shape, weights or make_weights(shape, device, seed), cache)
        self.replay_layers = self._make_replay_layers(replay_form)
        self.contexts = StepContextBuilder(
            self.replay_layers.spec,
            max_rows=max(plan.max_num_batched_tokens, plan.largest_size),
            max_num_seqs=plan.max_num_seqs,
            max_blocks=max_blocks,
            block_size=block_size,
            device=device,
        )
        self.sharing: SharingChoice = choose_sharing(has_early_aux=bool(shape.early_aux_layers), override=sharing)
        self.pool, self.stream = backend.make_pool(), backend.make_stream()
        self.pools = [self.pool]
        self._graphs_by_form = {ReplayForm.BREAKABLE: self._make_replay_graphs()}
        self.use_replay_form(replay_form)
        self._fixed = FixedAddresses(self._named_tensors())
        self._one_at_a_time = threading.Lock()
        self.model_graphs: dict[int, BreakableGraph] = {}
        self.full_graphs: dict[int, BreakableGraph] = {}

    def _make_replay_layers(self, form: ReplayForm) -> ReplayLayers:
        shape, plan = self.shape, self.plan
        one_launch = plan.replay_sizes and form is ReplayForm.ONE_LAUNCH
        eager_rows = plan.max_num_batched_tokens if one_launch else 0
        dtype: torch.dtype = getattr(torch, shape.dtype)
        device = self.backend.device
        inputs = StaticBuffers(
            input_specs(shape.hidden_size, shape.hc_mult, dtype), max(plan.replay_sizes, default=0), device
        )
        outputs = BreakBuffers(
            output_specs(shape.hidden_size, shape.hc_mult, dtype, len(shape.late_aux_layers)),
            max((*plan.breaking_sizes, eager_rows)),
            device,
        )
        spec = ReplaySpec(
            window=shape.window,
            run_layers=self.decoder.run_replay_layers,
            write_batch_kv=self.decoder.write_batch_kv,
            metadata_keys=(FIRST_REPLAY_WINDOW_KEY, REPLAY_WINDOW_KEY),
            first_window_key=FIRST_REPLAY_WINDOW_KEY,
        )
        return ReplayLayers(spec, inputs, outputs, plan.trim_threshold)

    def _make_replay_graphs(self) -> ReplayGraphs:
        return ReplayGraphs(**self._make_replay_place(), prepare=self.prepare_replay, hold_outputs=self._hold_outputs)

    def _make_one_launch_graphs(self) -> OneLaunchGraphs:
        contexts = self.contexts
        return OneLaunchGraphs(
            **self._make_replay_place(),
            prepare=self.prepare_replay,
            write_rows=lambda size: contexts.replay.write_captured(contexts.batch, size),
            addresses=self.replay_layers.input_addresses,
            targets=self.replay_layers.break_buffers,
        )

    def _make_replay_place(self) -> dict[str, Any]:
        """A place for replay graphs, with a pool or stream of its own by the sharing (O1-O3), and what they run."""
        sharing, backend = self.sharing.sharing, self.backend
        if sharing is PoolSharing.OWN_POOL:
            self.pools.append(backend.make_pool())
        return {
            "backend": backend,
            "pool": self.pools[-1],
            "stream": backend.make_stream() if sharing is PoolSharing.OWN_STREAM else self.stream,
            "buffers": self.replay_layers.inputs,
            "run_layers": self.replay_layers.spec.run_layers,
        }

    def use_replay_form(self, form: ReplayForm) -> None:
        """From here on `capture_replay_graphs` captures this form, and steps run it.

        Graphs of the other form stay captured, over the same model graphs and buffers, so that forms can be measured in
        turn: where these do not hold a step (G3), it runs its replay layers eagerly in one-launch form.
        """
        if form not in self._graphs_by_form:
            self._graphs_by_form[form] = self._make_one_launch_graphs()
        self.replay_form = form
        self.replay_graphs = self.replay_layers.graphs = self._graphs_by_form[form]

    def capture_model_graphs(self, progress: Progress = lambda sizes, _: sizes) -> None:
        """Capture the PIECEWISE and then the FULL graphs, each largest first (C8).

        The garbage collector is collected once and off for all sizes (C9). Raises what a capture raises; the sizes
        captured before it stay usable. CaptureError while a step or another capture of this runner runs (G4),
        RuntimeError naming a buffer that moved (B4).
        """
        with self._alone_to_capture("model graphs"), garbage_collection_paused():
            for size in progress(self._in_order(self.plan.model_sizes), "PIECEWISE"):
                batch = dummy_prefill(size, self.plan.max_num_seqs)
                self.model_graphs[size] = self._capture(batch, {"model_sizes": (size,)}, full=False)
            for size in progress(self._in_order(self.plan.full_sizes), "FULL"):
                batch = dummy_decode(size, self.plan.query_len_decode, self.plan.max_num_seqs)
                self.full_graphs[size] = self._capture(batch, {"full_sizes": (size,)}, full=True)

    def capture_replay_graphs(self, progress: Progress = lambda sizes, _: sizes) -> None:
        """Capture the replay graphs of the form in use, largest first, after the model graphs, whose memory they reuse.

        Only what is free in the pool, and only where stream and pool are shared (O1). Raises as
        `capture_model_graphs`.
        """
        with self._alone_to_capture("replay graphs"):
            self.replay_graphs.capture(progress(self._in_order(self.plan.replay_sizes), "replay"))

    @contextmanager
    def _alone_to_capture(self, what: str) -> Iterator[None]:
        """Also of another thread's steps, whose metadata a dummy batch would overwrite."""
        refuse_nested_capture(what)
        if has_forward_context() or not self._one_at_a_time.acquire(blocking=False):
            raise CaptureError(
                f"{what} cannot be captured while a step runs, or another capture of this StepRunner: capture before "
                "serving"
            )
        try:
            self._fixed.check(self._named_tensors())
            yield
        finally:
            self._one_at_a_time.release()

    def _in_order(self, sizes: tuple[int, ...]) -> list[int]:
        return sorted(sizes, reverse=self._largest_first)

    def prepare_replay(self, size: int) -> ReplayBatch:
        """A dummy replay batch of `size` rows, set up as a step sets up its own (G1)."""
        batch = dummy_prefill(size, self.plan.max_num_seqs)
        self.contexts.batch.write(batch, self._scratch_tables(batch), self._dummy_ids(batch), size)
        return self.contexts.replay_batch(batch, size, size, CudagraphMode.PIECEWISE)

    def _capture(self, batch: Batch, captured: dict[str, Any], *, full: bool) -> BreakableGraph:
        sizes = {"model_sizes": (), "full_sizes": (), "replay_sizes": ()} | captured
        record = dispatch_step(batch, self.plan, **sizes)
        with self.backend.on_stream(self.stream), torch.no_grad():
            context = self.contexts.build(batch, self._scratch_tables(batch), self._dummy_ids(batch), record)
            with use_forward_context(context):
                size = record.padded_tokens
                warm_up(lambda: self._forward(size), self.backend)
                return capture(
                    lambda: self._forward(size),
                    backend=self.backend,
                    pool=self.pool,
                    stream=self.stream,
                    breaks_are_captured=full,
                    hold_outputs=self._hold_outputs,
                    name=f"{record.mode.value} graph of {size} tokens",
                )

    def _scratch_tables(self, batch: Batch) -> list[npt.NDArray[np.int32]]:
        blocks = -(-batch.seq_lens // self.block_size)
        return [np.full(count, self.num_blocks, np.int32) for count in blocks]

    def _dummy_ids(self, batch: Batch) -> npt.NDArray[np.int32]:
        return np.arange(batch.num_tokens, dtype=np.int32) % self.shape.vocab_size

    def _forward(self, padded_tokens: int) -> dict[str, tuple[torch.Tensor, ...]]:
        """The decoder split in three, over the first `padded_tokens` rows of the input buffers."""
        buffers = self.contexts.batch
        state = self.decoder.embed_and_start(buffers.input_ids[:padded_tokens], buffers.positions[:padded_tokens])
        early_aux = self.decoder.run_first_layers(state)
        inputs = state.row_tensors()
        return {"replay": self.replay_layers(inputs), "early_aux": early_aux}

    def step(self, batch: Batch, block_tables: BlockTables, input_ids: npt.NDArray[np.int32]) -> StepOutput:
        """Run one batch as it is dispatched, and return its outputs and record (D1-D4); raises what `run` raises."""
        return self.run(batch, block_tables, input_ids, self.dispatch(batch))

    def idle_step(self) -> StepOutput:
        """Join a step of the other ranks with pads only, as a rank that says that it is idle (X2).

        Raises ValueError without an agreement, and what `run` raises.
        """
        if self._agreement is None:
            raise ValueError("agreement is None: only a rank beside others has idle steps")
        return self.run(Batch(), [], np.empty(0, np.int32), self._agreement.dispatch_idle(**self._captured_sizes(0)))

    def dispatch(self, batch: Batch) -> StepRecord:
        """How the batch would run, given what was captured (D1-D3); ranks agree on a step with each call (X1)."""
        if self._agreement is not None:
            return self._agreement.dispatch(batch, **self._captured_sizes(batch.num_tokens))
        return dispatch_step(batch, self.plan, **self._captured_sizes(batch.num_tokens))

    def _captured_sizes(self, num_tokens: int) -> dict[str, Any]:
        return {
            "model_sizes": self.model_graphs.keys(),
            "full_sizes": self.full_graphs.keys(),
            "replay_sizes": self.replay_layers.graph_sizes(num_tokens),
        }

    def run(
        self, batch: Batch, block_tables: BlockTables, input_ids: npt.NDArray[np.int32], record: StepRecord
    ) -> StepOutput:
        """Run one batch as `record` says, which `dispatch` made, or an arm of a measurement.

        `block_tables` holds each request's block ids, below `num_blocks`; `input_ids` int32 (num_tokens,). An empty
        batch runs nothing (S6), unless other ranks make it run pads (X2). Raises ValueError naming the bound that a
        batch exceeds, RuntimeError naming a buffer or cache that moved since it was made (B4) and while a step runs,
        on this thread or another, KeyError for a record whose graph was not captured.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            raise RuntimeError(
                "a step or a capture of this StepRunner runs already, over the same buffers: end it first, or give "
                "each thread a runner and a backend of its own"
            )
        try:
            return self._run(batch, block_tables, input_ids, record)
        finally:
            self._one_at_a_time.release()

    def _run(
        self, batch: Batch, block_tables: BlockTables, input_ids: npt.NDArray[np.int32], record: StepRecord
    ) -> StepOutput:
        self._fixed.check(self._named_tensors())
        self._check_bounds(batch, block_tables, input_ids)
        with self.backend.on_stream(self.stream), torch.no_grad():
            context = self.contexts.build(batch, block_tables, input_ids, record, self.replay_form)
            with use_forward_context(context):
                graphs = {CudagraphMode.PIECEWISE: self.model_graphs, CudagraphMode.FULL: self.full_graphs}
                if not record.padded_tokens:
                    outputs = self._no_rows()
                elif record.mode is CudagraphMode.NONE:
                    outputs = self._forward(record.padded_tokens)
                else:
                    outputs = graphs[record.mode][record.padded_tokens].replay()
        hidden_states, pre_mix, *late_aux = (tensor[: record.num_tokens] for tensor in outputs["replay"])
        early_aux = tuple(tensor[: record.num_tokens] for tensor in outputs["early_aux"])
        return StepOutput(hidden_states, pre_mix, tuple(late_aux), early_aux, record)

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """What graphs read or write, but the batch's metadata, which is checked whenever it is written."""
        layers = self.replay_layers
        named = self._named_caches() | self.contexts.replay.named_tensors()
        for kind, tensors in (("static", layers.inputs.tensors), ("break", layers.break_buffers.tensors)):
            named |= {f"{kind} buffer {name}": tensor for name, tensor in tensors.items()}
        named["flags of the break buffers"] = layers.break_buffers.written
        named["table of input addresses"] = layers.input_addresses
        return named

    def _named_caches(self) -> dict[str, torch.Tensor]:
        named = {}
        for index, layer in enumerate(self.decoder.layers):
            named[f"window KV cache of layer {index}"] = layer.window_cache
            if layer.shared_cache is not None:
                named[f"shared KV cache of layer {index}"] = layer.shared_cache
        return named

    def _check_bounds(self, batch: Batch, block_tables: BlockTables, input_ids: npt.NDArray[np.int32]) -> None:
        longest = int(batch.seq_lens.max(initial=0))
        if longest > self.shape.max_position:
            raise ValueError(f"seq_len {longest} of a request exceeds max_position {self.shape.max_position}")
        ids = np.concatenate([np.empty(0, np.int32), *block_tables])
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise ValueError(
                f"block_tables hold ids from {ids.min()} to {ids.max()}: allowed are 0 to {self.num_blocks - 1}"
            )
        if input_ids.size and not 0 <= input_ids.min() <= input_ids.max() < self.shape.vocab_size:
            found, allowed = f"{input_ids.min()} to {input_ids.max()}", f"0 to {self.shape.vocab_size - 1}"
            raise ValueError(f"input_ids are from {found}: allowed are {allowed}, the decoder's vocabulary")

    def _no_rows(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """The outputs of an empty batch."""
        aux = self.decoder.weights.embed[:0]
        replay = tuple(self.replay_layers.break_buffers.view(0).values())
        return {"replay": replay, "early_aux": (aux,) * len(self.shape.early_aux_layers)}

    def logits(self, output: StepOutput, rows: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) of the given rows (n,) int64 of a step's output."""
        with self.backend.on_stream(self.stream), torch.no_grad():
            return self.decoder.head(output.hidden_states, output.pre_mix, rows)
