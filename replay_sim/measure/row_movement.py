"""Measures the movement of rows, gather and scatter, against the copy bandwidth of the same run."""

from __future__ import annotations

import torch
from tabulate import tabulate

from replay_sim.capture import CaptureBackend
from replay_sim.config import DecoderShape
from replay_sim.measure.records import Point
from replay_sim.measure.timing import Timing, time_arms
from replay_sim.replay.movement import gather_into, scatter_into
from replay_sim.replay.row_tensors import RowTensorSpec, input_specs, output_specs
from replay_sim.replay.static_buffers import StaticBuffers

ROWS = (128, 300, 1024, 2048, 4096)
INPUT_SETS = 3


def measure_movement(
    shape: DecoderShape, backend: CaptureBackend, seed: int, tokens: int = 8192
) -> tuple[list[Point], dict[str, object], str]:
    """Time gather and scatter of kept rows among `tokens` rows; points, settings and a table.

    `bytes` is what must move: a gather reads and writes each kept row once, a scatter reads each and writes every row
    of the step. `limit_us` is that over the copy bandwidth, read plus written, measured in the same run.
    """
    device = backend.device
    generator = torch.Generator(device).manual_seed(seed)
    bandwidth = _copy_bandwidth(device)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    inputs = input_specs(shape.hidden_size, shape.hc_mult, dtype)
    outputs = output_specs(shape.hidden_size, shape.hc_mult, dtype, len(shape.late_aux_layers))
    sources = [_random_rows(inputs, tokens, generator, device) for _ in range(INPUT_SETS)]
    points: list[Point] = []
    for rows in ROWS:
        index = torch.randperm(tokens, generator=generator, device=device)[:rows].sort().values
        points += _measure_rows(index, inputs, outputs, sources, tokens, generator, bandwidth, shape.hidden_size)
    table = tabulate(
        [[p[key] for key in ("op", "arm", "rows", "tokens", "device_us", "host_us", "limit_us")] for p in points],
        ("op", "arm", "rows", "tokens", "device µs", "host µs", "limit µs"),
        tablefmt="pipe",
    )
    return points, {"copy_bandwidth_gbps": round(bandwidth / 1e9, 1), "input_sets": INPUT_SETS}, table


def _measure_rows(
    index: torch.Tensor,
    inputs: tuple[RowTensorSpec, ...],
    outputs: tuple[RowTensorSpec, ...],
    sources: list[dict[str, torch.Tensor]],
    tokens: int,
    generator: torch.Generator,
    bandwidth: float,
    hidden_size: int,
) -> list[Point]:
    rows, device = index.shape[0], index.device
    buffers = StaticBuffers(inputs, rows, device)
    targets = tuple(StaticBuffers(outputs, tokens, device).tensors.values())
    results = [tuple(_random_rows(outputs, rows, generator, device).values()) for _ in range(INPUT_SETS)]
    timings = time_arms(
        {
            "gather": lambda turn: gather_into(index, sources[turn % INPUT_SETS], buffers.tensors, rows),
            "scatter": lambda turn: scatter_into(index, results[turn % INPUT_SETS], targets),
        },
        device,
    )
    in_bytes, out_bytes = (sum(spec.row_bytes for spec in specs) for specs in (inputs, outputs))
    moved = {"gather": 2 * rows * in_bytes, "scatter": (rows + tokens) * out_bytes}
    return [_point(op, timings[op], rows, tokens, hidden_size, moved[op], bandwidth) for op in ("gather", "scatter")]


def _point(op: str, timing: Timing, rows: int, tokens: int, hidden_size: int, nbytes: int, bandwidth: float) -> Point:
    return {
        "op": op,
        "arm": "reference",
        "rows": rows,
        "tokens": tokens,
        "hidden_size": hidden_size,
        "device_us": timing.device_us,
        "host_us": timing.host_us,
        "p10": timing.p10,
        "p90": timing.p90,
        "n": timing.n,
        "bytes": nbytes,
        "limit_us": round(nbytes / bandwidth * 1e6, 2),
    }


def _random_rows(
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
