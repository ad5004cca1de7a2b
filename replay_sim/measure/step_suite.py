"""The steps suite: one sweep at a time, each with records and a table of its own (issue 4)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from tabulate import tabulate

from replay_sim.capture import CaptureBackend
from replay_sim.config import DecoderShape, ServingConfig, preset_names
from replay_sim.measure.call_times import measure_calls
from replay_sim.measure.capture_times import capture_plans, measure_captures
from replay_sim.measure.held_out import choose_held_out
from replay_sim.measure.rates import launch_us, measure_rates, rate_settings
from replay_sim.measure.records import Point
from replay_sim.measure.step_arms import ARMS, Rigs
from replay_sim.measure.step_points import prefill_point, step_point
from replay_sim.measure.step_runs import Runs, collector_off
from replay_sim.measure.step_sweeps import CPU_GRID, GPU_GRID, STEP_SWEEPS, SweepPart
from replay_sim.progress import Progress

SWEEPS = (*STEP_SWEEPS, "layers", "capture")
"""All sweeps, in the order in which they run."""
ARM_NAMES = tuple(arm.name for arm in ARMS)


@attrs.frozen(kw_only=True)
class SweepResult:
    """What one sweep measured: points by kind of record, settings that they share, and a table in markdown."""

    points: dict[str, list[Point]]
    settings: dict[str, object]
    summary: str


class StepSuite:
    """Runs sweeps on one device, over runners that neighbouring sweeps share; rates are measured when it is made.

    Steps run as the `arms` of these names. The `capture` sweep varies the number of replay graphs of `config`.
    """

    def __init__(
        self,
        config: ServingConfig,
        shape: DecoderShape,
        backend: CaptureBackend,
        seed: int,
        arms: Sequence[str],
        progress: Progress,
    ) -> None:
        self.config, self.shape, self.backend = config, shape, backend
        self.seed, self.progress = seed, progress
        self.grid = GPU_GRID if backend.name == "cuda" else CPU_GRID
        self.rates = measure_rates(backend.device, seed)
        self._arms = arms
        self._rigs = Rigs(shape, backend, seed, [arm for arm in ARMS if arm.name in arms], progress)

    def run(self, sweep: str) -> SweepResult:
        """Run one sweep of SWEEPS; raises what its runners and captures raise, and ValueError if no arm ran a step."""
        settings = self._settings(sweep)
        if sweep in STEP_SWEEPS:
            parts = STEP_SWEEPS[sweep](self.grid, self.shape, self.seed)
            before = launch_us(self.backend.device)
            points, more = self._run_parts(sweep, parts)
            more |= {"launch_us_before": before, "launch_us_after": launch_us(self.backend.device)}
            return SweepResult(points=points, settings=settings | more, summary=_tables(points))
        self._rigs.free()
        if sweep == "layers":
            calls, summary = measure_calls(self.shape, self.backend, self.seed, self.rates, self.progress)
            return SweepResult(points={"calls": calls}, settings=settings, summary=summary)
        presets = preset_names() if self.backend.name == "cuda" else ()
        plans = capture_plans(self.config, presets)
        captures, summary = measure_captures(plans, self.shape, self.backend, self.seed, self.progress)
        return SweepResult(points={"capture": captures}, settings=settings | {"subject": "plans"}, summary=summary)

    def free(self) -> None:
        """Give the memory of the last runners back, also after a sweep that failed."""
        self._rigs.free()

    def _settings(self, sweep: str) -> dict[str, object]:
        shape = self.shape
        names = ("hidden_size", "num_layers", "cut", "num_experts", "num_experts_per_tok", "index_topk", "dtype")
        return {
            "subject": sweep,
            "model": shape.name,
            **{name: getattr(shape, name) for name in names},
            **rate_settings(self.rates),
        }

    def _run_parts(self, sweep: str, parts: Sequence[SweepPart]) -> tuple[dict[str, list[Point]], dict[str, object]]:
        batches = [one for part in parts for one in part.batches]
        sizes = sorted({size for part in parts for size in part.spec.model_sizes})
        held_out = iter(choose_held_out(sweep, [one.batch.num_tokens for one in batches], sizes, self.seed))
        points: dict[str, list[Point]] = {"steps": []}
        for part in parts:
            flags = [next(held_out) for _ in part.batches]
            self._run_part(sweep, part, flags, points)
        if not any(points.values()):
            raise ValueError(f"arm is {', '.join(self._arms)}: no step of sweep {sweep} runs so")
        spec = parts[0].spec
        return points, {
            "model_sizes": list(spec.model_sizes),
            "full_sizes": list(spec.full_sizes),
            "replay_sizes": list(spec.replay_sizes),
            "max_num_seqs": spec.max_num_seqs,
            "num_blocks": spec.num_blocks,
            "max_blocks": spec.max_blocks,
        }

    def _run_part(self, sweep: str, part: SweepPart, held_out: Sequence[bool], points: dict[str, list[Point]]) -> None:
        rig = self._rigs.rig(part.spec)
        runs = Runs(rig, self.seed)
        with collector_off():
            measured = runs.measure(part.batches, self.progress)
            for timed, of_batch, flag in zip(part.batches, measured, held_out, strict=True):
                points["steps"] += [
                    step_point(sweep, rig.shape, timed, one, self.rates, held_out=flag) for one in of_batch
                ]
            for prompt in self.progress(part.prompts, "prompts"):
                points.setdefault("prefill", []).extend(
                    prefill_point(prompt, rig.shape, one) for one in runs.time(prompt.chunks(), warm_up=False)
                )


def _tables(points: dict[str, list[Point]]) -> str:
    """Milliseconds of every arm side by side: a line a batch, and a line a prompt."""
    steps = ("window", "num_local_experts", "num_reqs", "num_decodes", "computed", "longest_query", "num_tokens")
    prompts = ("max_num_batched_tokens", "prompt_tokens")
    tables = [_table(points["steps"], steps, "step_us")]
    if "prefill" in points:
        tables.append(_table(points["prefill"], prompts, "prefill_us"))
    return "\n\n".join(tables)


def _table(points: Sequence[Point], about: Sequence[str], time: str) -> str:
    lines: dict[tuple[object, ...], dict[str, float]] = {}
    for point in points:
        line = lines.setdefault(tuple(point[key] for key in about), {})
        line[str(point["arm"])] = float(np.round(float(point[time] or 0) / 1e3, 2))
    arms = [arm.name for arm in ARMS if any(arm.name in line for line in lines.values())]
    rows = [[*key, *(line.get(arm) for arm in arms)] for key, line in lines.items()]
    return tabulate(rows, (*about, *(f"{arm} ms" for arm in arms)), tablefmt="pipe")
