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

    expected_step_ms: modelled milliseconds of a step, the mean over all. replay_steps have a replay batch;
    replay_rows are its rows, padded_rows those with pads, rows that run eagerly unpadded; graph_steps the ones whose
    replay batch runs in a graph.
    """

    steps: int
    expected_step_ms: float
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


def score(plan: CapturePlan, counts: StepCounts, costs: StepCosts) -> PlanScore:
    """Score a plan; ValueError if there are no steps."""
    steps = counts.total()
    if not steps:
        raise ValueError("no steps to score a plan on")
    us = 0.0
    replay_steps = graph_steps = replay_rows = padded_rows = padded_tokens = 0
    for key, count in counts.items():
        ran = dispatched(key, plan)
        us += count * costs.model_us(ran.padded_tokens, ran.mode, ran.padded_rows > 0)
        padded_tokens += count * ran.padded_tokens
        if ran.padded_rows:
            us += count * costs.replay_us(ran.padded_rows, ran.in_graph)
            replay_steps += count
            graph_steps += count * ran.in_graph
            replay_rows += count * key[1]
            padded_rows += count * ran.padded_rows
    return PlanScore(
        steps=steps,
        expected_step_ms=us / steps / 1000,
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
