"""Plans beside each other: the default rule's, the config's own list and the optimum, judged on the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice

import attrs
import pandas as pd

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config import FLASH_RANK, ConfigError, DecoderShape, ServingConfig
from replay_sim.plan import CapturePlan, PlanCost, make_plan, plan_cost, reachable_rows, unreachable_sizes
from replay_sim.plan.capture_sizes import listed
from replay_sim.plan.optimal import optimal_sizes
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import Simulation, planned_dispatch

DEFAULT, EXPLICIT, OPTIMAL = "default", "explicit", "optimal"
COST = "a graph costs its padded rows; no time was measured"
COUNTED = ("replay batches in graphs", "padded rows", "pads")
NUM_STEPS = 2000
MIB = 1 << 20


@attrs.frozen(eq=False)
class RowWeights:
    """How often a replay batch has a count of rows, and in words where that comes from."""

    histogram: Mapping[int, float]
    source: str


@attrs.frozen
class JudgedPlan:
    """A plan and what it costs, judged on some rows.

    cost: with the padding of these rows. eager_share: batches of more rows than the largest size, as a share of 1.
    unreachable: sizes that no batch can select (P6).
    """

    plan: CapturePlan
    cost: PlanCost
    eager_share: float
    unreachable: tuple[int, ...]


@attrs.frozen
class SeqsPoint:
    """What a plan captures at one max_num_seqs: its replay graphs, the rows of the largest, and static-buffer bytes."""

    max_num_seqs: int
    num_replay_graphs: int
    largest_size: int
    static_buffer_bytes: int


def default_plan(config: ServingConfig) -> CapturePlan:
    """The plan of `config` without its own list of replay sizes (P2); raises ConfigError as `make_plan` does."""
    return make_plan(attrs.evolve(config, decoder_replay_cudagraph_capture_sizes=None))


def reachable_weights(plan: CapturePlan) -> RowWeights:
    """Every row count that a replay batch can have, once (P6)."""
    counts = (count for low, high in reachable_rows(plan) for count in range(low, high + 1))
    return RowWeights(dict.fromkeys(counts, 1.0), "every reachable row count once")


def workload_weights(config: ServingConfig, profile: str, *, seed: int = 0, num_steps: int = NUM_STEPS) -> RowWeights:
    """The replay rows of the first steps of requests drawn from a bundled profile; requests always wait.

    Replay sizes do not decide which rows a step has, so that all plans of a config share them. Raises ValueError for
    an unknown profile.
    """
    table = _simulated(config, default_plan(config), profile, seed, num_steps).table
    counts: Counter[int] = Counter()
    for (rows, _, _), count in table.replay.items():
        counts[rows] += count
    source = (
        f"the replay batches of {num_steps:,} steps of requests drawn with seed {seed} from profile {profile}, "
        f"quantiles of {load_profile(profile).source}"
    )
    return RowWeights({rows: float(count) for rows, count in sorted(counts.items())}, source)


def dispatched_table(
    config: ServingConfig, plans: Mapping[str, JudgedPlan], profile: str, *, seed: int = 0, num_steps: int = NUM_STEPS
) -> pd.DataFrame:
    """Rows that run in replay graphs, and pads among them: planned, and counted step by step by dispatch (G3)."""
    columns = {}
    for name, judgement in plans.items():
        ran = _simulated(config, judgement.plan, profile, seed, num_steps).table.replay.items()
        graphs = [(rows, padded, count) for (rows, padded, mode), count in ran if mode is CudagraphMode.PIECEWISE]
        padded_rows = sum(padded * count for _, padded, count in graphs)
        pads = sum((padded - rows) * count for rows, padded, count in graphs)
        columns[name] = {
            **dict(zip(COUNTED, (sum(count for _, _, count in graphs), padded_rows, pads), strict=True)),
            "pads dispatched": pads / padded_rows if padded_rows else 0.0,
            "pads planned": judgement.cost.mean_padding,
        }
    return pd.DataFrame(columns).T.rename_axis("plan").astype(dict.fromkeys(COUNTED, int))


@lru_cache(maxsize=64)
def _simulated(config: ServingConfig, plan: CapturePlan, profile: str, seed: int, num_steps: int) -> Simulation:
    """The first steps, dispatched; no step can admit more requests than are left."""
    requests = generate_requests(load_profile(profile), num_steps * config.max_num_seqs, seed=seed)
    settings = SchedulerSettings.from_config(config, seed=seed)
    scheduler = Scheduler(requests, settings, dispatch=planned_dispatch(plan))
    simulation = Simulation()
    for _ in simulation.watch(islice(scheduler.steps(), num_steps)):
        pass
    return simulation


def optimal_curve(plan: CapturePlan, weights: RowWeights, max_graphs: int) -> list[tuple[int, ...]]:
    """The replay sizes of fewest padded rows for at most 1, 2, .. `max_graphs` graphs, each ascending (P8).

    All keep the largest size of `plan`: what exceeds their other sizes runs there, so that they hold the batches that
    the plan holds, in static buffers as large. Rows beyond it run eagerly under all of them and are left out. The
    list ends where another size saves no pad; it is empty where the plan has no size or no batch fits one.
    """
    largest = plan.replay_sizes[-1] if plan.replay_sizes else 0
    held = {rows: weight for rows, weight in weights.histogram.items() if weight and rows <= largest}
    if not held:
        return []
    padded = {rows: float(rows) for rows in held if rows < largest}
    optima = optimal_sizes(held, padded, lambda _: float(largest), max_graphs - 1)
    return [(*best.sizes, largest) for best in optima]


def curve_padding(plan: CapturePlan, curve: Iterable[tuple[int, ...]], weights: RowWeights) -> list[float]:
    """Pads among the padded rows of `weights` for each list of sizes in place of the plan's own (P7)."""
    plans = (attrs.evolve(plan, replay_sizes=sizes) for sizes in curve)
    return [plan_cost(other, histogram=weights.histogram).mean_padding for other in plans]


def fewest_graphs(curve: Iterable[tuple[int, ...]], padding: Iterable[float], most: float) -> int | None:
    """The graphs of the first sizes of a curve that pad no more than `most`; None if none do."""
    return next((len(sizes) for sizes, share in zip(curve, padding, strict=True) if share <= most), None)


def compared_plans(config: ServingConfig, weights: RowWeights, max_graphs: int | None = None) -> dict[str, CapturePlan]:
    """The default plan, the explicit one if `config` has a list, and the optimum for `weights`, by name.

    The optimum has at most `max_graphs` graphs, as many as the default plan if None; there is none where the default
    plan holds no batch. Raises ConfigError as `make_plan` does.
    """
    default = default_plan(config)
    plans = {DEFAULT: default}
    if config.decoder_replay_cudagraph_capture_sizes:
        plans[EXPLICIT] = make_plan(config)
    curve = optimal_curve(default, weights, max_graphs or max(1, len(default.replay_sizes)))
    if curve:
        plans[OPTIMAL] = make_plan(attrs.evolve(config, decoder_replay_cudagraph_capture_sizes=curve[-1]))
    return plans


def judged(
    plans: Mapping[str, CapturePlan], weights: RowWeights, shape: DecoderShape = FLASH_RANK
) -> dict[str, JudgedPlan]:
    """Every plan with what it costs on `shape` and on `weights`, which need not be those that it was made for (P7)."""
    return {name: _judged(plan, weights, shape) for name, plan in plans.items()}


def _judged(plan: CapturePlan, weights: RowWeights, shape: DecoderShape) -> JudgedPlan:
    largest = plan.replay_sizes[-1] if plan.replay_sizes else 0
    total = sum(weights.histogram.values())
    beyond = sum(weight for rows, weight in weights.histogram.items() if rows > largest)
    cost = plan_cost(plan, shape, histogram=weights.histogram)
    return JudgedPlan(plan, cost, beyond / total if total else 0.0, unreachable_sizes(plan))


def judged_table(plans: Mapping[str, JudgedPlan]) -> pd.DataFrame:
    """A row a plan: graphs, largest size, padding of the rows judged, static buffers, and sizes no batch selects."""
    columns = {
        name: {
            "replay graphs": judgement.cost.num_replay_graphs,
            "largest size (rows)": judgement.plan.replay_sizes[-1] if judgement.plan.replay_sizes else 0,
            "pads among padded rows": _padding(judgement),
            "beyond it, eager": f"{judgement.eager_share:.1%}",
            "static buffers (MiB)": f"{judgement.cost.static_buffer_bytes / MIB:,.1f}",
            "sizes no batch can select": listed(judgement.unreachable) or "none",
        }
        for name, judgement in plans.items()
    }
    return pd.DataFrame(columns).T.rename_axis("plan")


def _padding(judgement: JudgedPlan) -> str:
    return f"{judgement.cost.mean_padding:.1%}" if judgement.plan.replay_sizes else "no graphs"


def padding_table(judgements: Mapping[str, Mapping[str, JudgedPlan]]) -> pd.DataFrame:
    """Pads among padded rows of every plan, a row for each set of rows that the plans were judged on."""
    shares = {
        rows: {name: _padding(judgement) for name, judgement in plans.items()} for rows, plans in judgements.items()
    }
    return pd.DataFrame(shares).T.rename_axis("judged on")


def notes_table(configs: Mapping[str, ServingConfig]) -> pd.DataFrame:
    """A row a config: graphs of its plan as it stands, sizes no batch can select, and what is said aloud (P6)."""
    plans = {name: make_plan(config) for name, config in configs.items()}
    columns = {
        name: {
            "replay graphs": len(plan.replay_sizes),
            "of them no batch can select": len(unreachable_sizes(plan)),
            "said aloud": "; ".join(plan.notes) or "nothing",
        }
        for name, plan in plans.items()
    }
    return pd.DataFrame(columns).T.rename_axis("config")


def seqs_sweep(config: ServingConfig, max_num_seqs: Sequence[int]) -> dict[str, list[SeqsPoint]]:
    """What the default plan and, if `config` has a list, the explicit one capture at every max_num_seqs, by name."""
    swept = {DEFAULT: seqs_points(attrs.evolve(config, decoder_replay_cudagraph_capture_sizes=None), max_num_seqs)}
    if config.decoder_replay_cudagraph_capture_sizes:
        swept[EXPLICIT] = seqs_points(config, max_num_seqs)
    return swept


def seqs_points(
    config: ServingConfig, max_num_seqs: Iterable[int], shape: DecoderShape = FLASH_RANK
) -> list[SeqsPoint]:
    """What the plan of `config` captures at every max_num_seqs in turn, up to the first that is refused (P3, P7)."""
    points: list[SeqsPoint] = []
    for value in max_num_seqs:
        try:
            plan = make_plan(attrs.evolve(config, max_num_seqs=value))
        except ConfigError:
            break
        cost = plan_cost(plan, shape)
        largest = plan.replay_sizes[-1] if plan.replay_sizes else 0
        points.append(SeqsPoint(value, cost.num_replay_graphs, largest, cost.static_buffer_bytes))
    return points
