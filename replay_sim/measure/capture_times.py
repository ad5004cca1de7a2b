"""Captures plans one after another and weighs them: the seconds and memory of model and replay graphs apart (O5)."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import attrs
from tabulate import tabulate

from replay_sim.capture import CaptureBackend
from replay_sim.config import DecoderShape, ServingConfig, load_config
from replay_sim.decoder.step import StepRunner
from replay_sim.decoder.weights import make_weights
from replay_sim.measure.records import Point
from replay_sim.measure.run_steps import CaptureGroup, capture_groups
from replay_sim.plan.capture_plan import CapturePlan, make_plan
from replay_sim.progress import Progress, no_progress
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for

MIB = 1 << 20
REPLAY_COUNTS = (4, 8, 16, 32)
"""Replay graphs of the plans that vary their number, evenly spaced up to the config's largest size."""


def capture_plans(config: ServingConfig, presets: Iterable[str]) -> dict[str, CapturePlan]:
    """The plans to capture by name: those of the presets that have replay graphs, and the config's with REPLAY_COUNTS.

    All have one model graph, their largest, whose free memory is what replay graphs reuse (O1): the `run` suite
    captures the model graphs of a whole plan.
    """
    plans = {}
    for name in presets:
        plan = make_plan(load_config(name))
        if plan.replay_sizes and name != "default":
            plans[name] = largest_model_graph(plan)
    whole = make_plan(config)
    largest = whole.largest_size
    for count in REPLAY_COUNTS:
        sizes = tuple(sorted({max(1, largest * index // count) for index in range(1, count + 1)}))
        plans[f"{len(sizes)} replay sizes"] = largest_model_graph(attrs.evolve(whole, replay_sizes=sizes))
    return plans


def largest_model_graph(plan: CapturePlan) -> CapturePlan:
    """The plan with its largest PIECEWISE graph as its only model graph."""
    return attrs.evolve(plan, model_sizes=plan.model_sizes[-1:], full_sizes=())


def measure_captures(
    plans: dict[str, CapturePlan],
    shape: DecoderShape,
    backend: CaptureBackend,
    seed: int,
    progress: Progress = no_progress,
) -> tuple[list[Point], str]:
    """Capture every plan in pools of its own, over one set of weights; points and a table.

    One small capture comes before, so that no plan's seconds hold the compilation of kernels.
    """
    few = attrs.evolve(shape, num_weight_sets=1)
    weights = make_weights(few, backend.device, seed)

    def captured(plan: CapturePlan) -> tuple[CaptureGroup, ...]:
        max_blocks = blocks_for(plan.largest_size, BLOCK_SIZE)
        runner = StepRunner(
            attrs.evolve(few, window=plan.window),
            plan,
            backend,
            num_blocks=max_blocks,
            max_blocks=max_blocks,
            block_size=BLOCK_SIZE,
            weights=weights,
        )
        return capture_groups(runner)

    first = next(iter(plans.values()))
    captured(attrs.evolve(first, replay_sizes=first.replay_sizes[:1]))
    points: list[Point] = []
    for name in progress(plans, "plans"):
        _free(backend)
        points += capture_points(name, captured(plans[name]))
    _free(backend)
    rows = [
        (p["plan"], p["group"], p["num_graphs"], p["seconds"], f"{int(str(p['reserved_bytes'])) / MIB:,.0f}")
        for p in points
    ]
    return points, tabulate(rows, ("plan", "group", "graphs", "seconds", "pool MiB"), tablefmt="pipe")


def capture_points(plan: str, groups: Sequence[CaptureGroup]) -> list[Point]:
    """The points of a `capture` record, one a group of graphs."""
    return [
        {
            "plan": plan,
            "group": group.group,
            "num_graphs": group.num_graphs,
            "num_segments": group.num_segments,
            "num_operations": group.num_operations,
            "seconds": round(group.seconds, 3),
            "reserved_bytes": group.pool_bytes,
            "plain_bytes": group.plain_bytes,
        }
        for group in groups
    ]


def _free(backend: CaptureBackend) -> None:
    """Frees the runner before, whose graphs lie in reference cycles."""
    backend.synchronize()
    gc.collect()
    backend.empty_cache()
