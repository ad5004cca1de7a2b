"""`replay-sim simulate`: a workload through scheduler and dispatch, as tables or as JSON."""

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import click

from replay_sim.commands import _options
from replay_sim.progress import progress_bar

if TYPE_CHECKING:
    from replay_sim.plan.capture_plan import CapturePlan
    from replay_sim.workload.simulation import Simulation

NO_TIMES = (
    "counted, not timed: the step time is unknown, so arrival times are ignored and every request waits from the start"
)


@click.command("simulate", short_help="Which graphs the steps of a workload take, and why.")
@click.argument("config")
@_options.trace
@click.option("--profile", metavar="NAME", help="Requests drawn from a bundled profile.  [default: conversation]")
@_options.requests
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
    "--execute",
    type=click.Choice(("none", "auto", "host", "cuda")),
    default="none",
    show_default=True,
    help="Also run the steps of the reference decoder with captured graphs, on a CPU or a GPU; needs --steps.",
)
@click.option("--rows", type=click.IntRange(min=1), default=20, show_default=True, help="Most rows of a printed table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    config: str,
    trace: str | None,
    profile: str | None,
    requests: int,
    steps: int | None,
    seed: int,
    acceptance_rate: float,
    prompt_logprobs_share: float,
    execute: str,
    rows: int,
    as_json: bool,
) -> None:
    """Run a workload through scheduler and dispatch: which graphs its steps take, and why.

    CONFIG is a preset's name or a JSON file. Without --execute no device is needed and no time is claimed.
    """
    from replay_sim.config import load_config
    from replay_sim.plan.capture_plan import make_plan
    from replay_sim.workload.scheduler import Scheduler
    from replay_sim.workload.settings import SchedulerSettings
    from replay_sim.workload.simulation import Simulation, planned_dispatch
    from replay_sim.workload.source import open_workload

    began = time.perf_counter()
    if execute != "none" and (as_json or steps is None or acceptance_rate < 1 or prompt_logprobs_share):
        raise ValueError(
            f"execute is {execute!r}: it needs steps, and takes none of json, acceptance-rate, prompt-logprobs-share"
        )
    serving = load_config(config)
    plan = make_plan(serving)
    workload, source = open_workload(trace, profile=profile, num_requests=requests, seed=seed)
    if execute != "none":
        from replay_sim.measure.run_steps import execute_steps, make_backend

        assert steps is not None
        report = execute_steps(
            serving, tuple(workload), num_steps=steps, backend=make_backend(execute), seed=seed, progress=progress_bar
        )
        click.echo(f"Workload: {source}\n\n{report.markdown(rows)}")
        return
    settings = SchedulerSettings.from_config(
        serving, acceptance_rate=acceptance_rate, prompt_logprobs_share=prompt_logprobs_share, seed=seed
    )
    scheduler = Scheduler(workload, settings, dispatch=planned_dispatch(plan))
    simulation = Simulation()
    for _ in progress_bar(simulation.watch(itertools.islice(scheduler.steps(), steps)), "steps"):
        pass
    if as_json:
        drawn = {"seed": seed, "acceptance_rate": acceptance_rate, "prompt_logprobs_share": prompt_logprobs_share}
        click.echo(json.dumps(_as_dict(simulation, plan, {"config": config, "workload": source} | drawn)))
    else:
        click.echo(_as_text(simulation, plan, source, rows, time.perf_counter() - began))


def _as_dict(simulation: "Simulation", plan: "CapturePlan", about: dict[str, Any]) -> dict[str, Any]:
    """The JSON object: what was run, the plan, the counts and both tables."""
    return {
        **about,
        "source": NO_TIMES,
        "cudagraph_capture_sizes": plan.model_sizes,
        "decoder_replay_cudagraph_capture_sizes": plan.replay_sizes,
        "decoder_replay_trim_threshold": plan.trim_threshold,
        "notes": plan.notes,
        "summary": simulation.as_dict(),
        "dispatch": simulation.table.as_dict(),
    }


def _as_text(simulation: "Simulation", plan: "CapturePlan", source: str, limit: int, seconds: float) -> str:
    """The tables, the counts, and a line that says what was done."""
    counts = simulation.as_dict()
    lines = [
        f"Workload: {source}",
        f"Dispatch is {NO_TIMES}.",
        *(f"Note: {note}" for note in plan.notes),
        "",
        simulation.table.markdown(limit),
        "",
        f"Tokens: {simulation.tokens:,}, and {simulation.token_pads:,} pads ({counts['token_pad_share']:.1%}).",
        f"Steps with a replay batch: {simulation.replay_steps:,} ({counts['replay_step_share']:.1%}), of "
        f"{simulation.replay_rows:,} rows and {simulation.replay_pads:,} pads ({counts['replay_pad_share']:.1%}); "
        f"{simulation.trimmed_rows:,} rows trimmed.",
        f"Simulated {simulation.steps:,} steps in {seconds:.1f} s; {simulation.requests_finished:,} requests finished.",
    ]
    return "\n".join(lines)
