"""G5: replay equals eager on the same padded rows bit for bit, and what pads hold changes no bit of a real row."""

from collections.abc import Iterator

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode, dispatch_step, smallest_size
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import CaptureBackend
from replay_sim.config.shapes import TINY, DecoderShape
from replay_sim.decoder.step import StepRunner
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.replay.context import ReplayBatch, use_forward_context
from replay_sim.replay.graphs import ReplayForm, ReplayGraphs
from replay_sim.replay.row_ops import store_addresses
from replay_sim.replay.row_tensors import RowTensors, input_specs
from replay_sim.replay.static_buffers import StaticBuffers

WINDOW, BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS = TINY.window, 4, 16, 12
# None is a multiple of the window; lengths up to 3 windows, around the window more often.
REPLAY_SIZES = (5, 12, 23, 49, 101, 203, 403)
MODEL_SIZES = (9, 22, 47, 98, 197, 403)
LARGEST = 403
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 1)
POISON = {"nan": torch.nan, "inf": torch.inf, "minus inf": -torch.inf, "1e30": 1e30}
# What integers of a pad may hold: any value, as attention reads none of a row without a request.
POISONED_INTEGERS = {"nan": 2**31 - 1, "inf": -(2**31), "minus inf": -1, "1e30": 7}
DISTINCT = {"host": 250, "cuda": 100}
"""Batches that differ, for each of two dtypes: 500 in all on a CPU and 200 on a GPU."""
EXAMPLES = {"host": 330, "cuda": 140}
"""Batches drawn: some are drawn again."""
PLAN = CapturePlan(
    window=WINDOW,
    model_sizes=MODEL_SIZES,
    full_sizes=(),
    replay_sizes=REPLAY_SIZES,
    trim_threshold=WINDOW + 1,
    max_num_seqs=MAX_SEQS,
    max_num_batched_tokens=LARGEST,
)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    query_len = draw(st.sampled_from(LENGTHS) | st.integers(0, 3 * WINDOW))
    computed = draw(st.sampled_from([0, 1, WINDOW, 2 * WINDOW + 3]) | st.integers(0, 20))
    phase = draw(st.sampled_from([Phase.PREFILL, Phase.PREFILL, Phase.DECODE]))
    return Request(
        query_len if phase is Phase.PREFILL else min(query_len, 5),
        computed,
        phase,
        all_rows_read=draw(st.integers(0, 4)) == 0,
        window_start=draw(st.sampled_from([0, max(0, computed - WINDOW)])),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.integers(1, MAX_SEQS))
    mix = draw(st.lists(requests(), min_size=count, max_size=count).filter(lambda mix: any(r.query_len for r in mix)))
    return Batch(mix)


@attrs.define
class Bench:
    """One runner with its graphs, graphs of row-wise layers beside it, and the inputs of the batch before.

    In `smooth` every row chooses every expert: a choice of some may turn on the last bit of a router's logit.
    """

    runner: StepRunner
    smooth: StepRunner
    row_wise: ReplayGraphs
    earlier: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        return self.runner.backend.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.decoder.weights.embed.dtype

    def write(self, batch: Batch, padded: int) -> None:
        """The batch's metadata; each request's blocks are its own."""
        counts = [-(-request.seq_len // BLOCK_SIZE) for request in batch.requests]
        tables = [
            np.arange(r * MAX_BLOCKS, r * MAX_BLOCKS + count, dtype=np.int32)[::-1] for r, count in enumerate(counts)
        ]
        ids = (np.arange(batch.num_tokens) * 13 % (TINY.vocab_size - len(POISON))).astype(np.int32)
        self.runner.contexts.batch.write(batch, tables, ids, padded)

    def replay_batch(self, rows: int, padded: int, batch: Batch) -> ReplayBatch:
        return self.runner.contexts.replay_batch(batch, rows, padded, CudagraphMode.PIECEWISE)

    def inputs(self, rows: int, seed: int) -> dict[str, Tensor]:
        """Seven tensors of a step's rows, of the size that layers hand on; positions are the batch's."""
        generator = torch.Generator().manual_seed(seed)
        values = {}
        for spec in input_specs(TINY.hidden_size, TINY.hc_mult, self.dtype):
            drawn = torch.randn((rows, *spec.row_shape), generator=generator)
            if spec.name.endswith("_mix"):
                drawn = drawn.sigmoid()
            values[spec.name] = drawn.to(self.device, spec.dtype)
        values["positions"].copy_(self.runner.contexts.batch.positions[:rows])
        return values


def row_wise_layers(inputs: RowTensors) -> tuple[Tensor, ...]:
    """Layers of functions of one row alone: no product of matrices, no order of summation that a shape may change."""
    x, residual = inputs["hidden_states"], inputs["residual"]
    turned = torch.sin(x.float() + inputs["positions"].unsqueeze(1)) * inputs["input_ids"].unsqueeze(1)
    streams = residual * 3 + (inputs["post_mix"] * turned.unsqueeze(1)).to(residual.dtype)
    return torch.nn.functional.silu(streams), (inputs["pre_mix"] + inputs["res_mix"].amax(2)).exp()


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """One backend for all examples: the order of sizes is that of the examples."""
    if request.param == "host":
        from replay_sim.capture.host import HostBackend

        return HostBackend(1 << 32)
    from replay_sim.capture.cuda import CudaBackend

    return CudaBackend()


def make_runner(shape: DecoderShape, backend: CaptureBackend) -> StepRunner:
    return StepRunner(
        shape, PLAN, backend, num_blocks=MAX_SEQS * MAX_BLOCKS, max_blocks=MAX_BLOCKS, block_size=BLOCK_SIZE
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bench(request, backend) -> Iterator[Bench]:
    shape = attrs.evolve(TINY, dtype=request.param, late_aux_layers=(3, 5))
    runner = make_runner(shape, backend)
    runner.decoder.weights.embed[-len(POISON) :] = torch.tensor(list(POISON.values())).unsqueeze(1)
    generator = torch.Generator(backend.device).manual_seed(7)
    for cache in (*runner.decoder.cache.window, runner.decoder.cache.shared):
        cache.normal_(generator=generator)
    runner.capture_model_graphs()
    for form in (ReplayForm.ONE_LAUNCH, ReplayForm.BREAKABLE):
        runner.use_replay_form(form)
        runner.capture_replay_graphs()
    specs = input_specs(TINY.hidden_size, TINY.hc_mult, getattr(torch, request.param))
    row_wise = ReplayGraphs(
        backend=backend,
        pool=backend.make_pool(),
        stream=backend.make_stream(),
        buffers=StaticBuffers(specs, LARGEST, backend.device),
        run_layers=row_wise_layers,
        prepare=runner.prepare_replay,
    )
    row_wise.capture(reversed(REPLAY_SIZES))
    smooth = make_runner(attrs.evolve(shape, num_experts_per_tok=shape.num_experts), backend)
    made = Bench(runner, smooth, row_wise, {})
    made.write(Batch([Request(1, 0, Phase.DECODE)]), 1)
    made.earlier = made.inputs(LARGEST, seed=99)
    yield made


def property_test(examples: dict[str, int], distinct: dict[str, int] | None = None):
    """Runs a test of (bench, batch, seed, graph) for as many random batches as its backend has examples.

    The draws differ by dtype; with `distinct`, at least that many of the batches must differ from each other.
    """

    def decorate(check):
        def test(bench: Bench) -> None:
            backend = bench.runner.backend
            drawn: set[tuple[Request, ...]] = set()

            @seed(torch.finfo(bench.dtype).bits)
            @settings(
                max_examples=examples[backend.name],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(batches(), st.integers(0, 2**20), st.integers(0, 2))
            def examine(batch: Batch, seed: int, larger: int) -> None:
                drawn.add(batch.requests)
                with torch.no_grad(), backend.on_stream(bench.runner.stream):
                    check(bench, batch, seed, larger)

            examine()
            assert distinct is None or len(drawn) >= distinct[backend.name]

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def kept_rows(batch: Batch) -> list[int]:
    """S1, row by row."""
    rows, begin = [], 0
    for request in batch.requests:
        keeps_all = request.phase is Phase.DECODE or request.all_rows_read
        first = 0 if keeps_all else max(0, request.query_len - WINDOW)
        rows += range(begin + first, begin + request.query_len)
        begin += request.query_len
    return rows


def padded_rows(inputs: dict[str, Tensor], rows: list[int], padded: int) -> dict[str, Tensor]:
    """The inputs' rows one after the other, and zero rows after them."""
    gathered = {}
    for name, value in inputs.items():
        result = torch.zeros((padded, *value.shape[1:]), dtype=value.dtype, device=value.device)
        for place, row in enumerate(rows):
            result[place] = value[row]
        gathered[name] = result
    return gathered


def poison_pads(values: dict[str, Tensor], rows: int, padded: int, kind: str, earlier: dict[str, Tensor]) -> None:
    """Fill rows [rows, padded) with poison, or with the rows of an earlier batch."""
    for name, value in values.items():
        if kind == "earlier rows":
            value[rows:padded] = earlier[name][rows:padded]
        else:
            value[rows:padded] = POISON[kind] if value.is_floating_point() else POISONED_INTEGERS[kind]


def real_bits(outputs: tuple[Tensor, ...], rows: int) -> list[Tensor]:
    """Copies of the real rows, which must be finite: a NaN equals nothing."""
    for output in outputs:
        assert bool(output[:rows].isfinite().all())
    return [output[:rows].clone() for output in outputs]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), what


def caches(bench: Bench) -> list[Tensor]:
    """The bits of all KV, the spare block's too, whose captures may have left NaN there."""
    cache = bench.runner.decoder.cache
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[bench.dtype]
    return [value.view(bits).clone() for value in (*cache.window, cache.shared)]


def graph_of(graphs: ReplayGraphs, size: int):
    return graphs.graphs[graphs.sizes.index(size)]


def size_for(rows: int, larger: int) -> int:
    """The graph that dispatch takes, or one or two sizes up."""
    fitting = [size for size in REPLAY_SIZES if size >= rows]
    return fitting[min(larger, len(fitting) - 1)]


@property_test(EXAMPLES, DISTINCT)
def test_replay_of_the_decoders_layers_equals_eager_bit_for_bit_whatever_the_pads_hold(
    bench: Bench, batch: Batch, seed: int, larger: int
) -> None:
    """G5, B1, B2, B5, B6: five poisons in the static buffers' pads, after the gather; no slot of the cache changes."""
    rows, layers = kept_rows(batch), bench.runner.decoder.run_replay_layers
    size = size_for(len(rows), larger)
    bench.write(batch, batch.num_tokens)
    inputs = bench.inputs(batch.num_tokens, seed)
    replay_batch = bench.replay_batch(len(rows), size, batch)
    assert replay_batch.rows.tolist() == rows
    buffers = bench.runner.replay_layers.inputs.tensors
    with use_forward_context(replay_batch.context):
        replayed = real_bits(bench.runner.replay_graphs.run(replay_batch.rows, inputs), len(rows))
        eager = real_bits(layers(padded_rows(inputs, rows, size)), len(rows))
        assert_same_bits(replayed, eager, "replay and eager on the same padded rows")
        after = caches(bench)
        for kind in (*POISON, "earlier rows"):
            poison_pads(buffers, len(rows), size, kind, bench.earlier)
            outputs = graph_of(bench.runner.replay_graphs, size).replay()
            assert_same_bits(real_bits(outputs, len(rows)), eager, f"{kind} in the pads of a replay graph")
        assert_same_bits(caches(bench), after, "the KV cache")
    for name, value in inputs.items():
        bench.earlier[name][: batch.num_tokens] = value


@property_test({"host": 60, "cuda": 140}, {"host": 40, "cuda": 100})
def test_one_launch_equals_breakable_graphs_and_eager_bit_for_bit_whatever_the_pads_held(
    bench: Bench, batch: Batch, seed: int, larger: int
) -> None:
    """G5, B2, L6: poison in the static buffers and in every row that is not kept; the metadata is the graph's own.

    On a GPU at least 100 different batches in float32 and 100 others in bfloat16: 200 random batches (issue 5).
    """
    runner, rows = bench.runner, kept_rows(batch)
    size = size_for(len(rows), larger)
    bench.write(batch, batch.num_tokens)
    inputs = bench.inputs(batch.num_tokens, seed)
    step = runner.contexts.replay_batch(batch, len(rows), size, CudagraphMode.PIECEWISE, ReplayForm.BREAKABLE)
    with use_forward_context(step.context):
        eager = real_bits(runner.decoder.run_replay_layers(padded_rows(inputs, rows, size)), len(rows))
        replayed = real_bits(runner.replay_graphs.run(step.rows, inputs), len(rows))
        assert_same_bits(replayed, eager, "breakable graph and eager on the same padded rows")
    after = caches(bench)
    trimmed = [row for row in range(batch.num_tokens) if row not in rows]
    buffers = runner.replay_layers.break_buffers
    runner.use_replay_form(ReplayForm.ONE_LAUNCH)
    try:
        for kind, value in POISON.items():
            for name, tensor in inputs.items():
                poison = value if tensor.is_floating_point() else POISONED_INTEGERS[kind]
                tensor[trimmed] = poison
                runner.replay_layers.inputs.tensors[name].fill_(poison)
            for name in ("rows", "positions", "slot_mapping", "request_of_row", "output_row_of", "num_rows"):
                getattr(runner.contexts.replay, name).fill_(3)
            store_addresses(runner.replay_layers.input_addresses, inputs)
            one = runner.contexts.replay_batch(batch, len(rows), size, CudagraphMode.PIECEWISE, ReplayForm.ONE_LAUNCH)
            with use_forward_context(one.context):
                runner.replay_graphs.run_into(buffers, one, inputs)
            outputs = list(buffers.tensors.values())
            assert_same_bits(
                [output[rows] for output in outputs], eager, f"one launch with {kind} beside the kept rows"
            )
            assert not any(bool(output[trimmed].any()) for output in outputs), "trimmed rows"
            assert not any(bool(output[batch.num_tokens :].any()) for output in outputs), "rows of a larger batch"
        assert_same_bits(caches(bench), after, "the KV cache")
    finally:
        runner.use_replay_form(ReplayForm.BREAKABLE)


@property_test(EXAMPLES, DISTINCT)
def test_replay_of_row_wise_layers_equals_eager_on_the_unpadded_rows_bit_for_bit(
    bench: Bench, batch: Batch, seed: int, larger: int
) -> None:
    """G5: where no product of matrices picks a kernel by its shape, padding changes no bit."""
    rows = kept_rows(batch)
    size = size_for(len(rows), larger)
    bench.write(batch, batch.num_tokens)
    inputs = bench.inputs(batch.num_tokens, seed)
    replay_batch = bench.replay_batch(len(rows), size, batch)
    unpadded = real_bits(row_wise_layers(padded_rows(inputs, rows, len(rows))), len(rows))
    with use_forward_context(replay_batch.context):
        replayed = bench.row_wise.run(replay_batch.rows, inputs)
        assert_same_bits(real_bits(replayed, len(rows)), unpadded, "replay and eager on the unpadded rows")
        for kind in (*POISON, "earlier rows"):
            poison_pads(bench.row_wise.buffers.tensors, len(rows), size, kind, bench.earlier)
            outputs = graph_of(bench.row_wise, size).replay()
            assert_same_bits(real_bits(outputs, len(rows)), unpadded, kind)


@property_test({"host": 60, "cuda": 30})
def test_model_graphs_with_poisoned_pads_equal_eager_bit_for_bit(
    bench: Bench, batch: Batch, seed: int, larger: int
) -> None:
    """G5, S8: pads embed tokens whose embedding is NaN, infinite or 1e30, at positions beyond any; the replay batch
    in the break has poisoned pads of its own from an earlier batch, which the gather clears."""
    runner, tokens = bench.runner, batch.num_tokens
    padded = smallest_size(MODEL_SIZES, tokens)
    assert padded is not None
    captured = {"model_sizes": MODEL_SIZES, "full_sizes": (), "replay_sizes": REPLAY_SIZES}
    record = dispatch_step(batch, PLAN, **captured)
    bench.write(batch, padded)
    buffers = runner.contexts.batch
    metadata = buffers.metadata(padded)
    rows = kept_rows(batch)
    assert record.mode is CudagraphMode.PIECEWISE and record.replay_rows == len(rows)
    replay_batch = bench.replay_batch(len(rows), record.padded_rows, batch)
    context = attrs.evolve(
        replay_batch.context,
        num_tokens=tokens,
        padded_tokens=padded,
        metadata={key: metadata for key in ("window", "first_replay_window", "replay_window")},
        num_rows=buffers.num_rows,
        replay_batch=replay_batch,
        first_layer_kv_written=False,
    )
    trimmed = [row for row in range(tokens) if row not in rows]

    def outputs_after(values: dict[str, tuple[Tensor, ...]]) -> list[Tensor]:
        for output in values["replay"]:
            assert not bool(output[trimmed].any())
        return real_bits(values["replay"], tokens)

    with use_forward_context(context):
        replayed = outputs_after(runner.model_graphs[padded].replay())
        after = caches(bench)
        eager = outputs_after(runner._forward(padded))
        assert_same_bits(replayed, eager, "model graph and eager on the same padded rows")
        for index in range(len(POISON)):
            buffers.input_ids[tokens:padded] = TINY.vocab_size - 1 - index
            buffers.positions[tokens:padded] = (2**40, -5, TINY.max_position, 0)[index]
            for buffer in runner.replay_layers.inputs.tensors.values():
                buffer.fill_(float("nan") if buffer.is_floating_point() else 2**31 - 1)
            for output in runner.replay_layers.break_buffers.tensors.values():
                output.fill_(float("nan"))
            runner.replay_layers.break_buffers.written.fill_(1)
            poisoned = outputs_after(runner.model_graphs[padded].replay())
            assert_same_bits(poisoned, replayed, f"{list(POISON)[-1 - index]} in the pads of a model graph")
        assert_same_bits(caches(bench), after, "the KV cache")


@property_test({"host": 40, "cuda": 20})
def test_the_decoders_layers_on_padded_rows_equal_the_unpadded_ones_within_rounding(
    bench: Bench, batch: Batch, seed: int, larger: int
) -> None:
    """G5: a product of matrices may pick another kernel for another shape."""
    layers, rows = bench.smooth.decoder.run_replay_layers, kept_rows(batch)
    bench.write(batch, batch.num_tokens)
    inputs = bench.inputs(batch.num_tokens, seed)
    outputs = []
    for padded in (len(rows), size_for(len(rows), larger)):
        with use_forward_context(bench.replay_batch(len(rows), padded, batch).context):
            outputs.append(real_bits(layers(padded_rows(inputs, rows, padded)), len(rows)))
    tolerance = ROUNDING[bench.dtype]
    for unpadded, padded in zip(*outputs, strict=True):
        size = max(1.0, float(unpadded.float().abs().max()))
        torch.testing.assert_close(padded.float(), unpadded.float(), rtol=0, atol=tolerance * size)
