"""Measures the replay region of a step, row metadata to scatter, in each form: host, device, and capture."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
import torch
from tabulate import tabulate

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import BreakableGraph, CaptureBackend, capture, warm_up
from replay_sim.config import DecoderShape, ServingConfig
from replay_sim.decoder.layer import DecoderLayer
from replay_sim.decoder.step import StepRunner
from replay_sim.decoder.weights import DecoderWeights
from replay_sim.measure.records import Point
from replay_sim.measure.row_movement import random_rows
from replay_sim.measure.timing import Timing, time_arms
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.capture_sizes import replay_capture_sizes
from replay_sim.replay.context import ForwardContext, ReplayBatch, use_forward_context
from replay_sim.replay.graphs import ReplayForm, ReplayGraphs
from replay_sim.replay.movement import gather_into, scatter_into
from replay_sim.replay.row_ops import gather_by_address, store_addresses

BLOCK_SIZE = 64
REQUEST_COUNTS = (1, 4, 8, 16, 32)
"""Requests of a step, each of which keeps a window of rows."""
FEW_EXPERTS = 8
REFERENCE, LAYERS, CONTROL = "reference", "layers", "a graph of one kernel"
MOVED = {form: f"{form} movement" for form in (REFERENCE, ReplayForm.ONE_LAUNCH.value)}


def region_plan(shape: DecoderShape, sizes: Sequence[int], tokens: int) -> CapturePlan:
    """Replay graphs of `sizes` beside one model graph of `tokens`, which sizes the break buffers."""
    return CapturePlan(
        window=shape.window,
        model_sizes=(tokens,),
        full_sizes=(),
        replay_sizes=tuple(sorted(sizes)),
        trim_threshold=shape.window + 1,
        max_num_seqs=max(1, tokens // shape.window),
        max_num_batched_tokens=tokens,
    )


def region_runner(
    shape: DecoderShape, plan: CapturePlan, backend: CaptureBackend, seed: int, weights: DecoderWeights | None = None
) -> StepRunner:
    """A runner whose cache holds one step of the plan's tokens, of one request or of many; nothing is captured yet."""
    blocks = -(-plan.max_num_batched_tokens // BLOCK_SIZE) + plan.max_num_seqs
    return StepRunner(
        attrs.evolve(shape, window=plan.window),
        plan,
        backend,
        num_blocks=blocks,
        max_blocks=blocks,
        block_size=BLOCK_SIZE,
        seed=seed,
        weights=weights,
    )


def region_sizes(shape: DecoderShape, backend: CaptureBackend) -> tuple[int, list[int]]:
    """The tokens of the steps that are measured, 8,192 on a GPU, and the rows that they keep."""
    tokens = 8192 if backend.name == "cuda" else max(512, 4 * shape.window)
    return tokens, [shape.window * count for count in REQUEST_COUNTS if shape.window * count <= tokens // 2]


def region_points(shape: DecoderShape, backend: CaptureBackend, seed: int) -> tuple[list[Point], list[Point], str]:
    """The points of `measure_region` and of `measure_forms`, and both as tables.

    The plan that is captured is the default of P2 up to the tokens. On a GPU the region is also that of FEW_EXPERTS
    experts a rank, where launches count most.
    """
    tokens, sizes = region_sizes(shape, backend)
    regions, weights = measure_region(shape, backend, seed, sizes, tokens)
    plan = ServingConfig(
        window=shape.window,
        max_num_batched_tokens=tokens,
        max_num_seqs=tokens // shape.window,
        max_cudagraph_capture_size=tokens,
    )
    planned = replay_capture_sizes(plan)[0] if backend.name == "cuda" else sizes
    captures = measure_forms(shape, backend, seed, planned, tokens, weights)
    del weights
    gc.collect()
    backend.empty_cache()
    if backend.name == "cuda":
        few = attrs.evolve(shape, num_local_experts=FEW_EXPERTS)
        regions += measure_region(few, backend, seed, sizes, tokens)[0]
    return regions, captures, region_table(regions) + "\n\n" + tabulate(captures, "keys", tablefmt="pipe")


class Region:
    """The replay region of one step of `tokens` tokens, all prefills, of which `size` rows are kept and none padded.

    `inputs` are a step's seven tensors, whose addresses stand in the table as a model graph would have left them.
    """

    def __init__(self, runner: StepRunner, graphs: dict[ReplayForm, ReplayGraphs], size: int, seed: int) -> None:
        self.runner, self.graphs, self.size = runner, graphs, size
        self.layers, device = runner.replay_layers, runner.backend.device
        tokens, count = runner.plan.max_num_batched_tokens, size // runner.plan.window
        self.batch = Batch([Request(tokens // count, 0, Phase.PREFILL) for _ in range(count)])
        lengths = -(-self.batch.seq_lens // BLOCK_SIZE)
        ends = lengths.cumsum()
        tables = [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]
        ids = np.arange(self.batch.num_tokens, dtype=np.int32) % runner.shape.vocab_size
        self.record = runner.dispatch(self.batch)
        self.step: ForwardContext = runner.contexts.build(self.batch, tables, ids, self.record)
        generator = torch.Generator(device).manual_seed(seed)
        self.inputs = random_rows(self.layers.inputs.specs, self.batch.num_tokens, generator, device)
        self.inputs["positions"].copy_(runner.contexts.batch.positions[: self.batch.num_tokens])
        store_addresses(self.layers.input_addresses, self.inputs)
        self.targets = tuple(torch.zeros_like(tensor) for tensor in self.layers.break_buffers.tensors.values())
        outputs = random_rows(self.layers.break_buffers.specs, size, generator, device)
        self.outputs = tuple(outputs.values())

    def replay_batch(self, form: ReplayForm = ReplayForm.BREAKABLE) -> ReplayBatch:
        """The row metadata, as a step makes it."""
        return self.runner.contexts.replay_batch(self.batch, self.size, self.size, CudagraphMode.PIECEWISE, form)

    def run(self, form: ReplayForm, turn: int = 0) -> None:
        """The region as a step runs it in its break.

        The step's forward context is made anew only where it holds another replay batch than before: that of one launch
        is the same at every step.
        """
        self.layers.graphs = self.graphs[form]
        step, batch = self.step, self.replay_batch(form)
        if step.replay_batch is not batch:
            step = self.step = ForwardContext(
                step.mode, step.num_tokens, step.padded_tokens, step.metadata, step.num_rows, batch
            )
        with use_forward_context(step):
            self.layers.run_into_break_buffers(self.inputs)

    def run_reference(self, turn: int = 0) -> None:
        """Breakable graphs with an operation a tensor for every movement, into targets of their own."""
        batch = self.replay_batch()
        with use_forward_context(batch.context):
            outputs = self.graphs[ReplayForm.BREAKABLE].run(batch.rows, self.inputs)
        scatter_into(batch.rows, outputs, self.targets)

    def move_reference(self, turn: int = 0) -> None:
        """What the reference does beside its layers, on outputs that stand."""
        batch = self.replay_batch()
        gather_into(batch.rows, self.inputs, self.layers.inputs.tensors, self.size)
        scatter_into(batch.rows, self.outputs, self.targets)

    def move_fused(self) -> None:
        """What a one-launch graph does beside its layers, on outputs that stand."""
        contexts, layers = self.runner.contexts, self.layers
        contexts.replay.write_captured(contexts.batch, self.size)
        buffers = tuple(layers.inputs.view(self.size).values())
        rows, num_rows = contexts.replay.rows, contexts.replay.num_rows
        gather_by_address(buffers, layers.input_addresses, rows, num_rows, self.size)
        layers.break_buffers.scatter(self.outputs, rows, num_rows, contexts.replay.output_row_of)

    @property
    def layers_of_graph(self) -> list[DecoderLayer]:
        """The replay layers, as the decoder has them."""
        return list(self.runner.decoder.layers[self.runner.shape.cut :])

    def run_layers(self) -> tuple[torch.Tensor, ...]:
        """The layers alone."""
        return self.layers.spec.run_layers(self.layers.inputs.view(self.size))

    def check(self) -> None:
        """Raises RuntimeError where the forms differ in a bit."""
        self.run_reference()
        for form in self.graphs:
            self.run(form)
            for target, other in zip(self.targets, self.layers.break_buffers.tensors.values(), strict=True):
                if not torch.equal(target.view(torch.uint8), other.view(torch.uint8)):
                    raise RuntimeError(f"{form.value}: {self.size} rows differ from the reference")

    def capture(self, function: Callable[[], object], name: str) -> BreakableGraph:
        """A graph of one segment."""
        runner = self.runner
        with use_forward_context(self.replay_batch().context):
            warm_up(function, runner.backend)
            return capture(
                function, backend=runner.backend, pool=runner.pool, stream=runner.stream, breaks_are_captured=True,
                name=name,
            )  # fmt: skip


def measure_region(
    shape: DecoderShape, backend: CaptureBackend, seed: int, sizes: Sequence[int], tokens: int
) -> tuple[list[Point], DecoderWeights]:
    """Points of each size and form, and the weights, for more runners; all forms of a size in one interleaved run.

    `host_us` is until the launching call returned, row metadata included, `control_us` that of a launch of a graph of
    one kernel in the same place: what is beyond it is the form's own. `device_us` is without waits for the host,
    `beyond_us` is the form's device time less that of the layers alone in one graph, `moved_us` that of its movement
    and metadata alone, without any layer: the small difference of large times is checked by it.
    """
    runner = region_runner(shape, region_plan(shape, sizes, tokens), backend, seed)
    graphs = {}
    for form in ReplayForm:
        runner.use_replay_form(form)
        runner.capture_replay_graphs()
        graphs[form] = runner.replay_graphs
    points: list[Point] = []
    with backend.on_stream(runner.stream), torch.no_grad():
        for size in sizes:
            region = Region(runner, graphs, size, seed)
            region.check()
            points += _points(region, _time(region))
    return points, runner.decoder.weights


def _time(region: Region) -> dict[str, Timing]:
    layers = region.capture(region.run_layers, LAYERS)
    moved = region.capture(region.move_fused, MOVED[ReplayForm.ONE_LAUNCH.value])
    one = torch.zeros(1, device=region.runner.backend.device)
    control = region.capture(lambda: one.add_(1), CONTROL)
    arms: dict[str, Callable[[int], object]] = {
        REFERENCE: region.run_reference,
        **{form.value: partial(region.run, form) for form in ReplayForm},
        LAYERS: partial(replay, layers),
        CONTROL: partial(replay, control),
        MOVED[REFERENCE]: region.move_reference,
        MOVED[ReplayForm.ONE_LAUNCH.value]: partial(replay, moved),
    }
    return time_arms(arms, region.runner.backend.device)


def replay(graph: BreakableGraph, turn: int) -> None:
    """Replay a graph as an arm that is timed."""
    graph.replay()


def _points(region: Region, timings: dict[str, Timing]) -> list[Point]:
    layers, control, shape = timings[LAYERS], timings[CONTROL], region.runner.shape
    points: list[Point] = []
    for form in (REFERENCE, *(form.value for form in ReplayForm)):
        graphs = region.graphs[ReplayForm.BREAKABLE if form == REFERENCE else ReplayForm(form)]
        moved = timings.get(MOVED.get(form, ""))
        about: Point = {
            "form": form,
            "rows": region.size,
            "tokens": region.batch.num_tokens,
            "num_reqs": region.batch.num_reqs,
            "num_replay_layers": shape.num_replay_layers,
            "num_local_experts": shape.num_local_experts,
            "graph_launches": len(graphs.graphs[graphs.sizes.index(region.size)].segments),
            "control_us": control.host_us,
            "control_p10": control.host_p10,
            "layers_us": layers.device_us,
            "beyond_us": round(timings[form].device_us - layers.device_us, 2),
            "moved_us": None if moved is None else moved.device_us,
        }
        points.append(about | attrs.asdict(timings[form]))
    return points


def region_notes(points: Sequence[Point]) -> list[str]:
    """A sentence for each one-launch point: what the host spends beside a bare launch in the same place."""
    return [
        f"one launch, {p['rows']} rows, {p['num_local_experts']} experts a rank: the host spends {p['host_us']} µs "
        f"(p10 {p['host_p10']}), where the launch of a graph of one kernel takes {p['control_us']} "
        f"(p10 {p['control_p10']})"
        for p in points
        if p["form"] == ReplayForm.ONE_LAUNCH.value
    ]


def region_table(points: Sequence[Point]) -> str:
    """The points of `measure_region` as a table."""
    columns = (
        "num_local_experts", "rows", "form", "graph_launches", "host_us", "host_p10", "control_us", "control_p10",
        "device_us", "layers_us", "beyond_us",
        "moved_us",
    )  # fmt: skip
    return tabulate([[point[key] for key in columns] for point in points], columns, tablefmt="pipe")


def measure_forms(
    shape: DecoderShape, backend: CaptureBackend, seed: int, sizes: Sequence[int], tokens: int, weights: DecoderWeights
) -> list[Point]:
    """Seconds and bytes to capture the replay graphs of `sizes`, each form in a pool of its own.

    Breakable graphs are also captured with a collection of garbage before each size (`freezes` one a size), as it is
    where sizes are captured one by one. Kernels are compiled before, by a first capture of the smallest size.
    """
    points: list[Point] = []
    cases = ((ReplayForm.BREAKABLE, "size"), (ReplayForm.BREAKABLE, "group"), (ReplayForm.ONE_LAUNCH, "group"))
    for form, freeze in cases:
        runner = region_runner(shape, region_plan(shape, sizes, tokens), backend, seed, weights)
        runner.use_replay_form(form)
        graphs, order = runner.replay_graphs, sorted(sizes, reverse=True)
        _weigh(runner)
        warm = region_runner(shape, region_plan(shape, sizes[:1], tokens), backend, seed, weights)
        warm.use_replay_form(form)
        warm.capture_replay_graphs()
        del warm
        gc.collect()
        before, began = _weigh(runner), time.perf_counter()
        for group in [[size] for size in order] if freeze == "size" else [order]:
            graphs.capture(group)
        backend.synchronize()
        seconds = time.perf_counter() - began
        grown = [now - then for now, then in zip(_weigh(runner), before, strict=True)]
        points.append(
            {
                "plan": f"{len(order)} sizes to {order[0]}",
                "form": form.value,
                "one_freeze_a": freeze,
                "num_graphs": len(graphs.graphs),
                "num_segments": sum(len(graph.segments) for graph in graphs.graphs),
                "num_operations": sum(graph.num_operations for graph in graphs.graphs),
                "seconds": round(seconds, 3),
                "reserved_bytes": grown[0],
                "plain_bytes": grown[1],
                "driver_bytes": grown[2],
            }
        )
        del runner, graphs
        gc.collect()
    return points


def _weigh(runner: StepRunner) -> tuple[int, int, int]:
    """Bytes in the runner's pools, outside of them, and taken from the driver."""
    backend = runner.backend
    backend.synchronize()
    backend.empty_cache()
    pools = sum(backend.reserved_bytes(pool) for pool in runner.pools)
    free, total = torch.cuda.mem_get_info() if backend.name == "cuda" else (0, 0)
    return pools, backend.reserved_bytes() - pools, total - free
