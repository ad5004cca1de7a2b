"""Step costs for tuning, from the fitted step-time model: kept by size, with its error, and where it is a guess."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import attrs

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, StepRecord
from replay_sim.config import FLASH_RANK, DecoderShape, ServingConfig
from replay_sim.explore.tuning_score import Dispatched, dispatched, step_us
from replay_sim.explore.tuning_steps import StepCounts, StepKey
from replay_sim.measure import step_costs, step_model
from replay_sim.measure.step_case import StepCase, long_context
from replay_sim.measure.step_model import HOST_BOUND, arm_of, compared
from replay_sim.plan.capture_plan import CapturePlan

TILE = 64
"""Rows of the smallest tiles: eager costs are worked out at the first and the last of as many, straight between."""


class FittedCosts:
    """The fitted model's costs on the measured decoder with the window of a config, by mode's name (StepCosts).

    Graphs are costed at their sizes. Eager runs are asked for at every count of a workload, so that between the ends
    of a tile their costs are taken from the straight line.
    """

    def __init__(self, model: step_model.StepModel, config: ServingConfig) -> None:
        self._costs = step_costs.StepCosts(model, attrs.evolve(FLASH_RANK, window=config.window))
        self._model_us: dict[tuple[int, str, bool], float] = {}
        self._replay_us: dict[tuple[int, bool], float] = {}

    @property
    def source(self) -> str:
        """What the model was fitted to, and its error on points that were held out."""
        error = self._costs.model.errors.get("all")
        if error is None:
            return self._costs.source
        words = (
            f"{self._costs.source}; off by {error.median:.1%} (median) and {error.p95:.1%} (p95) on {error.n} others"
        )
        slow = self._costs.model.errors.get(HOST_BOUND)
        return (
            words if slow is None else f"{words}, by {slow.median:.1%} and {slow.p95:.1%} where the host is the bound"
        )

    @property
    def error(self) -> float | None:
        """The median of all held-out points; None if there are none."""
        error = self._costs.model.errors.get("all")
        return None if error is None else error.median

    def model_us(self, padded_tokens: int, mode: str, breaks: bool) -> float:
        """As the protocol says; at least 0."""
        key = padded_tokens, mode, breaks
        if key not in self._model_us:
            if mode == "NONE":
                us = _on_line(padded_tokens, lambda at: self._costs.model_us(at, CudagraphMode.NONE, breaks))
            else:
                us = self._costs.model_us(padded_tokens, CudagraphMode(mode), breaks)
            self._model_us[key] = max(0.0, us)
        return self._model_us[key]

    def replay_us(self, padded_rows: int, graph: bool) -> float:
        """As the protocol says; at least 0."""
        key = padded_rows, graph
        if key not in self._replay_us:
            if graph:
                us = self._costs.replay_us(padded_rows, True)
            else:
                us = _on_line(padded_rows, lambda at: self._costs.replay_us(at, False))
            self._replay_us[key] = max(0.0, us)
        return self._replay_us[key]

    def seconds(self, record: StepRecord) -> float:
        """Seconds of a dispatched step as the sum of its parts, as a plan is scored; 0 for an empty one."""
        if not record.num_tokens:
            return 0.0
        us = self.model_us(record.padded_tokens, record.mode.value, record.has_replay_batch)
        if record.has_replay_batch:
            us += self.replay_us(record.padded_rows, record.replay_mode is CudagraphMode.PIECEWISE)
        return us / 1e6

    def outside(self, key: StepKey, ran: Dispatched, plan: CapturePlan) -> str | None:
        """Why the model never saw a step like this counted one, dispatched under `plan`; None if it did."""
        shape = self._costs.shape
        return _outside(shape, _case(key, ran, plan, long_context(shape)), self._costs.model.domain)

    def guesses(self, plan: CapturePlan, counts: StepCounts) -> tuple[str, ...]:
        """Which of the counted steps the model is extrapolated to, a sentence a reason, the most steps first.

        Of a step that is outside in several ways the first is said.
        """
        steps: Counter[str] = Counter()
        us: dict[str, float] = {}
        total_us = 0.0
        for key, count in counts.items():
            ran = dispatched(key, plan)
            step = count * step_us(ran, self)
            total_us += step
            reason = self.outside(key, ran, plan)
            if reason is not None:
                steps[reason] += count
                us[reason] = us.get(reason, 0.0) + step
        shares = {reason: (count / counts.total(), us[reason] / total_us) for reason, count in steps.most_common()}
        return tuple(
            f"extrapolated, {of_steps:.1%} of the steps and {of_time:.1%} of the time: {reason}"
            for reason, (of_steps, of_time) in shares.items()
        )

    def guesses_of_table(self, table: DispatchTable) -> tuple[str, ...]:
        """As `guesses`, of the steps of a dispatch table, which holds their mode and tokens and no more."""
        domain = self._costs.model.domain
        least, most = (end(arm["num_tokens"][at] for arm in domain.values()) for at, end in ((0, min), (1, max)))
        steps: Counter[str] = Counter()
        for (tokens, _, mode), count in table.model.items():
            if mode is CudagraphMode.FULL and "full" not in domain:
                steps["they run in FULL graphs, and arm full was not measured"] += count
            elif not least <= tokens <= most:
                steps[f"num_tokens are not from {least} to {most}, which were measured"] += count
        return tuple(
            f"extrapolated, {count / table.num_steps:.1%} of the steps: {reason}"
            for reason, count in steps.most_common()
        )


def _outside(shape: DecoderShape, case: StepCase, domain: Mapping[str, Mapping[str, tuple[int, int]]]) -> str | None:
    """Why the model never saw such a step; None if it did."""
    arm = arm_of(case)
    if arm not in domain:
        fixed = ", and every plan runs them alike" if case.mode is CudagraphMode.FULL else ""
        return f"arm {arm} was not measured{fixed}"
    asked = compared(shape, case)
    for name, (least, most) in domain[arm].items():
        if not least <= asked[name] <= most:
            side = f"fewer than {least}" if asked[name] < least else f"more than {most}"
            return f"{name} {side}, to which arm {arm} was measured"
    return None


def _case(key: StepKey, ran: Dispatched, plan: CapturePlan, computed: int) -> StepCase:
    """A counted step as the model sees it; as many requests as its rows need."""
    tokens, rows, uniform = key
    replay_mode = None
    if ran.padded_rows:
        replay_mode = CudagraphMode.PIECEWISE if ran.in_graph else CudagraphMode.NONE
    return StepCase(
        num_tokens=tokens,
        padded_tokens=ran.padded_tokens,
        mode=CudagraphMode(ran.mode),
        replay_rows=rows if ran.padded_rows else 0,
        padded_rows=ran.padded_rows,
        replay_mode=replay_mode,
        num_reqs=tokens // plan.query_len_decode if uniform else max(1, -(-rows // plan.window)),
        computed=computed,
    )


def _on_line(count: int, cost: Callable[[int], float]) -> float:
    """The cost of a count on the line between the first and the last count of its tile."""
    first = (count - 1) // TILE * TILE + 1
    share = (count - first) / (TILE - 1)
    return (1 - share) * cost(first) + share * cost(first + TILE - 1)


def fitted_costs(config: ServingConfig) -> FittedCosts:
    """The bundled model's costs for a config; ValueError if the package has no fitted model."""
    model = step_model.bundled_model()
    if model is None:
        raise ValueError("no step-time model is bundled: record the suite `steps` on a GPU and fit it first")
    return FittedCosts(model, config)
