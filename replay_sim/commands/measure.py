"""`replay-sim measure`: runs the real system on this machine's device and writes records."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from replay_sim.commands import _options
from replay_sim.config import SHAPES
from replay_sim.config.errors import printable

SUITES = ("run", "pool", "movement", "region", "laptop", "steps")
SWEEPS = ("threshold", "decode", "requests", "prompt", "experts", "window", "budget", "layers", "capture")
ARMS = (
    "eager_off",
    "eager_replay",
    "piecewise_off",
    "piecewise_replay_eager",
    "piecewise_replay_graphs",
    "piecewise_replay_one_launch",
    "full",
)
PATHS = ("preset", "trace", "histories")
_ON_A_DEVICE = ("run", "pool", "movement", "region", "steps")
READ_BY = {
    "preset": ("run", "pool", "region", *(name for name in SWEEPS if name != "window")),
    "trace": ("run",),
    "steps": ("run",),
    "shape": _ON_A_DEVICE,
    "backend": _ON_A_DEVICE,
    "seed": _ON_A_DEVICE,
    "arrangement": ("pool",),
    "histories": ("pool",),
    "sweep": ("steps",),
    "arm": tuple(name for name in SWEEPS if name not in ("layers", "capture")),
}
"""What reads an option: suites, and sweeps of the steps suite where not all of them do."""


@click.command("measure", short_help="Run the real system on this device; write records.")
@click.option(
    "--preset", metavar="NAME", help="Serving config: a preset's name or a JSON file.  [default: b200-tp4-c8]"
)
@click.option(
    "--suite", type=click.Choice(SUITES), multiple=True, help="What to measure; may be repeated.  [default: all]"
)
@click.option("--trace", metavar="FILE", help="Requests for the run.  [default: the bundled conversation profile]")
@click.option("--steps", type=_options.counted, default=50, show_default=True, help="Steps of the run.")
@click.option(
    "--shape", type=click.Choice(sorted(SHAPES)), help="Decoder shape.  [default: flash-rank on a GPU, tiny on a CPU]"
)
@click.option(
    "--backend", type=click.Choice(("auto", "cuda", "host")), default="auto", show_default=True, help="Where it runs."
)
@click.option("--seed", type=_options.seeded, default=0, show_default=True, help="Of weights and workload.")
@click.option(
    "--arrangement", type=click.Choice(("shared", "own_stream", "own_pool")), help="pool: only this one, as it is used."
)
@click.option("--histories", metavar="DIR", help="pool: folder for the allocation history of every capture.")
@click.option(
    "--sweep", type=click.Choice(SWEEPS), multiple=True, help="steps: only this one; may be repeated.  [default: all]"
)
@click.option(
    "--arm", type=click.Choice(ARMS), multiple=True, help="steps: only this arm; may be repeated.  [default: all]"
)
@click.option("--out", required=True, metavar="DIR", help="Folder that the records are written to.")
@click.pass_context
def command(
    context: click.Context,
    preset: str | None,
    suite: tuple[str, ...],
    trace: str | None,
    steps: int,
    shape: str | None,
    backend: str,
    seed: int,
    arrangement: str | None,
    histories: str | None,
    sweep: tuple[str, ...],
    arm: tuple[str, ...],
    out: str,
) -> None:
    """Run the real system on this machine's device and write records with their provenance.

    run: STEPS steps of the config on the workload with real graphs. pool: reserved memory of each sharing arrangement,
    each in a fresh process. movement: gather and scatter of rows against the measured copy bandwidth. region: the
    replay region in each form of its graphs. steps: step
    times of every arm, eager and in graphs, with and without replay, over sweeps of what a step holds; several minutes.
    """
    refuse_unread(context)
    from replay_sim.measure.suites import make_request, run_suites
    from replay_sim.replay.sharing import PoolSharing

    request = make_request(
        command=remaking_command(context),
        config_name=preset,
        trace=None if trace is None else Path(trace),
        shape=None if shape is None else SHAPES[shape],
        backend=backend,
        steps=steps,
        seed=seed,
        arrangement=None if arrangement is None else PoolSharing(arrangement),
        histories=None if histories is None else Path(histories),
        sweeps=sweep or SWEEPS,
        arms=arm or ARMS,
    )
    for path, summary in run_suites(suite or SUITES, request, Path(out)):
        click.echo(f"{summary}\nwrote {printable(str(path))}\n")


def refuse_unread(context: click.Context) -> None:
    """Raise ValueError for an option that was given and that nothing of what is to be measured reads."""
    measured = set(context.params["suite"] or SUITES)
    if "steps" in measured:
        measured.update(context.params["sweep"] or SWEEPS)
    for option, readers in READ_BY.items():
        if measured.isdisjoint(readers):
            sweeps = [name for name in readers if name in SWEEPS]
            needed = [*(name for name in readers if name in SUITES), *(["steps"] if sweeps else [])]
            of_steps = f" with sweep {_any_of(sweeps)}" if sweeps else ""
            _options.refuse_unused(context, (option,), f": it needs suite {_any_of(needed)}{of_steps}")


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def remaking_command(context: click.Context) -> str:
    """The command that remakes the records on any machine: the options given, files by name, into `records`."""
    words = ["replay-sim", "measure"]
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given = context.params[name]
            for value in given if parameter.multiple else (given,):
                words += [parameter.opts[0], _elsewhere(name, str(value))]
    return shlex.join(words)


def _elsewhere(option: str, value: str) -> str:
    """An option's value without the folders of this machine."""
    if option == "out":
        return "records"
    return printable(Path(value).name or value) if option in PATHS else value
