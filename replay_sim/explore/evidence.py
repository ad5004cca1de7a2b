"""What a report stands on: a job beside the records of one GPU and the step-time model, each number worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs
import pandas as pd

from replay_sim.config import DecoderShape
from replay_sim.decoder.pool_prediction import PlanMemory
from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.job import Job
from replay_sim.explore.pool_map import recorded
from replay_sim.explore.pool_measured import CASES, ReservedCase, record_of, reserved_cases
from replay_sim.explore.speedup_cells import Cell, CellKind, PrefillSettings, SpeedupCells
from replay_sim.explore.threshold_curves import (
    EVERY_SIZE,
    SIZES,
    ShownCurve,
    ThresholdCurves,
    costs_of,
    crossing_table,
    curve_key,
    step_histogram,
)
from replay_sim.explore.tuning_costs import FittedCosts
from replay_sim.explore.tuning_score import Dispatched, dispatched
from replay_sim.explore.tuning_steps import is_full
from replay_sim.measure.records import Point, Record, bundled_records
from replay_sim.measure.step_model import StepModel, bundled_model
from replay_sim.measure.trim_curve import PAIRS, ThresholdCosts

BASE = "eager_off"
PROMPTS = tuple(1 << power for power in range(8, 18))
"""Tokens of the prompts whose step times are shown, as far as a step of the config holds them."""
REQUESTS = (1, 4, 16)
"""Prompts a step, in the table of crossings."""
NO_BREAK = 2 * SIZES[-1]
"""A threshold above every graph."""

_ABOUT = {"window": int, "num_local_experts": int, "max_num_batched_tokens": int}
_TIMES = {"p10": float, "p90": float, "n": int, "host_us": float, "launch_us": float}
_STEPS = {"sweep": str, "step_us": float, "num_tokens": int, "padded_tokens": int, "num_reqs": int}
_BATCHES = {"num_decodes": int, "computed": int, "longest_query": int, "limit_us": float}
DRAWN_KEYS: dict[str, Mapping[str, type]] = {
    "steps": {"arm": str, **_ABOUT, **_TIMES, **_STEPS, **_BATCHES},
    "prefill": {"arm": str, **_ABOUT, **_TIMES, "prompt_tokens": int, "num_steps": int, "prefill_us": float},
}
"""What points must hold to be drawn, numbers above 0 and up to MOST: records of others may lack some of it."""
MAY_BE_NONE = ("num_decodes", "computed")
MOST = 2**31


@attrs.frozen
class PromptTimes:
    """One prompt in one step: the config's replay arm against replay off, eager and in graphs.

    `graphs` is None where the arm is eager; `ran` is how the config itself runs it.
    """

    tokens: int
    eager: Cell
    graphs: Cell | None
    ran: Dispatched

    @property
    def replays(self) -> bool:
        """Whether the config runs it as the arm."""
        return self.ran.padded_rows > 0 and (self.ran.mode == "PIECEWISE") is (self.graphs is not None)


@attrs.frozen(eq=False)
class ThresholdEvidence:
    """The break's curve at the config's window, its crossing, and what thresholds cost on `steps`, said in words.

    `threshold` is the config's, or NO_BREAK where no graph of it breaks. `table` has a line for each of REQUESTS.
    """

    shown: ShownCurve
    costs: ThresholdCosts
    threshold: float
    steps: str
    source: str
    table: pd.DataFrame


@attrs.frozen(eq=False)
class PoolEvidence:
    """Pool bytes of every arrangement, predicted and, where `record` has this very plan, measured.

    `chosen` is the case in which the system captures.
    """

    memory: PlanMemory
    record: Record | None
    cases: tuple[ReservedCase, ...]
    chosen: ReservedCase


@attrs.frozen(eq=False)
class Evidence:
    """A job and all that its report says beside it.

    `drawn` are the steps and prefills of the GPU `gpu`, "" if no record has any; `left_out` says of which points could
    not be drawn, and `limits` what of the config was never measured, a sentence each. `model_source` is the caption of
    modelled numbers, with the model's error.
    """

    job: Job
    records: tuple[tuple[str, Record], ...]
    gpu: str
    drawn: tuple[tuple[str, Record], ...]
    left_out: tuple[str, ...]
    limits: tuple[str, ...]
    model: StepModel | None
    model_source: str
    arm: str
    prompts: tuple[PromptTimes, ...]
    threshold: ThresholdEvidence | str
    pool: PoolEvidence


def gather(job: Job, records: Iterable[tuple[str, Record]] | None = None) -> Evidence:
    """Work out everything for a report about `job`; `records` default to those in the package."""
    named = tuple(bundled_records() if records is None else records)
    usable, left_out = _drawable(named)
    gpu = _gpu(usable)
    drawn = tuple((name, one) for name, one in usable if one.environment["gpu"] == gpu)
    model = bundled_model()
    model_source = "no step-time model is bundled" if model is None else FittedCosts(model, job.config).source
    arm = replay_arm(job)
    cells = SpeedupCells(drawn, model, gpu)
    return Evidence(
        job=job,
        records=named,
        gpu=gpu,
        drawn=drawn,
        left_out=left_out,
        limits=tuple(_limits(job, drawn)),
        model=model,
        model_source=model_source,
        arm=arm,
        prompts=tuple(_prompt_times(job, arm, cells)),
        threshold=_threshold(job, arm, ThresholdCurves(drawn, model, gpu), model, model_source),
        pool=_pool(job, named),
    )


def replay_arm(job: Job) -> str:
    """The arm in which the config's prefills replay, or would if a graph of it broke (D1, D2)."""
    if max(job.plan.model_sizes, default=0) <= job.plan.window:
        return "eager_replay"
    return "piecewise_replay_graphs" if job.plan.replay_sizes else "piecewise_replay_eager"


def _drawable(records: Sequence[tuple[str, Record]]) -> tuple[list[tuple[str, Record]], tuple[str, ...]]:
    """Steps and prefills with the points that can be drawn, and how many points of which record cannot be."""
    usable, left_out = [], []
    for name, record in records:
        if record.kind not in DRAWN_KEYS or record.environment["gpu"] is None:
            continue
        points = [point for point in record.points if _is_drawable(point, DRAWN_KEYS[record.kind])]
        if points:
            usable.append((name, attrs.evolve(record, points=points)))
        if len(points) < len(record.points):
            missing = len(record.points) - len(points)
            left_out.append(f"{missing:,} of {len(record.points):,} points of {name} lack what figures show")
    return usable, tuple(left_out)


def _is_drawable(point: Point, keys: Mapping[str, type]) -> bool:
    def fits(key: str, kind: type) -> bool:
        value = point.get(key)
        if kind is str or isinstance(value, bool):
            return kind is str and isinstance(value, str)
        least = 0 if key in MAY_BE_NONE else 1e-9
        return isinstance(value, (int, float) if kind is float else int) and least <= value <= MOST

    return point["arm"] in ARM_LOOKS and all(fits(key, kind) for key, kind in keys.items())


def _gpu(records: Sequence[tuple[str, Record]]) -> str:
    """The GPU with the most points of steps; "" if there is none."""
    points: Counter[str] = Counter()
    for _, record in records:
        if record.kind == "steps":
            points[str(record.environment["gpu"])] += len(record.points)
    return min(points, key=lambda gpu: (-points[gpu], gpu), default="")


def _limits(job: Job, drawn: Sequence[tuple[str, Record]]) -> Iterable[str]:
    """What of the config no record has, so that its times are modelled or another model's."""
    shape: DecoderShape = job.shape
    if not drawn:
        yield "No record has steps of a GPU: nothing here was measured, and step times are modelled where they stand."
    windows = sorted({point["window"] for _, one in drawn for point in one.points if isinstance(point["window"], int)})
    if drawn and job.config.window not in windows:
        measured = ", ".join(f"{window:,}" for window in windows)
        yield f"Steps were measured at window {measured}; at this config's, {job.config.window:,}, they are modelled."
    if not job.config.model.endswith("DeepSeek-V4.1-Flash"):
        yield (
            f"Times and bytes are those of decoder {shape.name}, one rank's share of DeepSeek-V4.1-Flash, and not of "
            f"{job.config.model}: of another model trust the counts, and measure the times."
        )


def _prompt_times(job: Job, arm: str, cells: SpeedupCells) -> Iterable[PromptTimes]:
    """Prompts that exceed the window and that one step of the config holds."""
    for tokens in PROMPTS:
        if job.config.window < tokens <= job.config.max_num_batched_tokens:
            settings = PrefillSettings(
                window=job.config.window,
                num_reqs=1,
                max_num_batched_tokens=job.config.max_num_batched_tokens,
                prompt_tokens=tokens,
                num_local_experts=job.shape.num_local_experts,
            )
            off = PAIRS[arm]
            yield PromptTimes(
                tokens,
                cells.cell(settings, arm, BASE),
                None if off == BASE else cells.cell(settings, arm, off),
                dispatched((tokens, job.plan.window, False), job.plan),
            )


def _threshold(
    job: Job, arm: str, curves: ThresholdCurves, model: StepModel | None, model_source: str
) -> ThresholdEvidence | str:
    """The curve of one prompt a step, judged on the workload's own steps if the threshold concerns any."""
    experts, window = job.shape.num_local_experts, job.config.window
    shown = curves.shown(curve_key(arm, window=window, num_local_experts=experts))
    if isinstance(shown, str):
        return shown
    least, most = int(shown.curve.num_tokens[0]), job.config.max_num_batched_tokens
    if most < least:
        return f"a step of this config has at most {most:,} tokens, and the curve begins at {least:,}"
    threshold = job.plan.trim_threshold if job.plan.breaking_sizes else None
    drawn = NO_BREAK if threshold is None else threshold
    steps, words = _steps_of(job)
    try:
        costs = costs_of(shown, steps)
    except ValueError:
        words = EVERY_SIZE
        costs = costs_of(shown, step_histogram(EVERY_SIZE, 1, window))
    keys = [curve_key(arm, window=window, num_local_experts=experts, num_reqs=count) for count in REQUESTS]
    source = shown.source
    if shown.kind is not CellKind.MEASURED and model is not None:
        source = source.replace(model.source, model_source)
    return ThresholdEvidence(shown, costs, drawn, words, source, crossing_table(curves, keys, drawn))


def _steps_of(job: Job) -> tuple[dict[int, float], str]:
    """The workload's steps in PIECEWISE graphs above the window, by tokens, and what they are in words."""
    steps: Counter[int] = Counter()
    largest = max(job.plan.model_sizes, default=0)
    if not isinstance(job.tuned, str):
        for key, count in (job.tuned.seen + job.tuned.unseen).items():
            if job.plan.window < key[0] <= largest and not is_full(key, job.plan):
                steps[key[0]] += count
    words = f"this workload's {steps.total():,} steps in PIECEWISE graphs above the window, each taken as one prompt"
    return {tokens: float(count) for tokens, count in steps.items()}, words


def _pool(job: Job, records: Sequence[tuple[str, Record]]) -> PoolEvidence:
    memory = recorded(job.shape, job.plan)
    record = record_of(job.plan, job.shape, records)
    cases = reserved_cases(memory, record)
    usual = (memory.sharing.sharing.value, *CASES[0])
    chosen = next(case for case in cases if (case.arrangement, case.order, case.outputs) == usual)
    return PoolEvidence(memory, record, cases, chosen)
