"""A model whose replay layers are row-wise functions and one eager break, so that any row's output is a formula."""

import contextlib

import torch
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.metadata import AttentionMetadata
from replay_sim.capture import eager_break
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.context import ForwardContext, ReplayBatch, get_forward_context
from replay_sim.replay.graphs import ReplayGraphs
from replay_sim.replay.layers import ReplayLayers, ReplaySpec
from replay_sim.replay.row_tensors import RowTensors, input_specs, output_specs
from replay_sim.replay.static_buffers import StaticBuffers

HIDDEN, STREAMS, WINDOW = 4, 2, 3
MODEL_ROWS, REPLAY_ROWS = 16, 8
KEY = "window"


@eager_break
def add_live_values(x: Tensor, out: Tensor, model: "FakeModel") -> None:
    """Stands for attention: reads this step's metadata; pad rows, which belong to no request, keep what they held."""
    metadata = get_forward_context().metadata[KEY]
    real = metadata.request_of_row.unsqueeze(1) >= 0
    out.copy_(torch.where(real, x + metadata.window_start.unsqueeze(1), out))
    model.break_rows.append(x.shape[0])


class FakeModel:
    """Replay layers over the seven inputs, and a record of what ran."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.float32, ids: torch.dtype = torch.int32
    ) -> None:
        self.device, self.dtype, self.ids = device, dtype, ids
        self.break_rows: list[int] = []
        self.layer_runs: list[dict[str, int | None]] = []
        self.kv_writes: list[int] = []

    def run_layers(self, inputs: RowTensors) -> tuple[Tensor, ...]:
        """hidden (T, hc, h) = residual + post_mix * (2 x + position + window start), pre (T, hc) = 3 pre_mix."""
        self.layer_runs.append({name: None if value is None else len(value) for name, value in inputs.items()})
        x = inputs["hidden_states"] * 2 + inputs["positions"].unsqueeze(1)
        out = torch.empty_like(x)
        add_live_values(x, out, self)
        hidden = inputs["residual"] + inputs["post_mix"] * out.unsqueeze(1)
        return hidden.to(self.dtype), inputs["pre_mix"] * 3

    def write_batch_kv(self, inputs: RowTensors) -> None:
        """Records how many rows were written."""
        self.kv_writes.append(len(inputs["hidden_states"]))

    def expected(self, inputs: RowTensors, row: int, window_start: int) -> tuple[list, list]:
        """The formula for one row, in plain Python."""
        x, position = inputs["hidden_states"][row].tolist(), int(inputs["positions"][row])
        residual, post = inputs["residual"][row].tolist(), inputs["post_mix"][row].flatten().tolist()
        out = [2 * value + position + window_start for value in x]
        hidden = [[r + post[s] * o for r, o in zip(residual[s], out, strict=True)] for s in range(STREAMS)]
        return hidden, [3 * value for value in inputs["pre_mix"][row].tolist()]

    def inputs(self, rows: int, seed: int = 0) -> dict[str, Tensor | None]:
        """Small whole numbers, on which every dtype computes exactly."""
        generator = torch.Generator().manual_seed(seed)
        specs = input_specs(HIDDEN, STREAMS, self.dtype, self.ids)
        drawn = [torch.randint(-4, 5, (rows, *spec.row_shape), generator=generator) for spec in specs]
        return {spec.name: value.to(self.device, spec.dtype) for spec, value in zip(specs, drawn, strict=True)}

    def buffers(self, rows: int = REPLAY_ROWS) -> StaticBuffers:
        return StaticBuffers(input_specs(HIDDEN, STREAMS, self.dtype, self.ids), rows, self.device)

    def layers(self, trim_threshold: int | None) -> ReplayLayers:
        outputs = BreakBuffers(output_specs(HIDDEN, STREAMS, self.dtype), MODEL_ROWS, self.device)
        spec = ReplaySpec(WINDOW, self.run_layers, self.write_batch_kv, (KEY,), KEY)
        return ReplayLayers(spec, self.buffers(), outputs, trim_threshold)

    def context(self, rows: int, padded: int, mode: CudagraphMode, start: int = 0, **state) -> ForwardContext:
        """A step of one request; real row i may attend from start + i on."""
        pads = padded - rows
        starts = torch.tensor([start + row for row in range(rows)] + [0] * pads, device=self.device)
        owner = torch.tensor([0] * rows + [-1] * pads, dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(starts, starts, owner, starts, owner.unsqueeze(0), 1)
        count = torch.tensor([rows], dtype=torch.int32, device=self.device)
        return ForwardContext(mode, rows, padded, {KEY: metadata}, count, **state)

    def replay_batch(self, rows: list[int], padded: int, mode: CudagraphMode, start: int = 0) -> ReplayBatch:
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        places = [rows.index(row) if row in rows else -1 for row in range(MODEL_ROWS)]
        return ReplayBatch(
            index,
            self.context(len(rows), padded, mode, start, first_layer_kv_written=True),
            torch.tensor(places, dtype=torch.int32, device=self.device),
        )

    def prepare(self, size: int) -> ReplayBatch:
        return self.replay_batch(list(range(size)), size, CudagraphMode.PIECEWISE)

    def graphs(self, place: dict, buffers: StaticBuffers, run_layers=None, prepare=None) -> ReplayGraphs:
        return ReplayGraphs(
            **place, buffers=buffers, run_layers=run_layers or self.run_layers, prepare=prepare or self.prepare
        )


@contextlib.contextmanager
def nothing_is_captured(backend):
    """Fails the test if a capture begins inside."""
    begin = backend.begin_segment

    def refuse(*_) -> None:
        raise AssertionError("a capture began while serving")

    backend.begin_segment = refuse
    try:
        yield
    finally:
        backend.begin_segment = begin
