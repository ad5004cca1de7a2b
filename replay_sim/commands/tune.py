"""`replay-sim tune`: the capture sizes and threshold for a workload, and the config to paste."""

import json
import math
from typing import TYPE_CHECKING

import click

from replay_sim.commands import _options
from replay_sim.config.errors import printable
from replay_sim.progress import progress_bar

if TYPE_CHECKING:
    from replay_sim.config import ServingConfig
    from replay_sim.explore.tuning_costs import FittedCosts
    from replay_sim.explore.tuning_steps import StepCounts
    from replay_sim.plan.capture_plan import CapturePlan

MIB = 1 << 20
DRAWN = "requests", "seed"
"""What only drawn requests look at, as every draft token is accepted."""


@click.command("tune", short_help="Best sizes and threshold for a workload, and the config to paste.")
@click.argument("config")
@_options.trace
@click.option("--statistics", metavar="FILE", help="A CUDA-graph statistics table that a server logged; no trace.")
@click.option("--profile", metavar="NAME", help="Requests drawn from a bundled profile.  [default: conversation]")
@_options.requests
@_options.seed
@click.option("--max-graphs", type=_options.seeded, metavar="K", help="Most replay graphs.  [default: as P2's rule]")
@click.option(
    "--max-model-graphs", type=_options.counted, metavar="M", help="Most PIECEWISE graphs.  [default: as CONFIG]"
)
@click.option("--max-capture-s", type=click.FloatRange(0), metavar="S", help="Most seconds to capture all graphs.")
@click.option("--max-pool-mib", type=click.FloatRange(0), metavar="MIB", help="Most MiB of graph pools; takes minutes.")
@click.option("--emit", type=click.Choice(["vllm"]), help="Print the config to paste into that engine, nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def command(
    context: click.Context,
    config: str,
    trace: str | None,
    statistics: str | None,
    profile: str | None,
    requests: int,
    seed: int,
    max_graphs: int | None,
    max_model_graphs: int | None,
    max_capture_s: float | None,
    max_pool_mib: float | None,
    emit: str | None,
    as_json: bool,
) -> None:
    """Find the sizes of least expected step time for CONFIG, a preset's name or a JSON file, and a workload.

    Tuned on the first half of the workload's steps, judged on the second.
    """
    from replay_sim.config import load_config
    from replay_sim.explore import tuning_report, vllm_export
    from replay_sim.explore.tuning import tune
    from replay_sim.explore.tuning_costs import fitted_costs
    from replay_sim.explore.tuning_limits import Limits
    from replay_sim.explore.workload_steps import BUSIEST
    from replay_sim.plan.capture_plan import make_plan

    _refuse(context)
    serving = load_config(config)
    limits = Limits(
        max_graphs=max_graphs,
        max_model_graphs=max_model_graphs,
        max_capture_s=max_capture_s,
        max_pool_bytes=None if max_pool_mib is None else int(max_pool_mib * MIB),
    )
    costs = fitted_costs(serving)
    assumed: tuple[str, ...] = ()
    unseen: StepCounts | None = None
    if statistics is not None:
        seen, source, assumed = _from_statistics(statistics, make_plan(serving))
    else:
        assumed = (BUSIEST,)
        seen, unseen, source = _from_requests(serving, costs, trace, profile, requests, seed)
    tuning = tune(serving, seen, unseen, costs, limits, _pool_bytes)
    if emit:
        named = [(chosen.name, chosen.config) for chosen in tuning.plans]
        keeps_own = tuning_report.keeps_own(tuning)
        pasted = tuning.own if keeps_own else tuning.tuned
        told = [tuning_report.headline(tuning), *([] if keeps_own else tuning_report.overrides(tuning))]
        lines = "\n".join(f"# {line}" for line in told)
        click.echo(f"{lines}\n\n{vllm_export.emit_text(pasted.config, named)}")
        return
    guesses = costs.guesses(tuning.tuned.plan, seen)
    about = tuning_report.About(config=config, workload=source, assumed=assumed, guesses=guesses)
    click.echo(json.dumps(tuning_report.as_dict(tuning, about)) if as_json else tuning_report.as_text(tuning, about))


def _refuse(context: click.Context) -> None:
    """Raise ValueError for options that cannot go together, that change nothing, or that are no numbers."""
    given = context.params
    emit, statistics = given["emit"], given["statistics"]
    if emit and given["as_json"]:
        raise ValueError(f"emit is {emit!r} and json is given: only one of them may be")
    if statistics is not None and (given["trace"] is not None or given["profile"] is not None):
        raise ValueError(f"statistics is {statistics!r}: neither trace nor profile may be given with it")
    _options.refuse_beside_trace(context, DRAWN)
    if statistics is not None:
        why = f" and statistics is {statistics!r}, of which nothing is drawn: only one of them may be given"
        _options.refuse_unused(context, DRAWN, why)
    for name in ("max_capture_s", "max_pool_mib"):
        limit = given[name]
        if limit is not None and not math.isfinite(limit):
            raise ValueError(f"{name}: {limit} is not allowed; it must be finite and at least 0")


def _from_statistics(path: str, plan: "CapturePlan") -> tuple["StepCounts", str, tuple[str, ...]]:
    """The steps of a logged table, all of them to tune on: it has no order, so that none are left to judge on."""
    from pathlib import Path

    from replay_sim.explore.tuning_steps import from_statistics
    from replay_sim.workload.statistics_table import read_statistics

    counted = from_statistics(read_statistics(path, plan.max_num_batched_tokens), plan)
    words = f"{counted.counts.total():,} steps of the statistics table {printable(Path(path).name)}"
    return counted.counts, words, (*counted.assumed, "The table has no order: judged on what it was tuned on.")


def _from_requests(
    serving: "ServingConfig",
    costs: "FittedCosts",
    trace: str | None,
    profile: str | None,
    requests: int,
    seed: int,
) -> tuple["StepCounts", "StepCounts", str]:
    """Both halves of the steps of a trace or a profile, and the workload in words."""
    from replay_sim.explore.workload_steps import scheduled_halves
    from replay_sim.workload.source import open_workload

    workload, source = open_workload(trace, profile=profile, num_requests=requests, seed=seed)
    return *scheduled_halves(serving, workload, costs, seed=seed, progress=progress_bar), source


def _pool_bytes(plan: "CapturePlan") -> int:
    """Predicted bytes of the graph pools, in the arrangement that the system picks."""
    from replay_sim.config import FLASH_RANK
    from replay_sim.decoder.pool_prediction import record_plan
    from replay_sim.decoder.pool_report import chosen_pool_bytes

    recorded = record_plan(FLASH_RANK, plan, progress_bar)
    return chosen_pool_bytes(recorded, recorded.predict())
