"""Tuning: the sizes and the threshold of least expected step time for counted steps, against default and own plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import attrs

from replay_sim.config import ServingConfig
from replay_sim.explore.tuning_limits import Limits, first_that_fits
from replay_sim.explore.tuning_plans import (
    choice_of,
    config_with,
    default_config,
    kept_for_full,
    make_planner,
    thresholds_to_try,
)
from replay_sim.explore.tuning_score import PlanScore, score
from replay_sim.explore.tuning_steps import StepCounts, mixed_steps
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.plan.capture_sizes import PIECEWISE_MODES
from replay_sim.plan.joint import JointPlanner, JointSizes, joint_optimum, trade_offs
from replay_sim.plan.step_costs import StepCosts

CURVE_GRAPHS = 16
"""How far the trade-off curves go at least, also beyond the limit: what more graphs would buy."""

NOT_WORTH_A_GRAPH = 1e-3
"""Of choices whose expected step times differ by less than this share the one of fewest graphs is taken."""

PoolBytes = Callable[[CapturePlan], int]


@attrs.frozen
class TunedPlan:
    """A plan by name, with the config that makes it and its scores: on the steps tuned on, and on unseen ones."""

    name: str
    config: ServingConfig
    plan: CapturePlan
    seen: PlanScore
    unseen: PlanScore | None


@attrs.frozen
class CurvePoint:
    """One point of a trade-off curve, scored on the steps tuned on."""

    plan: CapturePlan
    score: PlanScore


@attrs.frozen(kw_only=True)
class Tuning:
    """The outcome: three plans, the trade-off curves, and what was allowed.

    replay_curve: 0, 1, .. replay graphs, the rest as in `tuned`. model_curve: ever more PIECEWISE graphs, with as many
    replay graphs as the limit allows. grid: the choices that both are of, by model graphs and in each by replay graphs;
    empty where no step runs outside of FULL graphs. kept_sizes: model sizes that no choice could leave out, as FULL
    graphs need them. limits: with numbers for what was left open. error: that of the costs.
    """

    default: TunedPlan
    own: TunedPlan
    tuned: TunedPlan
    replay_curve: tuple[CurvePoint, ...]
    model_curve: tuple[CurvePoint, ...]
    grid: tuple[tuple[JointSizes, ...], ...]
    kept_sizes: tuple[int, ...]
    limits: Limits
    error: float | None
    steps: int
    mixed_steps: int

    @property
    def plans(self) -> tuple[TunedPlan, TunedPlan, TunedPlan]:
        """Default, own, tuned."""
        return self.default, self.own, self.tuned


def tune(
    config: ServingConfig,
    seen: StepCounts,
    unseen: StepCounts | None,
    costs: StepCosts,
    limits: Limits | None = None,
    pool_bytes: PoolBytes | None = None,
) -> Tuning:
    """Tune `config` on the steps `seen`, and judge on `unseen` (issue 6, 4).

    Within the limits the tuned plan is never worse on `seen` than the default or the config's own: both are among the
    choices. A graph that saves less than NOT_WORTH_A_GRAPH is not captured. Raises ValueError: no PIECEWISE graphs are
    captured, no steps, or limits that no plan keeps.
    """
    own, default = make_plan(config), make_plan(default_config(config))
    if not own.model_sizes:
        raise ValueError(
            f"cudagraph_mode: {config.cudagraph_mode} is not allowed here; what is tuned are PIECEWISE graphs: it "
            f"must be one of {', '.join(PIECEWISE_MODES)}"
        )
    if not seen.total():
        raise ValueError("no steps to tune on: the workload has none")
    limits = _filled(limits or Limits(), own, default)
    pool_bytes = None if pool_bytes is None else functools.cache(pool_bytes)
    configs = {"default": default_config(config), "own": config}
    found = _choose(config, configs, seen, costs, limits, pool_bytes)
    return Tuning(
        default=_judged("default", configs["default"], seen, unseen, costs),
        own=_judged("own", config, seen, unseen, costs),
        tuned=_judged("tuned", found.config, seen, unseen, costs),
        replay_curve=_scored(config, found.replay_curve, seen, costs),
        model_curve=_scored(config, found.model_curve, seen, costs),
        grid=tuple(map(tuple, found.grid)),
        kept_sizes=kept_for_full(own),
        limits=limits,
        error=costs.error,
        steps=seen.total(),
        mixed_steps=round(float(mixed_steps(seen, own).weights.sum())),
    )


@attrs.frozen
class _Found:
    """The config chosen, the grid of choices, and the curves through it."""

    config: ServingConfig
    grid: list[list[JointSizes]]
    replay_curve: list[JointSizes]
    model_curve: list[JointSizes]


def _filled(limits: Limits, own: CapturePlan, default: CapturePlan) -> Limits:
    """Limits with as many graphs as the default has, or the own plan where the default has none."""
    graphs = len(default.replay_sizes) or len(own.replay_sizes)
    return attrs.evolve(
        limits,
        max_graphs=graphs if limits.max_graphs is None else limits.max_graphs,
        max_model_graphs=len(own.model_sizes) if limits.max_model_graphs is None else limits.max_model_graphs,
    )


def _choose(
    config: ServingConfig,
    configs: Mapping[str, ServingConfig],
    seen: StepCounts,
    costs: StepCosts,
    limits: Limits,
    pool_bytes: PoolBytes | None,
) -> _Found:
    """The best config within the limits among all points of the trade-off and the given configs."""
    own = make_plan(config)
    steps = mixed_steps(seen, own)
    grid: list[list[JointSizes]] = []
    if steps.weights.sum() > 0:
        references = [choice_of(make_plan(other)) for other in configs.values()]
        planner = make_planner(own, steps, costs, [row for other in references for row in other.replay_sizes])
        grid = _grid(planner, own, references, limits)
    step_us = 1000 * score(own, seen, costs).expected_step_ms
    slack_us = NOT_WORTH_A_GRAPH * step_us * seen.total() / max(1.0, float(steps.weights.sum()))
    choices = _cheapest(config, [point for row in grid for point in row], slack_us, limits, pool_bytes)
    for other in configs.values():
        plan = make_plan(other)
        if first_that_fits([plan], limits, pool_bytes) is not None:
            choices.append(config_with(config, choice_of(plan)))
    if not choices:
        raise ValueError(f"limits: no plan keeps {_words(limits)}; raise one of them")
    chosen = min(choices, key=lambda choice: score(make_plan(choice), seen, costs).expected_step_ms)
    replay_curve, model_curve = _curves(grid, make_plan(chosen), limits)
    return _Found(chosen, grid, replay_curve, model_curve)


def _grid(
    planner: JointPlanner, own: CapturePlan, references: list[JointSizes], limits: Limits
) -> list[list[JointSizes]]:
    """The trade-off around the joint optimum, beyond the limits too; without a joint optimum nothing."""
    assert limits.max_graphs is not None and limits.max_model_graphs is not None
    most = limits.max_graphs
    starts = {planner.replay_optima((), None, most)[-1].sizes}
    starts |= {other.replay_sizes for other in references if len(other.replay_sizes) <= most}
    thresholds = thresholds_to_try(own, planner, [other.trim_threshold for other in references])
    choice = joint_optimum(
        planner, thresholds, sorted(starts), max_model_graphs=limits.max_model_graphs, max_replay_graphs=most
    )
    if choice is None:
        return []
    return trade_offs(
        planner,
        choice,
        max_model_graphs=max(limits.max_model_graphs, len(planner.kept_sizes) + CURVE_GRAPHS),
        max_replay_graphs=max(most, CURVE_GRAPHS),
    )


def _cheapest(
    config: ServingConfig, points: list[JointSizes], slack_us: float, limits: Limits, pool_bytes: PoolBytes | None
) -> list[ServingConfig]:
    """The config of fewest graphs among the points within the limits and `slack_us` of the cheapest, if any is."""

    def first(ordered: list[JointSizes]) -> int | None:
        return first_that_fits([make_plan(config_with(config, point)) for point in ordered], limits, pool_bytes)

    by_cost = sorted(points, key=lambda point: (point.expected_us, _num_graphs(point)))
    index = first(by_cost)
    if index is None:
        return []
    most_us = by_cost[index].expected_us + slack_us
    about_as_cheap = [point for point in by_cost[index:] if point.expected_us <= most_us]
    about_as_cheap.sort(key=_num_graphs)
    fewest = first(about_as_cheap)
    assert fewest is not None
    return [config_with(config, about_as_cheap[fewest])]


def _num_graphs(point: JointSizes) -> int:
    return len(point.replay_sizes) + len(point.model_sizes)


def _curves(
    grid: list[list[JointSizes]], chosen: CapturePlan, limits: Limits
) -> tuple[list[JointSizes], list[JointSizes]]:
    """The row of the grid with the chosen number of model graphs, and the column at the limit of replay graphs."""
    if not grid:
        return [], []
    row = min(grid, key=lambda curve: abs(len(curve[0].model_sizes) - len(chosen.model_sizes)))
    column = [curve[min(limits.max_graphs or 0, len(curve) - 1)] for curve in grid]
    return _distinct(row), _distinct(column)


def _distinct(points: list[JointSizes]) -> list[JointSizes]:
    """Without those that repeat the one before: the optimum of at most n graphs may have fewer."""
    return [point for point, before in zip(points, [None, *points], strict=False) if point != before]


def _scored(
    config: ServingConfig, points: list[JointSizes], seen: StepCounts, costs: StepCosts
) -> tuple[CurvePoint, ...]:
    plans = [make_plan(config_with(config, point)) for point in points]
    return tuple(CurvePoint(plan, score(plan, seen, costs)) for plan in plans)


def _judged(
    name: str, config: ServingConfig, seen: StepCounts, unseen: StepCounts | None, costs: StepCosts
) -> TunedPlan:
    plan = make_plan(config)
    judged = score(plan, unseen, costs) if unseen else None
    return TunedPlan(name, config, plan, score(plan, seen, costs), judged)


def _words(limits: Limits) -> str:
    given = attrs.asdict(limits, filter=lambda _, value: value is not None)
    return ", ".join(f"{name} {value}" for name, value in given.items())
