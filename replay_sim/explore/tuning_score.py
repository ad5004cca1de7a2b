"""What a plan's steps cost: expected step time, padded rows and graphs, for counted steps."""

from __future__ import annotations

from typing import Any

import attrs

from replay_sim.batch.dispatch import smallest_size
from replay_sim.explore.tuning_steps import StepCounts, StepKey, is_full
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.step_costs import StepCosts


@attrs.frozen(kw_only=True)
class PlanScore:
    """A plan on counted steps.

    expected_step_ms: modelled milliseconds of a step, the mean over all. mixed_steps are those that no FULL graph
    takes, mixed_step_ms the mean over them, None without any. replay_steps have a replay batch; replay_rows are its
    rows, padded_rows those with pads, rows that run eagerly unpadded; graph_steps the ones whose replay batch runs in
    a graph.
    """

    steps: int
    expected_step_ms: float
    mixed_steps: int
    mixed_step_ms: float | None
    replay_steps: int
    graph_steps: int
    replay_rows: int
    padded_rows: int
    padded_tokens: int
    num_replay_graphs: int
    num_model_graphs: int
    num_full_graphs: int
    source: str

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return attrs.asdict(self)


@attrs.frozen
class Dispatched:
    """How one counted step runs: model mode and padded tokens, then padded rows, 0 without a replay batch."""

    mode: str
    padded_tokens: int
    padded_rows: int
    in_graph: bool


def dispatched(key: StepKey, plan: CapturePlan) -> Dispatched:
    """The dispatch rules for a counted step, as every planned size is captured (D1-D3, S5)."""
    tokens, rows, _ = key
    if is_full(key, plan):
        return Dispatched("FULL", smallest_size(plan.full_sizes, tokens) or tokens, 0, False)
    size = smallest_size(plan.model_sizes, tokens)
    if size is None:
        mode, padded, has_batch = "NONE", tokens, rows < tokens
    else:
        mode, padded, has_batch = "PIECEWISE", size, plan.trim_threshold is not None and size >= plan.trim_threshold
    if not has_batch:
        return Dispatched(mode, padded, 0, False)
    padded_rows = smallest_size(plan.replay_sizes, rows)
    return Dispatched(mode, padded, padded_rows or rows, padded_rows is not None)


def step_us(ran: Dispatched, costs: StepCosts) -> float:
    """Microseconds of a step that is dispatched so."""
    us = costs.model_us(ran.padded_tokens, ran.mode, ran.padded_rows > 0)
    return us + costs.replay_us(ran.padded_rows, ran.in_graph) if ran.padded_rows else us


def score(plan: CapturePlan, counts: StepCounts, costs: StepCosts) -> PlanScore:
    """Score a plan; ValueError if there are no steps."""
    steps = counts.total()
    if not steps:
        raise ValueError("no steps to score a plan on")
    us = {True: 0.0, False: 0.0}
    mixed_steps = replay_steps = graph_steps = replay_rows = padded_rows = padded_tokens = 0
    for key, count in counts.items():
        ran = dispatched(key, plan)
        us[ran.mode == "FULL"] += count * step_us(ran, costs)
        mixed_steps += count * (ran.mode != "FULL")
        padded_tokens += count * ran.padded_tokens
        if ran.padded_rows:
            replay_steps += count
            graph_steps += count * ran.in_graph
            replay_rows += count * key[1]
            padded_rows += count * ran.padded_rows
    return PlanScore(
        steps=steps,
        expected_step_ms=sum(us.values()) / steps / 1000,
        mixed_steps=mixed_steps,
        mixed_step_ms=us[False] / mixed_steps / 1000 if mixed_steps else None,
        replay_steps=replay_steps,
        graph_steps=graph_steps,
        replay_rows=replay_rows,
        padded_rows=padded_rows,
        padded_tokens=padded_tokens,
        num_replay_graphs=len(plan.replay_sizes),
        num_model_graphs=len(plan.model_sizes),
        num_full_graphs=len(plan.full_sizes),
        source=costs.source,
    )
