"""The roofline of one step: each operation's bytes and arithmetic over the rates measured in the same run (issue 4)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config.shapes import DecoderShape
from replay_sim.measure import step_ops
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_ops import INT_BYTES, Op, Rows, keys_read
from replay_sim.plan.cost import break_bytes_per_row, static_bytes_per_row

PARTS = ("first_layers", "kv_write", "movement", "replay_layers")
"""A step's parts in the order in which they run; rows move on both sides of the replay layers."""


@attrs.frozen
class Rates:
    """What the device can do: `bandwidth` bytes a second, read plus written; `matmul` operations a second."""

    bandwidth: float
    matmul: float

    def limit_us(self, op: Op) -> float:
        """The least microseconds of all launches of one operation: its bytes or its arithmetic, the slower."""
        return op.count * max(op.nbytes / self.bandwidth, op.flops / self.matmul) * 1e6


def rates_of(settings: Mapping[str, object]) -> Rates:
    """The rates in a record's settings: copy_bandwidth_gbps (GB/s) and matmul_tflops (10^12 operations a second).

    Raises KeyError naming one that is missing.
    """
    bandwidth, matmul = settings["copy_bandwidth_gbps"], settings["matmul_tflops"]
    assert isinstance(bandwidth, int | float) and isinstance(matmul, int | float)
    return Rates(bandwidth * 1e9, matmul * 1e12)


def batch_rows(shape: DecoderShape, case: StepCase) -> Rows:
    """The whole batch: every row attends its request's window and, from the cut on, the shared KV."""
    length, computed, reqs = case.query_len, case.computed, case.num_reqs
    shared_keys = keys_read(computed, length, shape.index_topk)
    return Rows(
        padded=case.padded_tokens,
        real=case.num_tokens,
        window_keys=reqs * keys_read(computed, length, shape.window),
        shared_keys=reqs * shared_keys,
        window_entries=reqs * (min(computed, shape.window - 1) + length),
        shared_entries=reqs * min(shared_keys, computed + length),
    )


def replay_rows(shape: DecoderShape, case: StepCase, *, first_layer: bool) -> Rows:
    """The replay batch: the last rows of each request, whose windows after the first layer start with them (S4)."""
    kept = case.kept_len
    first = case.computed + case.query_len - kept
    trims = case.replay_rows < case.num_tokens
    before = 0.0 if trims and not first_layer else first
    shared_keys = keys_read(first, kept, shape.index_topk)
    return Rows(
        padded=case.padded_rows,
        real=case.replay_rows,
        window_keys=case.num_reqs * keys_read(before, kept, shape.window),
        shared_keys=case.num_reqs * shared_keys,
        window_entries=case.num_reqs * (min(before, shape.window - 1) + kept),
        shared_entries=case.num_reqs * min(shared_keys, first + kept),
    )


def step_parts(shape: DecoderShape, case: StepCase) -> dict[str, tuple[Op, ...]]:
    """Every operation of a step by part, in PARTS' order; a part that does not run is empty.

    Metadata staging and the few fills that start the state are left out: they are below a thousandth of the bytes.
    """
    batch = batch_rows(shape, case)
    embed_bytes = case.padded_tokens * (2 * shape.hidden_size * shape.dtype_bytes + INT_BYTES)
    first = [
        Op(name="embedding", kind="rows", nbytes=embed_bytes),
        *step_ops.layer_ops(shape, batch, shape.cut, shared=False),
        *_aux(shape, batch.padded, len(shape.early_aux_layers)),
    ]
    if not case.has_replay_batch:
        ops = [*_replay_layers(shape, batch, batch), *step_ops.shared_latent(shape, batch.padded)]
        ops.append(step_ops.write_kv(shape, batch))
        return {"first_layers": tuple(first), "kv_write": (), "movement": (), "replay_layers": tuple(ops)}
    first_rows, rows = (replay_rows(shape, case, first_layer=flag) for flag in (True, False))
    return {
        "first_layers": tuple(first),
        "kv_write": tuple(_kv_write(shape, case, batch)),
        "movement": tuple(_movement(shape, case)),
        "replay_layers": tuple(_replay_layers(shape, first_rows, rows, writes_kv=False)),
    }


def step_limit_us(shape: DecoderShape, case: StepCase, rates: Rates) -> float:
    """The roofline of one step: microseconds that its operations, one after another, cannot go below.

    Every operand is counted as moved once from memory; small activations that stay in cache can be faster than that.
    """
    return sum(rates.limit_us(op) for ops in step_parts(shape, case).values() for op in ops)


def _aux(shape: DecoderShape, rows: int, count: int) -> list[Op]:
    """Merges and means of `count` aux layers."""
    return [step_ops.merge(shape, rows, count), step_ops.mean(shape, rows, count)] if count else []


def _replay_layers(shape: DecoderShape, first_rows: Rows, rows: Rows, *, writes_kv: bool = True) -> list[Op]:
    """The layers from the cut on, the last merge and late aux; without `writes_kv` the first's KV is written (L3)."""
    late = len(shape.late_aux_layers)
    return [
        *step_ops.layer_ops(shape, first_rows, 1, shared=True, writes_kv=writes_kv),
        *step_ops.layer_ops(shape, rows, shape.num_replay_layers - 1, shared=True),
        step_ops.merge(shape, rows.padded),
        *_aux(shape, rows.padded, late),
    ]


def _kv_write(shape: DecoderShape, case: StepCase, batch: Rows) -> list[Op]:
    """The first replay layer's latents of every row of the batch, written to both of its caches (L3).

    Beside a graph one kernel more says where the inputs of the replay region lie.
    """
    in_graph = case.one_launch or case.mode is CudagraphMode.PIECEWISE
    return [
        step_ops.boundary(shape, "KV boundary", batch.padded),
        *step_ops.query_latent(shape, batch.padded),
        *step_ops.shared_latent(shape, batch.padded),
        step_ops.write_kv(shape, batch, count=2),
        *([Op(name="addresses", kind="movement", nbytes=0.0)] if in_graph else []),
    ]


def _movement(shape: DecoderShape, case: StepCase) -> list[Op]:
    """The gather of the kept rows, and the scatter of the outputs into rows that are cleared (B2, L6).

    An eager replay batch gathers no pads. Fresh outputs of an eager step are cleared as a whole; the break buffers of
    a graph where the step before wrote, which is taken to have kept as many rows.
    """
    pads = case.padded_rows - case.replay_rows
    in_bytes, out_bytes = static_bytes_per_row(shape), break_bytes_per_row(shape)
    in_buffers = case.one_launch or case.mode is CudagraphMode.PIECEWISE
    written = 2 * case.replay_rows if in_buffers else case.padded_tokens
    gathers = 1 if case.one_launch else 7 * (2 if pads else 1)
    return [
        Op(name="gather", kind="movement", nbytes=(2 * case.replay_rows + pads) * in_bytes, kernels=gathers),
        Op(
            name="scatter",
            kind="movement",
            nbytes=(case.replay_rows + written) * out_bytes,
            kernels=1 if in_buffers else 2 * (2 + len(shape.late_aux_layers)),
        ),
    ]
