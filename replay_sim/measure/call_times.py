"""Times single calls of the decoder in a graph, on a whole prefill chunk and on its kept rows (issue 4, point 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from replay_sim.capture import CaptureBackend
from replay_sim.config import DecoderShape
from replay_sim.decoder import ops
from replay_sim.decoder.weights import LayerWeights, make_weights
from replay_sim.measure.records import Point
from replay_sim.measure.roofline import Rates
from replay_sim.measure.step_ops import keys_read
from replay_sim.measure.timing import Timing, time_arms
from replay_sim.progress import Progress, no_progress
from replay_sim.workload.kv_blocks import BLOCK_SIZE

ROWS = {"cuda": (8192, 128), "cpu": (64, 8)}
"""Rows of the whole chunk, and those that the replay layers keep of it."""
OPERAND_BYTES = {"cuda": 256 << 20, "cpu": 1 << 16}
"""A graph goes through copies of an operand of so many bytes in all, so that none is read from a cache."""
MOST_COPIES = 32
ROUNDS = 15


@attrs.frozen(kw_only=True)
class Call:
    """One operation on `rows` rows: a function for each copy of its operands, bytes and arithmetic of one call."""

    op: str
    rows: int
    copies: tuple[Callable[[], object], ...]
    nbytes: int
    flops: int


def measure_calls(
    shape: DecoderShape, backend: CaptureBackend, seed: int, rates: Rates, progress: Progress = no_progress
) -> tuple[list[Point], str]:
    """Time attention, expert products and dense products at both row counts; points and a table of the ratios.

    `device_us` is of one call, among the copies of one graph on a GPU; `limit_us` is bytes or arithmetic over the
    measured rates, whichever takes longer.
    """
    layer = make_weights(attrs.evolve(shape, num_weight_sets=1), backend.device, seed).layers[shape.cut]
    points = []
    for rows in progress(ROWS[backend.device.type], "calls"):
        drawn = _Drawn(shape, backend.device, seed, rows)
        for make in (attention_calls, expert_calls, dense_calls):
            points += [_point(call, _time(call, backend), rates) for call in make(drawn, layer)]
            backend.empty_cache()
    return points, _table(points)


class _Drawn:
    """Random operands of calls on `rows` rows of `shape`."""

    def __init__(self, shape: DecoderShape, device: torch.device, seed: int, rows: int) -> None:
        self.shape, self.device, self.rows = shape, device, rows
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int) -> Tensor:
        """Normal values in the activation dtype."""
        return torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)

    def num_copies(self, nbytes: int) -> int:
        """How many copies of an operand a graph goes through."""
        return min(MOST_COPIES, max(1, -(-OPERAND_BYTES[self.device.type] // nbytes)))

    def copies_of(self, weight: Tensor) -> list[Tensor]:
        """A weight and its copies."""
        return [weight, *(weight.clone() for _ in range(self.num_copies(weight.nbytes) - 1))]


def attention_calls(drawn: _Drawn, layer: LayerWeights) -> list[Call]:
    """Attention of the last `rows` rows of a request's second chunk, over its window, and over the shared KV too."""
    shape, rows = drawn.shape, drawn.rows
    context = 2 * max(ROWS[drawn.device.type])
    positions = torch.arange(context - rows, context, device=drawn.device)
    request_of_row = torch.zeros(rows, dtype=torch.int32, device=drawn.device)
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(blocks, generator=drawn.generator, device=drawn.device).to(torch.int32)[None]
    q, out = (drawn.normal(rows, shape.num_heads, shape.head_dim) for _ in range(2))
    slots = blocks * BLOCK_SIZE
    copies = drawn.num_copies(slots * shape.head_dim * shape.dtype_bytes)
    caches = [(drawn.normal(slots, shape.head_dim), drawn.normal(slots, shape.head_dim)) for _ in range(copies)]

    def attend(window_cache: Tensor, shared_cache: Tensor | None) -> None:
        starts = positions - shape.window + 1
        settings = (BLOCK_SIZE, shape.window, shape.index_topk, shape.head_dim**-0.5)
        ops.attend_(out, q, window_cache, shared_cache, positions, request_of_row, starts, table, *settings)

    shared_keys = int(keys_read(context - rows, rows, shape.index_topk))
    calls = []
    for op, shared in (("attend_window", 0), ("attend_shared", shared_keys)):
        entries = shape.window - 1 + rows + min(shared, context)
        keys = int(keys_read(context - rows, rows, shape.window)) + shared
        calls.append(
            Call(
                op=op,
                rows=rows,
                copies=tuple(
                    partial(attend, of_window, of_shared if shared else None) for of_window, of_shared in caches
                ),
                nbytes=2 * q.nbytes + entries * shape.head_dim * shape.dtype_bytes,
                flops=4 * keys * shape.num_heads * shape.head_dim,
            )
        )
    return calls


def expert_calls(drawn: _Drawn, layer: LayerWeights) -> list[Call]:
    """Both grouped products of the experts that random logits pick; only weights of picked experts are counted."""
    shape, rows = drawn.shape, drawn.rows
    pair_token, _, offs, _ = ops.route(
        drawn.normal(rows, shape.num_experts),
        torch.tensor([rows], dtype=torch.int32, device=drawn.device),
        shape.first_local_expert,
        shape.num_local_experts,
        shape.num_experts_per_tok,
        shape.routed_scaling_factor,
    )
    ends = offs.cpu().numpy()
    pairs, picked = int(ends[-1]), int(np.count_nonzero(np.diff([0, *ends])))
    calls = []
    for op, weight in (("expert_w13", layer.w13), ("expert_w2", layer.w2)):
        _, inner, width = weight.shape
        xs = ops.moe_gather(drawn.normal(rows, inner), pair_token, offs)
        calls.append(
            Call(
                op=op,
                rows=rows,
                copies=tuple(partial(ops.grouped_matmul, xs, one, offs) for one in drawn.copies_of(weight)),
                nbytes=(pairs * (inner + width) + picked * inner * width) * weight.element_size(),
                flops=2 * pairs * inner * width,
            )
        )
    return calls


def dense_calls(drawn: _Drawn, layer: LayerWeights) -> list[Call]:
    """The dense products of one layer."""
    calls = []
    for op in ("wqkv_a", "wq_b", "wo_b", "shared_w13", "shared_w2"):
        weight: Tensor = getattr(layer, op)
        inner, width = weight.shape
        x = drawn.normal(drawn.rows, inner)
        calls.append(
            Call(
                op=op,
                rows=drawn.rows,
                copies=tuple(partial(torch.mm, x, one) for one in drawn.copies_of(weight)),
                nbytes=(drawn.rows * (inner + width) + inner * width) * weight.element_size(),
                flops=2 * drawn.rows * inner * width,
            )
        )
    return calls


def _time(call: Call, backend: CaptureBackend) -> Timing:
    """One graph of all copies on a GPU, the copies one after another on a CPU."""

    def run() -> None:
        for one in call.copies:
            one()

    if backend.device.type != "cuda":
        return time_arms({"copies": lambda _: run()}, backend.device, rounds=ROUNDS, warm_up=2)["copies"]
    stream = torch.cuda.Stream(backend.device)
    with backend.on_stream(stream):
        run()
    backend.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return time_arms({"copies": lambda _: graph.replay()}, backend.device, rounds=ROUNDS, warm_up=2)["copies"]


def _point(call: Call, timing: Timing, rates: Rates) -> Point:
    count = len(call.copies)
    return {
        "op": call.op,
        "rows": call.rows,
        "device_us": round(timing.device_us / count, 2),
        "p10": round(timing.p10 / count, 2),
        "p90": round(timing.p90 / count, 2),
        "n": timing.n,
        "copies": count,
        "bytes": call.nbytes,
        "flops": call.flops,
        "limit_us": round(max(call.nbytes / rates.bandwidth, call.flops / rates.matmul) * 1e6, 2),
    }


def _table(points: list[Point]) -> str:
    """Each operation's time on the whole chunk and on the kept rows, and their ratio."""
    times: dict[object, list[float]] = {}
    for point in points:
        times.setdefault(point["op"], []).append(float(point["device_us"] or 0))
    rows = [(op, whole, kept, f"{whole / kept:.1f}") for op, (whole, kept) in times.items()]
    return tabulate(rows, ("op", "whole chunk µs", "kept rows µs", "ratio"), tablefmt="pipe")
