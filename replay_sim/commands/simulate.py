"""`replay-sim simulate`: a workload through scheduler and dispatch, as tables or as JSON."""

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import click

from replay_sim.commands import _options
from replay_sim.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replay_sim.config import ServingConfig
    from replay_sim.explore.tuning_costs import FittedCosts
    from replay_sim.plan.capture_plan import CapturePlan
    from replay_sim.workload.simulation import Simulation
    from replay_sim.workload.trace import TraceRequest

NOT_EXECUTED = ("as_json", "prompt_logprobs_share", "request_rate", "burstiness", "prefix_cache_blocks", "timed")
"""Options that real steps do not take."""
NO_TIMES = (
    "counted, not timed: the step time is unknown, so arrival times are ignored and every request waits from the start"
)


@click.command("simulate", short_help="Which graphs the steps of a workload take, and why.")
@click.argument("config")
@_options.trace
@click.option("--profile", metavar="NAME", help="Requests drawn from a bundled profile.  [default: conversation]")
@_options.requests
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="R",
    help="Drawn requests that arrive in a second.  [default: as the profile]",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    metavar="B",
    help="Gaps between drawn arrivals: 1 is a Poisson process, less is bursts.  [default: as the profile]",
)
@click.option("--timed", is_flag=True, help="In virtual time, by the bundled step-time model: arrivals count.")
@click.option("--steps", type=_options.counted, metavar="N", help="Stop after N steps.  [default: at the end]")
@_options.seed
@click.option(
    "--acceptance-rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Chance that a draft token is accepted after those before it.",
)
@click.option(
    "--prompt-logprobs-share",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of requests whose prompt rows are all read.",
)
@click.option(
    "--prefix-cache-blocks",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Blocks of 512 prompt tokens in the prefix cache, for a trace with prefix hashes.",
)
@click.option(
    "--execute",
    type=click.Choice(("none", "auto", "host", "cuda")),
    default="none",
    show_default=True,
    help="Also run the steps of the reference decoder with captured graphs, on a CPU or a GPU; needs --steps.",
)
@click.option("--rows", type=click.IntRange(min=1), default=20, show_default=True, help="Most rows of a printed table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def command(
    context: click.Context,
    config: str,
    trace: str | None,
    profile: str | None,
    requests: int,
    request_rate: float | None,
    burstiness: float | None,
    timed: bool,
    steps: int | None,
    seed: int,
    acceptance_rate: float,
    prompt_logprobs_share: float,
    prefix_cache_blocks: int,
    execute: str,
    rows: int,
    as_json: bool,
) -> None:
    """Run a workload through scheduler and dispatch: which graphs its steps take, and why.

    CONFIG is a preset's name or a JSON file. Without --execute no device is needed; without --timed no time is
    claimed, and arrivals do not count.
    """
    from replay_sim.config import load_config
    from replay_sim.plan.capture_plan import make_plan
    from replay_sim.workload.scheduler import Scheduler
    from replay_sim.workload.settings import SchedulerSettings
    from replay_sim.workload.simulation import Simulation, planned_dispatch
    from replay_sim.workload.source import open_workload

    began = time.perf_counter()
    _refuse_unused(context)
    serving = load_config(config)
    plan = make_plan(serving)
    workload, source = open_workload(
        trace, profile=profile, num_requests=requests, seed=seed, request_rate=request_rate, burstiness=burstiness
    )
    if prefix_cache_blocks and not any(request.prefix_hashes for request in workload):
        raise ValueError(
            f"prefix_cache_blocks is {prefix_cache_blocks}: it needs prefix hashes, and {source} have none"
        )
    if execute != "none":
        assert steps is not None
        _execute(serving, workload, source, execute, steps, seed, rows)
        return
    drawn = {"seed": seed, "acceptance_rate": acceptance_rate, "prompt_logprobs_share": prompt_logprobs_share}
    drawn |= {"prefix_cache_blocks": prefix_cache_blocks}
    settings = SchedulerSettings.from_config(serving, **drawn)
    costs = _costs(serving) if timed else None
    how = NO_TIMES if costs is None else f"in virtual time, {costs.source}"
    step_time = None if costs is None else costs.seconds
    scheduler = Scheduler(workload, settings, dispatch=planned_dispatch(plan), step_time=step_time)
    simulation = Simulation()
    for _ in progress_bar(simulation.watch(itertools.islice(scheduler.steps(), steps)), "steps"):
        pass
    guesses = () if costs is None else costs.guesses_of_table(simulation.table)
    if as_json:
        about = {"config": config, "workload": source, "source": how, "outside_of_what_was_measured": guesses} | drawn
        click.echo(json.dumps(_as_dict(simulation, plan, about)))
    else:
        click.echo(_as_text(simulation, (*plan.notes, *guesses), source, how, rows, time.perf_counter() - began))


def _refuse_unused(context: click.Context) -> None:
    """Raise ValueError for an option that would change nothing, given what else is or is not given."""
    given = context.params
    execute, lost = given["execute"], any(given[name] for name in NOT_EXECUTED) or given["acceptance_rate"] < 1
    if execute != "none" and (given["steps"] is None or lost):
        names = ", ".join(name.removeprefix("as_") for name in (*NOT_EXECUTED, "acceptance_rate"))
        raise ValueError(f"execute is {execute!r}: it needs steps, and takes none of {names}")
    seeded = execute != "none" or given["acceptance_rate"] < 1 or given["prompt_logprobs_share"]
    _options.refuse_beside_trace(context, ("requests",) if seeded else ("requests", "seed"))
    if given["trace"] is None:
        why = ": it needs a trace with prefix hashes, which drawn requests have not"
        _options.refuse_unused(context, ("prefix_cache_blocks",), why)
        if not given["timed"]:
            why = ": it needs timed, without which every request waits from the start"
            _options.refuse_unused(context, ("request_rate", "burstiness"), why)
    if given["as_json"]:
        _options.refuse_unused(context, ("rows",), " and json is given, which prints all rows: only one of them may be")


def _execute(
    serving: "ServingConfig",
    workload: "Iterable[TraceRequest]",
    source: str,
    backend: str,
    steps: int,
    seed: int,
    rows: int,
) -> None:
    """Run the steps for real, and print what ran."""
    from replay_sim.measure.run_steps import execute_steps, make_backend

    report = execute_steps(
        serving, tuple(workload), num_steps=steps, backend=make_backend(backend), seed=seed, progress=progress_bar
    )
    click.echo(f"Workload: {source}\n\n{report.markdown(rows)}")


def _costs(serving: "ServingConfig") -> "FittedCosts":
    """What steps cost by the bundled model; ValueError if none is bundled."""
    from replay_sim.explore.tuning_costs import fitted_costs

    return fitted_costs(serving)


def _as_dict(simulation: "Simulation", plan: "CapturePlan", about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object: what was run, the plan, the counts and both tables."""
    times = simulation.times()
    return {
        **about,
        "cudagraph_capture_sizes": plan.model_sizes,
        "decoder_replay_cudagraph_capture_sizes": plan.replay_sizes,
        "decoder_replay_trim_threshold": plan.trim_threshold,
        "notes": plan.notes,
        "summary": simulation.as_dict(),
        "histograms": simulation.histograms(),
        "dispatch": simulation.table.as_dict(),
    } | ({} if times is None else {"times": times})


def _as_text(
    simulation: "Simulation", notes: "Sequence[str]", source: str, how: str, limit: int, seconds: float
) -> str:
    """The tables, the counts, and a line that says what was done."""
    counts = simulation.as_dict()
    lines = [
        f"Workload: {source}",
        f"Dispatch is {how}.",
        *(f"Note: {note}" for note in notes),
        "",
        simulation.table.markdown(limit),
        "",
        f"Tokens: {simulation.tokens:,}, and {simulation.token_pads:,} pads ({counts['token_pad_share']:.1%}).",
        f"Steps with a replay batch: {simulation.replay_steps:,} ({counts['replay_step_share']:.1%}), of "
        f"{simulation.replay_rows:,} rows and {simulation.replay_pads:,} pads ({counts['replay_pad_share']:.1%}); "
        f"{simulation.trimmed_rows:,} rows trimmed.",
        *_time_lines(simulation),
        *([f"Prefix hits saved {simulation.cached_tokens:,} prompt tokens."] if simulation.cached_tokens else []),
        f"Simulated {simulation.steps:,} steps in {seconds:.1f} s; {simulation.requests_finished:,} requests finished.",
    ]
    return "\n".join(lines)


def _time_lines(simulation: "Simulation") -> list[str]:
    """A line for each kind of time that is known: median and 99th percentile in milliseconds."""
    names = ("Step time", simulation.step_times), ("TTFT", simulation.ttft)
    kinds = *names, ("Time per output token", simulation.time_per_output_token)
    return [
        f"{name}: median {times.quantile(0.5) * 1e3:,.2f} ms, p99 {times.quantile(0.99) * 1e3:,.2f} ms."
        for name, times in kinds
        if times.count
    ]
