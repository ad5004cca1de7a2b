"""Measures the movement of rows, gather and scatter, against the copy bandwidth of the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from tabulate import tabulate

from replay_sim.capture import BreakableGraph, CaptureBackend, capture, warm_up
from replay_sim.config import DecoderShape
from replay_sim.measure.records import Point
from replay_sim.measure.timing import Timing, time_arms
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.movement import gather_into, scatter_into
from replay_sim.replay.row_ops import gather_by_address, store_addresses
from replay_sim.replay.row_tensors import RowTensorSpec, input_specs, output_specs
from replay_sim.replay.static_buffers import StaticBuffers

ROWS = (128, 300, 1024, 2048, 4096)
SOURCES = 3
MOST_SETS = 24
ROTATED_BYTES = 256 << 20
"""Bytes that calls rotate over before one repeats: several times a GPU's cache, unless that takes too many sets."""
OPS, ARMS = ("gather", "scatter"), ("reference", "fused")
KEPT_FROM_THE_LIMIT = {
    "gather": "What does not grow is a launch's begin and end, and loads that wait for one another: count, address, "
    "index, row",
    "scatter": "The same, and two loads for every four rows of each target, written or not, that find what to clear",
}
"""What the kernels' code says of why each takes longer than its limit; the figures beside it are measured."""


@attrs.frozen
class Movement:
    """One number of rows: index sets, what they move from and to, and one call of each operation and arm.

    Set k is drawn anew: `indices` int64 (rows,) ascending, `places` int32 (tokens,) their inverse, `results` the rows
    that are scattered; gathers read `sources` in turn and write `buffers` of their own.
    """

    indices: list[torch.Tensor]
    places: list[torch.Tensor]
    sources: list[dict[str, torch.Tensor]]
    tables: list[torch.Tensor]
    num_rows: torch.Tensor
    buffers: list[StaticBuffers]
    results: list[tuple[torch.Tensor, ...]]
    targets: tuple[torch.Tensor, ...]
    break_buffers: BreakBuffers

    def call(self, op: str, arm: str, turn: int) -> None:
        """Move the rows of set `turn`, and around."""
        index = turn % len(self.indices)
        rows, source = self.indices[index], turn % len(self.sources)
        if op == "scatter" and arm == "fused":
            self.break_buffers.scatter(self.results[index], rows, self.num_rows, self.places[index])
        elif op == "scatter":
            scatter_into(rows, self.results[index], self.targets)
        elif arm == "fused":
            buffers = tuple(self.buffers[index].tensors.values())
            gather_by_address(buffers, self.tables[source], rows, self.num_rows, rows.shape[0])
        else:
            gather_into(rows, self.sources[source], self.buffers[index].tensors, rows.shape[0])

    def moved(self, op: str, turn: int, arm: str) -> list[torch.Tensor]:
        """Copies of what a call wrote, over other values."""
        for buffer in self.buffers[turn % len(self.buffers)].tensors.values():
            buffer.fill_(1)
        self.call(op, arm, turn)
        gathered = self.buffers[turn % len(self.buffers)].tensors.values()
        scattered = self.break_buffers.tensors.values() if arm == "fused" else self.targets
        return [tensor.clone() for tensor in (gathered if op == "gather" else scattered)]

    def rows_cleared(self) -> float:
        """Rows that a scatter clears: those of the set before that are not in its own, on average."""
        sets = [set(index.tolist()) for index in self.indices]
        return sum(len(before - now) for before, now in zip(sets, sets[1:] + sets[:1], strict=True)) / len(sets)


def measure_movement(
    shape: DecoderShape, backend: CaptureBackend, seed: int, tokens: int = 8192
) -> tuple[list[Point], dict[str, object], str]:
    """Time gather and scatter of kept rows among `tokens` rows; points, settings and a table.

    Arms are an operation a tensor and the fused kernel, each called eagerly and `in_graph`, where a graph holds a call
    of every set and the time is a call's share. `bytes` is what must move: a gather reads and writes each kept row, a
    scatter reads and writes each and clears those of the set before. `limit_us` is that over the copy bandwidth, read
    plus written, of the same run. Raises RuntimeError where the arms differ in a bit.
    """
    device = backend.device
    generator = torch.Generator(device).manual_seed(seed)
    bandwidth = _copy_bandwidth(device)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    inputs = input_specs(shape.hidden_size, shape.hc_mult, dtype)
    outputs = output_specs(shape.hidden_size, shape.hc_mult, dtype)
    sources = [random_rows(inputs, tokens, generator, device) for _ in range(SOURCES)]
    points: list[Point] = []
    for rows in ROWS:
        movement = _draw(rows, tokens, inputs, outputs, sources, generator)
        nbytes = _bytes_moved(movement, rows, inputs, outputs)
        for (op, arm, in_graph), timing in _time(movement, backend).items():
            about: Point = {"op": op, "arm": arm, "in_graph": in_graph, "rows": rows, "tokens": tokens}
            limit: Point = {"bytes": nbytes[op], "limit_us": round(nbytes[op] / bandwidth * 1e6, 2)}
            points.append(about | {"hidden_size": shape.hidden_size} | attrs.asdict(timing) | limit)
    columns = ("op", "arm", "in_graph", "rows", "tokens", "device_us", "host_us", "limit_us")
    headers = ("op", "arm", "in graph", "rows", "tokens", "device µs", "host µs", "limit µs")
    table = tabulate([[p[key] for key in columns] for p in points], headers, tablefmt="pipe")
    settings = {"copy_bandwidth_gbps": round(bandwidth / 1e9, 1), "input_sets": SOURCES}
    return points, settings | {"notes": movement_notes(points)}, table


def movement_notes(points: Sequence[Point]) -> list[str]:
    """A sentence for each fused operation: what it reaches in a graph, and what keeps it from its limit.

    The time beyond the limit is split by a line through the two largest numbers of rows.
    """
    notes = []
    for op, reason in KEPT_FROM_THE_LIMIT.items():
        few, many = [p for p in points if (p["op"], p["arm"], p["in_graph"]) == (op, "fused", True)][-2:]
        (less, low), (time, limit) = ((float(p["device_us"] or 0), float(p["limit_us"] or 0)) for p in (few, many))
        slope = (time - less) / (limit - low)
        notes.append(
            f"{op}, {many['rows']} rows: {time} µs, {time / limit:.3f} × the limit by its bytes, as it is "
            f"{slope:.3f} × the limit and {time - slope * limit:.1f} µs that do not grow with the rows. {reason}."
        )
    return notes


def _draw(
    rows: int,
    tokens: int,
    inputs: tuple[RowTensorSpec, ...],
    outputs: tuple[RowTensorSpec, ...],
    sources: list[dict[str, torch.Tensor]],
    generator: torch.Generator,
) -> Movement:
    device = generator.device
    count = min(MOST_SETS, max(SOURCES, -(-ROTATED_BYTES // (rows * sum(spec.row_bytes for spec in inputs)))))
    indices = [torch.randperm(tokens, generator=generator, device=device)[:rows].sort().values for _ in range(count)]
    places = [torch.full((tokens,), -1, dtype=torch.int32, device=device) for _ in range(count)]
    for place, index in zip(places, indices, strict=True):
        place[index] = torch.arange(rows, dtype=torch.int32, device=device)
    tables = [torch.zeros(len(inputs), dtype=torch.int64, device=device) for _ in sources]
    for table, source in zip(tables, sources, strict=True):
        store_addresses(table, source)
    return Movement(
        indices=indices,
        places=places,
        sources=sources,
        tables=tables,
        num_rows=torch.tensor([rows], dtype=torch.int32, device=device),
        buffers=[StaticBuffers(inputs, rows, device) for _ in range(count)],
        results=[tuple(random_rows(outputs, rows, generator, device).values()) for _ in range(count)],
        targets=tuple(StaticBuffers(outputs, tokens, device).tensors.values()),
        break_buffers=BreakBuffers(outputs, tokens, device),
    )


def _bytes_moved(
    movement: Movement, rows: int, inputs: tuple[RowTensorSpec, ...], outputs: tuple[RowTensorSpec, ...]
) -> dict[str, int]:
    in_bytes, out_bytes = (sum(spec.row_bytes for spec in specs) for specs in (inputs, outputs))
    return {"gather": 2 * rows * in_bytes, "scatter": round((2 * rows + movement.rows_cleared()) * out_bytes)}


def _time(movement: Movement, backend: CaptureBackend) -> dict[tuple[str, str, bool], Timing]:
    """Every operation and arm, eagerly and in a graph of a call of each set, after both arms gave the same bits."""
    sets = len(movement.indices)
    for op in OPS:
        for turn in range(SOURCES):
            pairs = zip(*(movement.moved(op, turn, arm) for arm in ARMS), strict=True)
            if not all(torch.equal(reference, fused) for reference, fused in pairs):
                raise RuntimeError(f"the fused {op} of {movement.indices[0].shape[0]} rows differs from the reference")
    place = {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}

    def all_sets(op: str, arm: str) -> None:
        for turn in range(sets):
            movement.call(op, arm, turn)

    arms: dict[tuple[str, str, bool], Callable[[int], object]] = {}
    for op in OPS:
        for arm in ARMS:
            calls = partial(all_sets, op, arm)
            with backend.on_stream(place["stream"]):
                warm_up(calls, backend)
            arms[op, arm, False] = partial(movement.call, op, arm)
            arms[op, arm, True] = partial(_replay, capture(calls, name=f"{arm} {op}", **place))
    timings = time_arms({str(key): call for key, call in arms.items()}, backend.device)
    return {key: timings[str(key)].share(sets if key[2] else 1) for key in arms}


def _replay(graph: BreakableGraph, turn: int) -> None:
    graph.replay()


def random_rows(
    specs: tuple[RowTensorSpec, ...], rows: int, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Random values of every spec: never zeros, which can be faster than real data."""
    made = {}
    for spec in specs:
        size = (rows, *spec.row_shape)
        if spec.dtype.is_floating_point:
            made[spec.name] = torch.randn(size, generator=generator, device=device).to(spec.dtype)
        else:
            made[spec.name] = torch.randint(1, 1000, size, generator=generator, device=device, dtype=spec.dtype)
    return made


def _copy_bandwidth(device: torch.device, nbytes: int = 1 << 32) -> float:
    """Bytes a second, read plus written, of a large copy on the device; a smaller one on a CPU."""
    nbytes = nbytes if device.type == "cuda" else 1 << 26
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_arms({"copy": lambda _: target.copy_(source)}, device, rounds=10, warm_up=2)["copy"]
    return 2 * nbytes / (timing.device_us * 1e-6)
