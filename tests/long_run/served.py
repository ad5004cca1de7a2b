"""A world's system as it serves a history: every step is compared with plain clauses, the eager twin and float64."""

from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from long_run.comparisons import (
    compare_break_buffers,
    compare_metadata,
    compare_outputs,
    compare_record,
    compare_static_buffers,
)
from long_run.eager_twin import EagerTwin
from long_run.histories import Ask, Refused, Step
from long_run.plain_step import (
    PlainRecord,
    PlainRequest,
    PlainRow,
    Sizes,
    dispatch,
    needs_of,
    rows_of,
)
from long_run.poisons import Interrupt, interrupted_after, nan_out, poison_leftovers, poisoned_pads
from long_run.worlds import POISONED_IDS, VOCAB, World
from oracles.plain_decoder import PlainDecoder, Rows

from replay_sim.batch.dispatch import StepNeeds, StepRecord, dispatch_needs, step_needs
from replay_sim.batch.rank_dispatch import IDLE, rank_record, together
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.decoder.step import StepOutput, StepRunner
from replay_sim.replay.graphs import ReplayForm

TOLERANCE = 1e-4
"""Relative error of a float32 row against float64 in the Euclidean norm, as in the tests of whole steps."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
Path = tuple[str, str, str, str, str]
Arguments = tuple[Batch, list[np.ndarray], np.ndarray]


@attrs.define
class Tally:
    """What was run: steps, those compared with float64, beside another rank, interrupted, refused; and each path.

    A path is the model's reason (which implies its mode), the replay layers' mode and reason, the form of the replay
    graphs and the sharing of the pool.
    """

    steps: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    paths: Counter[Path] = attrs.field(factory=Counter)

    def add(self, other: "Tally") -> None:
        """Add what another tally counted."""
        self.steps += other.steps
        self.counts += other.counts
        self.paths += other.paths


class Served:
    """One world's runner and its oracles, over one KV cache that holds NaN wherever nothing was written."""

    def __init__(self, world: World, runner: StepRunner, tally: Tally) -> None:
        self.world, self.runner, self.tally = world, runner, tally
        self.twin = EagerTwin(world, runner.decoder.weights)
        self.plain = PlainDecoder(world.shape, runner.decoder.weights) if world.against_float64 else None
        self.num_slots = world.num_blocks * world.block_size
        cache = runner.decoder.cache
        self.caches = [tensor[: self.num_slots] for tensor in (*cache.window, cache.shared)]
        self.start()

    def start(self) -> None:
        """Forget all requests; graphs and buffers stay as the history before left them."""
        self.random = np.random.default_rng(self.world.seed)
        self.free = self.random.permutation(self.world.num_blocks).tolist()
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.written = [set[int]() for _ in self.caches]
        nan_out([*self.caches, *self.twin.caches], slice(None))
        if self.plain is not None:
            self.plain.histories.clear()
        self.reserved = self._reserved_bytes()

    def finish(self) -> None:
        """S8, G4: at the end of a history no slot but those of its rows was written, and nothing was captured."""
        for cache, written in zip(self.caches, self.written, strict=True):
            assert set((~cache.isnan().any(1)).nonzero().flatten().tolist()) == written
        assert self._reserved_bytes() == self.reserved

    def _reserved_bytes(self) -> int:
        """All that the device reserves; on CUDA, where what runs eagerly reserves too, for the model graphs."""
        backend = self.runner.backend
        return backend.reserved_bytes(self.runner.pool if backend.name == "cuda" else None)

    def step(self, step: Step) -> None:
        """Run one step and compare all that it returns and leaves."""
        self._release(step.finished)
        requests = [self._request(ask) for ask in step.asks]
        rows = rows_of(requests, self.world.shape.window, self.world.block_size)
        ids = self.random.integers(POISONED_IDS, VOCAB, len(rows)).astype(np.int32)
        self.runner.use_replay_form(step.form)
        expected = self._expected_record(requests, step)
        arguments = self._arguments(requests, ids)
        if step.refused is not None and rows:
            self._refuse(arguments, step.refused)
        if step.poison is not None:
            poison_leftovers(self.runner, step.poison)
        record = self._dispatch(arguments[0], step)
        if step.interrupted is not None:
            self._interrupt(arguments, record, step.interrupted)
        with poisoned_pads(self.runner, step.poison):
            output = self.runner.run(*arguments, record)
        compare_record(output.record, expected)
        if expected.padded_tokens:
            twin = self.twin.step(rows, ids.tolist(), [request.blocks for request in requests], expected)
            compare_outputs(output, twin, rows, expected)
        self._compare_caches(rows, expected)
        layers = self.runner.replay_layers
        compare_metadata(self.runner.contexts, rows, expected)
        compare_break_buffers(layers.break_buffers, rows, expected, step.form)
        compare_static_buffers(layers.inputs, expected, step)
        if self.plain is not None:
            self._compare_float64(output, requests, rows, ids, expected)
        self._count(step, expected)

    def _release(self, names: str) -> None:
        """Blocks of finished requests are free again and hold NaN, so that a read of what they held would be seen."""
        for name in names:
            blocks = self.blocks.pop(name, [])
            del self.computed[name]
            size = self.world.block_size
            slots = [block * size + offset for block in blocks for offset in range(size)]
            nan_out([*self.caches, *self.twin.caches], slots)
            self.written = [written.difference(slots) for written in self.written]
            self.free += blocks
            if self.plain is not None:
                self.plain.histories.pop(name, None)

    def _request(self, ask: Ask) -> PlainRequest:
        computed = self.computed.get(ask.name, 0) - ask.rejected
        self.computed[ask.name] = computed + ask.length
        blocks = self.blocks.setdefault(ask.name, [])
        while len(blocks) * self.world.block_size < computed + ask.length:
            blocks.append(self.free.pop())
        window_start = 0 if ask.held is None else max(0, computed - ask.held)
        return PlainRequest(ask.name, ask.length, computed, ask.decodes, ask.all_rows_read, window_start, tuple(blocks))

    def _arguments(self, requests: Sequence[PlainRequest], ids: np.ndarray) -> Arguments:
        batch = Batch(
            Request(
                request.length,
                request.computed,
                Phase.DECODE if request.decodes else Phase.PREFILL,
                request.all_rows_read,
                request.window_start,
                request.name,
            )
            for request in requests
        )
        return batch, [np.array(request.blocks, np.int32) for request in requests], ids

    def _expected_record(self, requests: Sequence[PlainRequest], step: Step) -> PlainRecord:
        plan, world = self.world.plan, self.world
        own = needs_of(requests, plan.window, plan.query_len_decode)
        if not requests and step.other is not None:
            own = attrs.evolve(own, uniform=True)
        others = () if step.other is None else (step.other,)
        tokens = max(needs.tokens for needs in (own, *others))

        def sizes(planned: tuple[int, ...], kind: str) -> Sizes:
            return Sizes(planned, {size for size in planned if (kind, size) not in world.missing})

        breaking = [size for size in plan.model_sizes if plan.trim_threshold and size >= plan.trim_threshold]
        replay = sizes(plan.replay_sizes, "replay")
        eager_rows = plan.max_num_batched_tokens if world.forms[0] is ReplayForm.ONE_LAUNCH else 0
        held = max((*breaking, eager_rows))
        if step.form is ReplayForm.ONE_LAUNCH and tokens > held:
            replay = Sizes(plan.replay_sizes, ())
        kinds = {"FULL": sizes(plan.full_sizes, "FULL"), "PIECEWISE": sizes(plan.model_sizes, "PIECEWISE")}
        return dispatch(own, others, kinds | {"REPLAY": replay}, plan.trim_threshold)

    def _dispatch(self, batch: Batch, step: Step) -> StepRecord:
        """The system's record; beside another rank, whose part the agreement's all-reduce would bring, from both."""
        if step.other is None:
            return self.runner.dispatch(batch)
        other, plan = step.other, self.world.plan
        own = step_needs(batch, plan) if batch.num_reqs else IDLE
        needs = together([own, StepNeeds(other.tokens, other.requests, other.uniform, other.kept, other.trims)])
        agreed = dispatch_needs(
            needs,
            plan,
            model_sizes=self.runner.model_graphs.keys(),
            full_sizes=self.runner.full_graphs.keys(),
            replay_sizes=self.runner.replay_layers.graph_sizes(needs.num_tokens),
        )
        return rank_record(agreed, own)

    def _refuse(self, arguments: Arguments, refused: Refused) -> None:
        batch, tables, ids = arguments
        if refused is Refused.TOKEN_ID:
            ids = np.append(ids[1:], np.int32(VOCAB))
        elif refused is Refused.TOO_FEW_IDS:
            ids = ids[1:]
        elif refused is Refused.BLOCK_ID:
            tables = [np.append(table, np.int32(self.world.num_blocks)) for table in tables]
        else:
            tables = [table[:0] for table in tables]
        with pytest.raises(ValueError, match=refused.value):
            self.runner.step(batch, tables, ids)
        self.tally.counts["refused"] += 1

    def _interrupt(self, arguments: Arguments, record: StepRecord, kv_writes: int) -> None:
        with interrupted_after(kv_writes):
            try:
                self.runner.run(*arguments, record)
            except Interrupt:
                self.tally.counts["interrupted"] += 1

    def _compare_caches(self, rows: Sequence[PlainRow], expected: PlainRecord) -> None:
        """S8, L3: all KV's bits; and by layer the slots that were ever written, which `finish` looks at."""
        for actual, wanted in zip(self.caches, self.twin.caches, strict=True):
            bits = BITS[actual.dtype]
            assert torch.equal(actual.view(bits), wanted.view(bits)), "the KV cache differs from the eager twin's"
        kept_only = expected.replay_mode is not None
        for layer, written in enumerate(self.written):
            after_cut = self.world.shape.cut < layer < self.world.shape.num_layers
            written.update(row.slot for row in rows if row.kept or not (kept_only and after_cut))

    def _compare_float64(
        self,
        output: StepOutput,
        requests: Sequence[PlainRequest],
        rows: Sequence[PlainRow],
        ids: np.ndarray,
        expected: PlainRecord,
    ) -> None:
        """Every kept row and every early aux state against the decoder of one row at a time."""
        assert self.plain is not None
        begins = np.cumsum([0, *(request.length for request in requests)])
        asked = [
            Rows(
                request_id=request.name,
                token_ids=ids[begin : begin + request.length].tolist(),
                computed=request.computed,
                prefill=not request.decodes,
                all_rows_read=request.all_rows_read,
                window_start=request.window_start,
            )
            for request, begin in zip(requests, begins, strict=False)
        ]
        wanted = self.plain.step(asked, trimmed=expected.replay_mode is not None)
        for index, row in enumerate(wanted):
            pairs = list(zip((aux[index] for aux in output.early_aux), row.early_aux, strict=True))
            if row.kept:
                pairs += [(output.hidden_states[index], row.streams), (output.pre_mix[index], row.pre)]
                pairs += zip((aux[index] for aux in output.late_aux), row.late_aux, strict=True)
            for actual, right in pairs:
                error = np.linalg.norm(actual.double().cpu().numpy() - right) / np.linalg.norm(right)
                assert error <= TOLERANCE, f"row {index} is off by {error:.2g} of its norm"
        self.tally.counts["compared with float64"] += 1

    def _count(self, step: Step, expected: PlainRecord) -> None:
        self.tally.steps += 1
        self.tally.counts["beside another rank"] += step.other is not None
        self.tally.counts["with poison"] += step.poison is not None
        path = (
            expected.model_reason,
            expected.replay_mode or "",
            expected.reason,
            step.form.name,
            self.runner.sharing.sharing.name,
        )
        self.tally.paths[path] += 1
