"""`replay-sim report`: the standalone HTML page of a serving config and a workload."""

import click

from replay_sim.commands import _options


@click.command("report", short_help="Write a page: what to change, and the figures behind it.")
@click.argument("config")
@_options.trace
@click.option("--out", required=True, metavar="DIR", help="The folder to write index.html into.")
@_options.requests
@_options.seed
@click.option(
    "--execute",
    type=click.Choice(("none", "auto", "host", "cuda")),
    default="none",
    show_default=True,
    help="Also run steps of the reference decoder with captured graphs, on a CPU or a GPU.",
)
@click.option("--steps", type=_options.counted, default=50, show_default=True, help="How many steps to run.")
@click.pass_context
def command(
    context: click.Context,
    config: str,
    trace: str | None,
    out: str,
    requests: int,
    seed: int,
    execute: str,
    steps: int,
) -> None:
    """Write a page about CONFIG, a preset's name or a JSON file: what to change, and the figures behind it.

    The page opens from disk without a network.
    """
    import time
    from pathlib import Path

    from replay_sim.config import load_config
    from replay_sim.config.errors import printable
    from replay_sim.plan import make_plan

    began = time.perf_counter()
    if execute == "none":
        _options.refuse_unused(
            context, ("steps",), ": it needs execute host, cuda or auto, without which no step is run"
        )
    _options.refuse_beside_trace(context, ("requests", "seed") if execute == "none" else ("requests",))
    make_plan(load_config(config))  # bad settings are refused before the slow imports
    from replay_sim.explore.evidence import gather
    from replay_sim.explore.job import run_job
    from replay_sim.explore.report import write_report

    job = run_job(
        config,
        trace=trace,
        num_requests=requests,
        seed=seed,
        execute=None if execute == "none" else execute,
        num_steps=steps,
    )
    path = write_report(gather(job), Path(out))
    click.echo(
        f"Wrote {printable(str(path))}, {path.stat().st_size / 1e6:.1f} MB: "
        f"{len(job.plan.replay_sizes)} replay graphs, {job.simulation.steps:,} steps, "
        f"in {time.perf_counter() - began:.1f} s."
    )
