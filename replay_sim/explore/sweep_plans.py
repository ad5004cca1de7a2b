"""The plans that a sweep can ask for by name, and the serving config that each makes of a design point."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from replay_sim.config import ConfigError, ServingConfig
from replay_sim.config.errors import shown
from replay_sim.explore.plan_comparison import DEFAULT, EXPLICIT, OPTIMAL, RowWeights, optimal_curve
from replay_sim.explore.sweep_points import DesignPoint
from replay_sim.explore.sweep_steps import CountedSteps, dispatch_steps
from replay_sim.plan import CapturePlan, make_plan

EAGER = "eager"
PLANS = (DEFAULT, EXPLICIT, OPTIMAL, EAGER)
_OPTIMAL_OF = re.compile(rf"{OPTIMAL}-([1-9]\d{{0,3}})")


def check_plans(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no plan."""
    for name in names:
        if name not in PLANS and not _OPTIMAL_OF.fullmatch(name):
            raise ConfigError(
                f"plan: {shown(name)} is not allowed; it must be one of {', '.join(PLANS)}, or {OPTIMAL}-K for at most "
                "K replay graphs"
            )


def config_of(point: DesignPoint) -> ServingConfig:
    """The serving config of a point, without the sizes that an optimum will choose.

    `explicit` takes the config as it is. For the others its explicit model sizes end at the token budget, or the
    maximum of the grid if that is smaller, which then is the largest size; replay sizes follow P2's rule, and `eager`
    captures none. Raises ConfigError for settings that cannot be used.
    """
    changes: dict[str, Any] = dict(point.settings)
    if point.plan == EXPLICIT:
        return attrs.evolve(point.config, **changes)
    sizes = point.config.cudagraph_capture_sizes
    if sizes:
        budget, largest = point.asked("max_num_batched_tokens"), changes.get("max_cudagraph_capture_size", max(sizes))
        assert isinstance(budget, int) and isinstance(largest, int)
        most = min(budget, largest)
        changes["cudagraph_capture_sizes"] = (*(size for size in sizes if size < most), most)
        changes["max_cudagraph_capture_size"] = most
    changes["cudagraph_decoder_replay"] = point.plan != EAGER
    changes["decoder_replay_cudagraph_capture_sizes"] = None
    return attrs.evolve(point.config, **changes)


def plan_of(point: DesignPoint, config: ServingConfig, steps: CountedSteps) -> CapturePlan:
    """The capture plan of a point whose config is `config` and whose steps are `steps`.

    An optimum has the replay sizes of fewest padded rows on these very steps (P8): at most as many as the default rule
    has, or K, the default's largest among them. Raises ConfigError for what cannot be planned.
    """
    plan = make_plan(config)
    if not point.plan.startswith(OPTIMAL) or not plan.replay_sizes:
        return plan
    asked = _OPTIMAL_OF.fullmatch(point.plan)
    has_batch = dispatch_steps(steps, plan).has_replay_batch
    rows = np.bincount(steps.rows[has_batch], weights=steps.counts[has_batch])
    weights = RowWeights({int(count): float(rows[count]) for count in rows.nonzero()[0]}, point.workload)
    curve = optimal_curve(plan, weights, int(asked[1]) if asked else len(plan.replay_sizes))
    return make_plan(attrs.evolve(config, decoder_replay_cudagraph_capture_sizes=curve[-1])) if curve else plan
