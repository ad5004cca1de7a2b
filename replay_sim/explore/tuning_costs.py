"""Step costs for tuning, from the fitted step-time model: kept by size, with its error, and where it is a guess."""

from __future__ import annotations

import attrs

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, StepRecord
from replay_sim.config import FLASH_RANK, ServingConfig
from replay_sim.explore.tuning_score import dispatched
from replay_sim.explore.tuning_steps import StepCounts
from replay_sim.measure import step_costs, step_model
from replay_sim.plan.capture_plan import CapturePlan


class FittedCosts:
    """The fitted model's costs on the measured decoder with the window of a config, by mode's name (StepCosts)."""

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
        return f"{self._costs.source}; off by {error.median:.1%} (median) and {error.p95:.1%} (p95) on {error.n} others"

    def model_us(self, padded_tokens: int, mode: str, breaks: bool) -> float:
        """As the protocol says; at least 0."""
        key = padded_tokens, mode, breaks
        if key not in self._model_us:
            self._model_us[key] = max(0.0, self._costs.model_us(padded_tokens, CudagraphMode(mode), breaks))
        return self._model_us[key]

    def replay_us(self, padded_rows: int, graph: bool) -> float:
        """As the protocol says; at least 0."""
        key = padded_rows, graph
        if key not in self._replay_us:
            self._replay_us[key] = max(0.0, self._costs.replay_us(padded_rows, graph))
        return self._replay_us[key]

    def seconds(self, record: StepRecord) -> float:
        """Seconds of a dispatched step as the sum of its parts, as a plan is scored; 0 for an empty one."""
        if not record.num_tokens:
            return 0.0
        us = self.model_us(record.padded_tokens, record.mode.value, record.has_replay_batch)
        if record.has_replay_batch:
            us += self.replay_us(record.padded_rows, record.replay_mode is CudagraphMode.PIECEWISE)
        return us / 1e6

    def guesses(self, plan: CapturePlan, counts: StepCounts) -> tuple[str, ...]:
        """Why some steps of the plan are outside of what the model saw: a reason for each kind of step.

        Of each kind the steps of most and of fewest tokens are asked for.
        """
        reasons: dict[str, None] = {}
        kinds: dict[tuple[str, bool, bool], list[StepRecord]] = {}
        for key in sorted(counts):
            record = _record(key[0], key[1], plan, key[2])
            kind = record.mode.value, record.has_replay_batch, record.replay_mode is CudagraphMode.PIECEWISE
            kinds.setdefault(kind, []).append(record)
        for records in kinds.values():
            for record in (records[0], records[-1]):
                outside = self._costs.prediction(record).outside
                if outside is not None:
                    reasons[outside] = None
        return tuple(reasons)


def fitted_costs(config: ServingConfig) -> FittedCosts:
    """The bundled model's costs for a config; ValueError if the package has no fitted model."""
    model = step_model.bundled_model()
    if model is None:
        raise ValueError("no step-time model is bundled: record the suite `steps` on a GPU and fit it first")
    return FittedCosts(model, config)


def _record(tokens: int, rows: int, plan: CapturePlan, uniform: bool) -> StepRecord:
    """The record of a counted step; as many requests as its rows need."""
    ran = dispatched((tokens, rows, uniform), plan)
    replay_mode = None
    if ran.padded_rows:
        replay_mode = CudagraphMode.PIECEWISE if ran.in_graph else CudagraphMode.NONE
    requests = tokens // plan.query_len_decode if uniform else max(1, -(-rows // plan.window))
    return StepRecord(
        num_tokens=tokens,
        padded_tokens=ran.padded_tokens,
        mode=CudagraphMode(ran.mode),
        replay_rows=rows if ran.padded_rows else 0,
        padded_rows=ran.padded_rows,
        replay_mode=replay_mode,
        reason=ReplayReason.GRAPH if ran.in_graph else ReplayReason.NO_SIZES,
        num_reqs=requests,
        model_reason=ModelReason.PIECEWISE,
    )
