"""Step time with and without the break by tokens, measured where the counts were measured, modelled elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
import pandas as pd

from replay_sim.config.shapes import SHAPES
from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.speedup_cells import CellKind, PrefillSettings, SpeedupCells, refused
from replay_sim.measure.records import Record
from replay_sim.measure.step_model import StepModel
from replay_sim.measure.step_sweeps import GPU_GRID
from replay_sim.measure.trim_curve import (
    PAIRS,
    Crossing,
    CurveKey,
    ThresholdCosts,
    TrimCurve,
    crossing,
    threshold_costs,
    trim_curves,
)
from replay_sim.measure.trim_model import modelled_crossings
from replay_sim.workload.profiles import load_profile

LEAST_COUNTS = 5
"""Token counts from which on measured points are a curve; fewer stand as dots beside a modelled one."""
SIZES = GPU_GRID.sizes
"""The model graphs' sizes that can break."""
LARGEST_UNBROKEN = GPU_GRID.small_sizes[-1]
EVERY_SIZE = "each size once"
PUBLISHED_THRESHOLD = 768
"""The engine's default."""
MEDIAN_TO_DEVIATION = 1 / 0.6745
"""The standard deviation of a normal error, over the median of its absolute value."""


@attrs.frozen(eq=False)
class ShownCurve:
    """A curve, where it comes from, where its break begins to pay, and the points that were measured if it is modelled.

    `source` is a caption; it holds why the model was asked outside of what it saw, if it was.
    """

    curve: TrimCurve
    kind: CellKind
    source: str
    crossing: Crossing
    dots: TrimCurve | None

    @property
    def verdict(self) -> str:
        """From where on the break pays, in words."""
        is_measured = self.kind is CellKind.MEASURED
        return self.crossing.text if is_measured else self.crossing.text.replace("measured", "modelled")


class ThresholdCurves:
    """The curves of one GPU's `steps` records, and of a step-time model where too few counts were measured.

    Modelled curves have the sizes of the sweeps' grid, and one token more than each.
    """

    def __init__(self, records: Iterable[tuple[str, Record]], model: StepModel | None, gpu: str) -> None:
        named = [(name, one) for name, one in records if one.kind == "steps" and one.environment["gpu"] == gpu]
        self.model = model
        self.measured = {curve.key: curve for curve in trim_curves(p for _, one in named for p in one.points)}
        where = sorted({one.provenance for _, one in named})
        names = [name for name, one in named if any(point["sweep"] in ("threshold", "experts") for point in one.points)]
        self.source = f"{'; '.join(where)}; {', '.join(sorted(names))}"
        self._cells = SpeedupCells((), model, gpu)
        self._shown: dict[CurveKey, ShownCurve] = {}

    def shown(self, key: CurveKey) -> ShownCurve | str:
        """The curve of a key, or why there is none, in a sentence."""
        if key not in self._shown:
            made = self._make(key)
            if isinstance(made, str):
                return made
            self._shown[key] = made
        return self._shown[key]

    def _make(self, key: CurveKey) -> ShownCurve | str:
        measured = self.measured.get(key)
        if measured is not None and (self.model is None or len(measured.num_tokens) >= LEAST_COUNTS):
            return ShownCurve(measured, CellKind.MEASURED, self.source, crossing(measured), None)
        if self.model is None:
            return "not measured, and no step-time model is bundled"
        return self._modelled(key, measured)

    def _modelled(self, key: CurveKey, dots: TrimCurve | None) -> ShownCurve | str:
        assert self.model is not None
        counts = [tokens for tokens in _counts(key) if not refused(_settings(key, tokens), key.arm)]
        if len(counts) < 2:
            return f"with {key.num_reqs} requests of window {key.window} no step here breaks for replay"
        times, errors, reasons = [], [], set()
        for tokens in counts:
            settings = _settings(key, tokens)
            both = [self._cells.predicted(settings, name) for name in (PAIRS[key.arm], key.arm)]
            times.append([one.us for one in both])
            errors.append([one.us * self._deviation(one.error) for one in both])
            reasons |= {one.outside for one in both if one.outside}
        without, with_ = np.array(times).T
        padded = counts if not key.in_graphs else [min(size for size in SIZES if size >= count) for count in counts]
        curve = TrimCurve(key, np.array(counts), np.array(padded), without, with_, np.array(errors))
        source = f"{self.model.source}; its band takes errors as independent"
        if reasons:
            source += f"; asked outside of what it saw: {min(reasons)}"
        kind = CellKind.OUTSIDE if reasons else CellKind.MODELLED
        return ShownCurve(curve, kind, source, crossing(curve), dots)

    def _deviation(self, error: float | None) -> float:
        """The standard deviation of a relative error whose median is this, or that of all steps."""
        assert self.model is not None
        return (self.model.errors["all"].median if error is None else error) * MEDIAN_TO_DEVIATION


def curve_key(arm: str, *, window: int = 128, num_reqs: int = 1, num_local_experts: int = 48) -> CurveKey:
    """The key of a curve of equal requests."""
    return CurveKey(arm, window, num_local_experts, num_reqs, True)


def step_histogram(lengths: str, num_reqs: int, window: int) -> dict[int, float]:
    """Steps by token count: `num_reqs` equal prompts a step, in chunks of the largest size, shared evenly.

    `lengths` is EVERY_SIZE or the bundled profile whose prompt lengths are taken, each quantile by the share of prompts
    that it stands for. Steps of at most `window` tokens are left out: no threshold concerns them.
    """
    if lengths == EVERY_SIZE:
        return {size: 1.0 for size in SIZES if size > window}
    profile, chunk = load_profile(lengths), SIZES[-1] // num_reqs
    steps: Counter[int] = Counter()
    shares = np.diff(profile.probabilities, prepend=0.0)
    for tokens, share in zip(profile.prompt_tokens, shares, strict=True):
        chunks, rest = divmod(tokens, chunk)
        steps[chunk * num_reqs] += chunks * share
        steps[rest * num_reqs] += share
    return {count: weight for count, weight in steps.items() if count > window and weight > 0}


def costs_of(shown: ShownCurve, histogram: Mapping[int, float]) -> ThresholdCosts:
    """What each threshold costs on these steps; raises what `threshold_costs` raises."""
    return threshold_costs(shown.curve, histogram)


def crossing_table(curves: ThresholdCurves, keys: Sequence[CurveKey], threshold: int) -> pd.DataFrame:
    """A line for each curve: where the break begins to pay, in tokens and over the rows that are kept, and what a
    threshold costs against the best when each size is as frequent as the others.
    """
    rows = []
    for key in keys:
        shown = curves.shown(key)
        if isinstance(shown, str):
            continue
        costs = costs_of(shown, step_histogram(EVERY_SIZE, key.num_reqs, key.window))
        found = shown.crossing
        rows.append(
            {
                "arm": key.arm,
                "window": key.window,
                "experts": key.num_local_experts,
                "requests": key.num_reqs,
                "from": shown.kind.value,
                "the break": shown.verdict.replace("5th to 95th percentile ", "").replace(" step measured on", " step"),
                "crossing / (requests × window)": round(found.tokens / (key.num_reqs * key.window), 2),
                "best threshold": costs.best,
                f"{threshold} costs more, %": round(100 * costs.regret(threshold), 1),
            }
        )
    return pd.DataFrame(rows)


def crossings_by_host(model: StepModel | None, num_local_experts: int, launch_us: Sequence[float]) -> pd.DataFrame:
    """Modelled tokens from which on the break of one request pays, an arm a line; empty where there is no model.

    A column for each speed of the host, said as what one small launch costs it.
    """
    if model is None:
        return pd.DataFrame()
    shape = attrs.evolve(SHAPES[model.shape], num_local_experts=num_local_experts)
    tokens = _counts(curve_key("piecewise_replay_graphs", window=shape.window))
    found = {arm: modelled_crossings(model, shape, arm, tokens, launch_us) for arm in PAIRS}
    rows = {arm: [round(at) if np.isfinite(at) else None for at in crossings] for arm, crossings in found.items()}
    columns = [f"{speed:g} µs a launch" for speed in launch_us]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("arm")


def arm_names(arm: str) -> tuple[str, str]:
    """The labels of the arm without the break and of the arm with it."""
    return ARM_LOOKS[PAIRS[arm]].label, ARM_LOOKS[arm].label


def _counts(key: CurveKey) -> list[int]:
    """Each size and one token more, above the window and the sizes that do not break, and within the largest."""
    counts = {count for size in (key.window, LARGEST_UNBROKEN, *SIZES) for count in (size, size + 1)}
    return sorted(count for count in counts if max(key.window, LARGEST_UNBROKEN, key.num_reqs) < count <= SIZES[-1])


def _settings(key: CurveKey, tokens: int) -> PrefillSettings:
    return PrefillSettings(
        window=key.window,
        num_reqs=key.num_reqs,
        max_num_batched_tokens=SIZES[-1],
        prompt_tokens=tokens,
        num_local_experts=key.num_local_experts,
    )
