"""Measures the replay region's kernels beside its layers' products: time, and counted bytes and arithmetic over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from tabulate import tabulate
from torch import Tensor

from replay_sim.capture import CaptureBackend
from replay_sim.config import DecoderShape
from replay_sim.decoder import ops
from replay_sim.decoder.layer import REPLAY_WINDOW_KEY
from replay_sim.measure import step_ops
from replay_sim.measure.rates import measure_rates, rate_settings
from replay_sim.measure.records import Point
from replay_sim.measure.replay_region import Region, region_plan, region_runner, region_sizes, replay
from replay_sim.measure.roofline import Rates
from replay_sim.measure.row_movement import ROTATED_BYTES
from replay_sim.measure.step_ops import INT_BYTES, LONG_BYTES, Op
from replay_sim.measure.timing import Timing, time_arms

KEPT_FROM_THE_LIMIT = {
    "row metadata": "one small launch whose loads wait for one another: each program first adds up the kept rows of "
    "all requests before its own",
    "KV write": "one warp a row, whose copy waits for the row's slot",
    "window attention": "one program a row loads all keys of the row for itself, from the cache that other rows' "
    "programs filled; its products have as many rows as there are heads",
    "shared attention": "as window attention, with index_topk keys a row more, spread over the request's whole length",
}
"""What the kernels' code says of why each takes longer than its limit; the figures beside it are measured."""


def measure_kernels(
    shape: DecoderShape, backend: CaptureBackend, seed: int
) -> tuple[list[Point], dict[str, object], str]:
    """Time each kernel on the rows of the region suite's steps; points, settings, with notes on a GPU, and a table.

    A point is one call's share of a graph with one call for each replay layer, in that layer's caches. `bytes` are each
    operand's read or written once, `loaded_bytes` what the programs load of the caches, `limit_us` the bytes or the
    arithmetic over the rates of the same run, whichever takes longer.
    """
    tokens, sizes = region_sizes(shape, backend)
    rates = measure_rates(backend.device, seed)
    few = attrs.evolve(shape, num_weight_sets=1, num_local_experts=min(shape.num_local_experts, 8))
    runner = region_runner(few, region_plan(few, sizes, tokens), backend, seed)
    points: list[Point] = []
    with backend.on_stream(runner.stream), torch.no_grad():
        for size in sizes:
            region = Region(runner, {}, size, seed)
            points += [_point(op, timing, region, rates) for op, timing in _time(region)]
    settings: dict[str, object] = rate_settings(rates)
    if backend.name == "cuda":
        settings |= {"notes": kernel_notes(points, rates)}
    columns = ("op", "rows", "device_us", "limit_us", "bytes", "loaded_bytes", "flops")
    return points, settings, tabulate([[p[key] for key in columns] for p in points], columns, tablefmt="pipe")


def _time(region: Region) -> list[tuple[Op, Timing]]:
    calls, counted = _calls(region), _counted(region)
    count = len(region.layers_of_graph)
    graphs = {name: region.capture(partial(_all, call, count), name) for name, call in calls.items()}
    arms: dict[str, Callable[[int], object]] = {name: partial(replay, graph) for name, graph in graphs.items()}
    times = time_arms(arms, region.runner.backend.device)
    return [(counted[name], times[name].share(count)) for name in calls]


def _all(call: Callable[[int], object], count: int) -> None:
    for index in range(count):
        call(index)


def _calls(region: Region) -> dict[str, Callable[[int], object]]:
    """One call of each kernel, in the caches of replay layer `index`; operands are rotated, so that none stays near."""
    contexts, shape, layers = region.runner.contexts, region.runner.shape, region.layers_of_graph
    metadata = region.replay_batch().context.metadata[REPLAY_WINDOW_KEY]
    dtype: torch.dtype = getattr(torch, shape.dtype)
    size, device = (region.size, shape.num_heads, shape.head_dim), region.runner.backend.device
    nbytes = region.size * shape.num_heads * shape.head_dim * shape.dtype_bytes
    copies = min(len(layers), -(-ROTATED_BYTES // nbytes))
    queries = [torch.randn(size, device=device).to(dtype) for _ in range(copies)]
    outs = [torch.empty_like(query) for query in queries]
    latents = [torch.randn(size[0], size[2], device=device).to(dtype) for _ in layers]
    for layer in layers:
        layer.window_cache.normal_()
    for cache in {id(layer.shared_cache): layer.shared_cache for layer in layers}.values():
        if cache is not None:
            cache.normal_()
    rows = (metadata.positions, metadata.request_of_row, metadata.window_start, metadata.block_table)
    how = (metadata.block_size, shape.window, shape.index_topk, shape.head_dim**-0.5)

    def attend(index: int, shared: bool) -> None:
        layer, turn = layers[index], index % copies
        ops.attend_(outs[turn], queries[turn], layer.window_cache, layer.shared_cache if shared else None, *rows, *how)

    return {
        "row metadata": lambda _: contexts.replay.write_captured(contexts.batch, region.size),
        "KV write": lambda index: ops.write_kv_(layers[index].window_cache, latents[index], metadata.slot_mapping),
        "window attention": partial(attend, shared=False),
        "shared attention": partial(attend, shared=True),
    }


def _counted(region: Region) -> dict[str, Op]:
    """Bytes and arithmetic of a call of each kernel, of what these rows read."""
    shape, plan, contexts = region.runner.shape, region.runner.plan, region.runner.contexts
    rows = rows_of(region)
    by_row = (6 * LONG_BYTES + INT_BYTES) * region.size
    by_request = (2 * LONG_BYTES + 3 * INT_BYTES) * plan.max_num_seqs
    metadata = Op(name="row metadata", kind="rows", nbytes=by_row + by_request + INT_BYTES * contexts.replay.max_rows)
    others = (step_ops.write_kv(shape, rows), *(step_ops.attention(shape, rows, shared=s) for s in (False, True)))
    return {op.name: op for op in (metadata, *others)}


def rows_of(region: Region) -> step_ops.Rows:
    """The keys that the kept rows of a layer after the first read, and how many different ones, counted one by one."""
    metadata = region.replay_batch().context.metadata[REPLAY_WINDOW_KEY]
    positions, starts, owner = (
        tensor.cpu().long() for tensor in (metadata.positions, metadata.window_start, metadata.request_of_row)
    )
    topk = region.runner.shape.index_topk
    window_entries, shared_entries = 0, 0
    for request in owner.unique():
        at, first = positions[owner == request], starts[owner == request].min()
        window_entries += int(at.max() - first) + 1
        shared_entries += len(torch.cat([shared_positions(int(position), topk) for position in at]).unique())
    return step_ops.Rows(
        padded=region.size,
        real=region.size,
        window_keys=int((positions - starts + 1).sum()),
        shared_keys=int((positions + 1).clamp(max=topk).sum()),
        window_entries=window_entries,
        shared_entries=shared_entries,
    )


def shared_positions(position: int, topk: int) -> Tensor:
    """The positions of the shared KV that a row at `position` attends, int64 (min(topk, position + 1),)."""
    count = min(topk, position + 1)
    return torch.arange(count) * (position + 1) // count


def _point(op: Op, timing: Timing, region: Region, rates: Rates) -> Point:
    shape = region.runner.shape
    return {
        "op": op.name,
        "rows": region.size,
        "num_reqs": region.batch.num_reqs,
        "device_us": timing.device_us,
        "p10": timing.p10,
        "p90": timing.p90,
        "n": timing.n,
        "bytes": round(op.nbytes),
        "loaded_bytes": round(op.inner * shape.head_dim * shape.dtype_bytes),
        "flops": round(op.flops),
        "limit_us": round(rates.limit_us(op), 3),
    }


def kernel_notes(points: Sequence[Point], rates: Rates) -> list[str]:
    """A sentence a kernel: what it reaches at its most rows, and what keeps it from its limit."""
    notes = []
    for op, reason in KEPT_FROM_THE_LIMIT.items():
        point = max((p for p in points if p["op"] == op), key=lambda p: int(p["rows"] or 0))
        time, limit, nbytes, flops, loaded = (
            float(point[key] or 0) for key in ("device_us", "limit_us", "bytes", "flops", "loaded_bytes")
        )
        by = "its arithmetic" if flops / rates.matmul > nbytes / rates.bandwidth else "its bytes"
        reached = f"{nbytes / time / 1e3:.1f} GB/s of {rates.bandwidth / 1e9:.1f}"
        if flops:
            reached += f", {flops / time / 1e6:.1f} TFLOP/s of {rates.matmul / 1e12:.1f}"
            reached += f", {loaded / time / 1e3:.1f} GB/s loaded of the caches"
        notes.append(
            f"{op}, {point['rows']} rows: {time} µs, {time / limit:.2f} × the limit by {by}; {reached}. {reason}."
        )
    return notes
