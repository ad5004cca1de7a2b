"""How long one arm takes against another for a prefill of any settings: measured where it was, modelled elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import attrs
import numpy as np

from replay_sim.batch.dispatch import CudagraphMode, StepRecord, dispatch_step
from replay_sim.batch.request import Batch
from replay_sim.config.shapes import SHAPES, DecoderShape
from replay_sim.measure.records import Point, Record
from replay_sim.measure.step_arms import ARMS, ONE_LAUNCH_ARM, Arm, RigSpec
from replay_sim.measure.step_case import case_of_record, long_context
from replay_sim.measure.step_model import Prediction, StepModel
from replay_sim.measure.step_sweeps import GPU_GRID, equal_lengths, prefill, rig_spec

ARM_BY_NAME = {arm.name: arm for arm in ARMS}
PREFILL_ARMS = tuple(arm.name for arm in ARMS if arm.mode is not CudagraphMode.FULL)
"""The arms that a prefill may take; FULL graphs are for uniform decodes."""


class CellKind(Enum):
    """Where a cell's number comes from."""

    MEASURED = "measured"
    MODELLED = "modelled"
    OUTSIDE = "modelled outside of what was measured"
    NONE = "no number"


@attrs.frozen(kw_only=True)
class PrefillSettings:
    """A prefill: `prompt_tokens` of `num_reqs` prompts together, in steps of at most `max_num_batched_tokens`.

    Prompts are of equal length, and a step takes as many tokens of each.
    """

    window: int
    num_reqs: int
    max_num_batched_tokens: int
    prompt_tokens: int
    num_local_experts: int

    @property
    def is_one_step(self) -> bool:
        """Whether the budget holds all tokens."""
        return -(-self.prompt_tokens // self.num_reqs) <= self.max_num_batched_tokens // self.num_reqs


@attrs.frozen(kw_only=True)
class Cell:
    """What one arm takes of another's time; `ratio`, `arm_us` and `base_us` are None where there is no number.

    `source` says where it comes from or why there is none; a measured ratio is the median over its runs.
    """

    settings: PrefillSettings
    kind: CellKind
    ratio: float | None = None
    arm_us: float | None = None
    base_us: float | None = None
    source: str


@attrs.frozen
class MeasuredTime:
    """A median of one run, microseconds, and the file of its record."""

    us: float
    run: str


@attrs.frozen
class ModelledTime:
    """Modelled microseconds of a prefill, why the model was asked outside, and the median error of its worst step.

    `outside` and `error` are None where there is none.
    """

    us: float
    outside: str | None
    error: float | None


class SpeedupCells:
    """Cells from `steps` and `prefill` records and a step-time model, None where there is none yet.

    Measured points of other GPUs than `gpu` are left out. Predictions are kept, so that a second look costs nothing.
    """

    def __init__(self, records: Iterable[tuple[str, Record]], model: StepModel | None, gpu: str) -> None:
        self.model = model
        self._measured: dict[tuple[PrefillSettings, str], list[MeasuredTime]] = defaultdict(list)
        self._live: list[str] = []
        self._predictions: dict[tuple[DecoderShape, str, StepRecord, int], Prediction] = {}
        kept = [
            (name, record)
            for name, record in records
            if record.environment["gpu"] == gpu and record.kind in ("steps", "prefill")
        ]
        for name, record in kept:
            self._take(record.points, name)
        where = sorted({record.provenance for _, record in kept})
        self._recorded = f"{'; '.join(where)}; records {', '.join(sorted(name for name, _ in kept))}"

    @property
    def source(self) -> str:
        """Where all numbers come from: a caption."""
        parts = [self._recorded, *(f"measured by {run}" for run in self._live)]
        if self.model is not None:
            parts.append(f"cells without a dot {self.model.source}, each the sum of a prefill's steps")
        return "; ".join(parts)

    def add_live(self, points: Sequence[Point], run: str) -> None:
        """Take over what was just measured; it stands before the records wherever it has both arms."""
        self._live.append(run)
        self._take(points, run)

    def _take(self, points: Sequence[Point], run: str) -> None:
        """The points of one run that are prompts from their start, of equal length; others are passed over."""
        for point in points:
            settings = _settings_of(point)
            if settings is not None:
                us = point["step_us"] if "step_us" in point else point["prefill_us"]
                assert isinstance(us, int | float)
                self._measured[settings, str(point["arm"])].append(MeasuredTime(us, run))

    def cell(self, settings: PrefillSettings, arm: str, base: str) -> Cell:
        """Measured if one run has both arms; else modelled."""
        key = _one_budget(settings)
        ours, theirs = ({one.run: one.us for one in self._measured.get((key, name), ())} for name in (arm, base))
        runs = sorted(ours.keys() & theirs.keys())
        runs = [run for run in runs if run in self._live] or runs
        if runs:
            ratios = [ours[run] / theirs[run] for run in runs]
            middle = runs[int(np.argsort(ratios)[(len(runs) - 1) // 2])]
            spread = f", {min(ratios):.1%} to {max(ratios):.1%} over {len(runs)} runs" if len(runs) > 1 else ""
            return Cell(
                settings=settings,
                kind=CellKind.MEASURED,
                ratio=ours[middle] / theirs[middle],
                arm_us=ours[middle],
                base_us=theirs[middle],
                source=f"measured, {middle}{spread}",
            )
        return self._modelled(settings, arm, base)

    def _modelled(self, settings: PrefillSettings, arm: str, base: str) -> Cell:
        refusal = refused(settings, arm) or refused(settings, base)
        if refusal or self.model is None:
            reason = refusal or "not measured, and no step-time model is bundled"
            return Cell(settings=settings, kind=CellKind.NONE, source=reason)
        ours, theirs = (self.predicted(settings, name) for name in (arm, base))
        why = ours.outside or theirs.outside
        errors = [one.error for one in (ours, theirs) if one.error is not None]
        error = f"; step time is off by {max(errors):.1%} (median of such steps)" if errors else ""
        return Cell(
            settings=settings,
            kind=CellKind.OUTSIDE if why else CellKind.MODELLED,
            ratio=ours.us / theirs.us,
            arm_us=ours.us,
            base_us=theirs.us,
            source=f"modelled outside of what was measured: {why}" if why else f"modelled{error}",
        )

    def predicted(self, settings: PrefillSettings, name: str) -> ModelledTime:
        """The sum of a prefill's modelled steps as the arm; raises ValueError if there is no model."""
        if self.model is None:
            raise ValueError("no step-time model is bundled")
        shape = shape_of(settings, self.model.shape)
        total, outside, errors = 0.0, None, []
        for record, computed, is_arm, count in dispatched_steps(settings, name):
            key = shape, name if is_arm else "", record, computed
            if key not in self._predictions:
                case = case_of_record(record, computed, one_launch=is_arm and name == ONE_LAUNCH_ARM)
                self._predictions[key] = self.model.predict(shape, case)
            prediction = self._predictions[key]
            total += count * prediction.step_us
            outside = outside or prediction.outside
            errors += [prediction.error.median] if prediction.error else []
        return ModelledTime(total, outside, max(errors, default=None))


def shape_of(settings: PrefillSettings, model: str) -> DecoderShape:
    """The decoder of this name with the settings' window and experts of a rank."""
    return attrs.evolve(SHAPES[model], window=settings.window, num_local_experts=settings.num_local_experts)


def refused(settings: PrefillSettings, arm: str) -> str:
    """Why a prefill cannot run so at all, in a sentence; empty if it can."""
    reqs = settings.num_reqs
    if settings.prompt_tokens < reqs:
        return f"{settings.prompt_tokens} tokens are fewer than the {reqs} requests"
    if settings.max_num_batched_tokens < reqs:
        return f"a step of {settings.max_num_batched_tokens} tokens is smaller than its {reqs} requests"
    if not any(is_arm for _, _, is_arm, _ in dispatched_steps(settings, arm)):
        return f"arm {arm} does not apply: no step of this prefill breaks for replay in it"
    return ""


def dispatched_steps(settings: PrefillSettings, name: str) -> Iterator[tuple[StepRecord, int, bool, int]]:
    """The steps of a prefill as the arm runs them: record, tokens computed before, whether as the arm, and how many.

    A step to which the arm does not apply, such as a short last chunk, runs as the arm does without replay. Steps
    beyond the context that all rows can see are alike and come once, with their count.
    """
    arm = ARM_BY_NAME[name]
    most = settings.max_num_batched_tokens // settings.num_reqs
    lengths = equal_lengths(settings.prompt_tokens, settings.num_reqs)
    far = long_context(shape_of(settings, "flash-rank"))
    steps: Counter[tuple[tuple[int, ...], int]] = Counter()
    for start in range(0, max(lengths), most):
        chunk = tuple(min(most, length - start) for length in lengths if length > start)
        steps[chunk, min(start, far)] += 1
    plan_spec = _spec(settings)
    for (chunk, computed), count in steps.items():
        batch = prefill(chunk, computed)
        record = _dispatch(arm, batch, plan_spec)
        is_arm = (record.mode, record.replay_mode) == (arm.mode, arm.replay_mode)
        off = attrs.evolve(arm, replay_mode=None)
        yield (record if is_arm else _dispatch(off, batch, plan_spec)), computed, is_arm, count


def _spec(settings: PrefillSettings) -> RigSpec:
    """The sizes that the sweeps capture, and the token budget."""
    spec = rig_spec(GPU_GRID, SHAPES["flash-rank"])
    budget = max(settings.max_num_batched_tokens, spec.max_num_batched_tokens)
    return attrs.evolve(
        spec,
        window=settings.window,
        num_local_experts=settings.num_local_experts,
        model_sizes=tuple(sorted({*spec.model_sizes, budget})),
        replay_sizes=tuple(sorted({*spec.replay_sizes, settings.window})),
        max_num_seqs=max(settings.num_reqs, spec.max_num_seqs),
        max_num_batched_tokens=budget,
    )


def _dispatch(arm: Arm, batch: Batch, spec: RigSpec) -> StepRecord:
    """The step as the arm runs it, every planned size captured."""
    plan, replay = spec.plan(), arm.replay_mode is not None
    sizes = plan.breaking_sizes if replay else plan.model_sizes
    return dispatch_step(
        batch,
        plan if replay else attrs.evolve(plan, trim_threshold=None, replay_sizes=()),
        model_sizes=sizes if arm.mode is CudagraphMode.PIECEWISE else (),
        full_sizes=(),
        replay_sizes=plan.replay_sizes if arm.replay_mode is CudagraphMode.PIECEWISE else (),
        replay=replay,
    )


def _settings_of(point: Point) -> PrefillSettings | None:
    """The prefill that a point measured; None if it is no prefill of equal prompts from their start."""
    values = {key: point[key] for key in ("window", "num_local_experts", "max_num_batched_tokens")}
    if "prefill_us" in point:
        values |= {"num_reqs": 1, "prompt_tokens": point["prompt_tokens"]}
    elif "step_us" not in point or "computed" not in point or point["computed"] or point["num_decodes"]:
        return None
    elif point["longest_query"] != -(-int(point["num_tokens"]) // int(point["num_reqs"])):  # type: ignore[arg-type]
        return None
    else:
        values |= {"num_reqs": point["num_reqs"], "prompt_tokens": point["num_tokens"]}
    return _one_budget(PrefillSettings(**values))  # type: ignore[arg-type]


def _one_budget(settings: PrefillSettings) -> PrefillSettings:
    """The same prefill with the largest budget that changes nothing, so that all that run alike are one."""
    return attrs.evolve(settings, max_num_batched_tokens=1 << 30) if settings.is_one_step else settings
