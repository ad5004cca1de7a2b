"""What a sweep says of dispatched steps: how many run in which mode, and their modelled time with replay and off."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_sim.config import ServingConfig
from replay_sim.explore.sweep_steps import MODES, Bools, DispatchedSteps
from replay_sim.explore.tuning_costs import FittedCosts, fitted_costs
from replay_sim.explore.tuning_score import Dispatched
from replay_sim.plan import CapturePlan

Floats = npt.NDArray[np.float64]


class ModelledSteps:
    """The bundled step-time model at one window, and why its answer to a step is a guess; both kept."""

    def __init__(self, window: int) -> None:
        self.costs: FittedCosts = fitted_costs(ServingConfig(window=window))
        self._outside: dict[tuple[int, tuple[Any, ...]], str | None] = {}

    def step_us(self, ran: DispatchedSteps) -> Floats:
        """Microseconds of each step as it was dispatched, float64 (S)."""
        return self._model_us(ran, ran.has_replay_batch) + self._replay_us(ran)

    def replay_off_us(self, ran: DispatchedSteps) -> Floats:
        """Microseconds of each step in the same model graph with all layers on all rows, float64 (S)."""
        return self._model_us(ran, np.zeros_like(ran.in_graph))

    def _model_us(self, ran: DispatchedSteps, breaks: Bools) -> Floats:
        """Asked once for each distinct step: most run in few sizes."""
        codes, which = np.unique((ran.padded_tokens * len(MODES) + ran.mode) * 2 + breaks, return_inverse=True)
        asked = ((code // 2 // len(MODES), MODES[code // 2 % len(MODES)], bool(code % 2)) for code in codes.tolist())
        us: Floats = np.array([self.costs.model_us(*step) for step in asked])[which]
        return us

    def _replay_us(self, ran: DispatchedSteps) -> Floats:
        codes, which = np.unique(ran.padded_rows * 2 + ran.in_graph, return_inverse=True)
        asked = ((code // 2, bool(code % 2)) for code in codes.tolist())
        us: Floats = np.array([self.costs.replay_us(*rows) if rows[0] else 0.0 for rows in asked])[which]
        return us

    def outside(self, ran: DispatchedSteps, plan: CapturePlan) -> list[str | None]:
        """For each step why it is a guess: how the model never saw one like it; None if it did."""
        steps, decode_len = ran.steps, plan.query_len_decode
        columns = steps.tokens, steps.rows, steps.uniform, ran.mode, ran.padded_tokens, ran.padded_rows, ran.in_graph
        reasons = []
        for step in zip(*(column.tolist() for column in columns), strict=True):
            if (decode_len, step) not in self._outside:
                tokens, rows, uniform, mode, *padded = step
                alone = Dispatched(MODES[mode], *padded)
                self._outside[decode_len, step] = self.costs.outside((tokens, rows, uniform), alone, plan)
            reasons.append(self._outside[decode_len, step])
        return reasons


@cache
def modelled_steps(window: int) -> ModelledSteps:
    """The model at a window, one a process; ValueError if the package has none."""
    return ModelledSteps(window)


def step_columns(ran: DispatchedSteps) -> dict[str, Any]:
    """Steps by mode (D1), those with a replay batch, and the rows of all of them, real ones and with pads."""
    counts = ran.steps.counts
    by_mode = [int(counts[ran.mode == mode].sum()) for mode in range(len(MODES))]
    has_batch = ran.has_replay_batch
    return {
        "steps": int(counts.sum()),
        "full_steps": by_mode[MODES.index("FULL")],
        "piecewise_steps": by_mode[MODES.index("PIECEWISE")],
        "eager_steps": by_mode[MODES.index("NONE")],
        "replay_steps": int(counts[has_batch].sum()),
        "replay_graph_steps": int(counts[ran.in_graph].sum()),
        "num_tokens": int((counts * ran.steps.tokens).sum()),
        "padded_tokens": int((counts * ran.padded_tokens).sum()),
        "replay_rows": int((counts * ran.steps.rows)[has_batch].sum()),
        "padded_rows": int((counts * ran.padded_rows).sum()),
    }


def time_columns(ran: DispatchedSteps, plan: CapturePlan) -> dict[str, Any]:
    """Modelled times, as milliseconds of a step and seconds of all, with their source and how much of it is a guess."""
    model, counts = modelled_steps(plan.window), ran.steps.counts
    us = counts * model.step_us(ran)
    total, off = float(us.sum()), float((counts * model.replay_off_us(ran)).sum())
    reasons = model.outside(ran, plan)
    steps = int(counts.sum())
    return {
        "expected_step_ms": total / steps / 1e3,
        "replay_off_step_ms": off / steps / 1e3,
        "speedup": off / total,
        "workload_s": total / 1e6,
        "extrapolated_share": float(us[[reason is not None for reason in reasons]].sum()) / total,
        "source": model.costs.source,
        "outside": "; ".join(dict.fromkeys(filter(None, reasons))),
    }
