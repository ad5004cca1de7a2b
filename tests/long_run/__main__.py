"""The long run: steps of random worlds by number and seed; prints what was covered, failures, the first one shrunk."""

import platform
import sys
from collections import Counter
from importlib.metadata import version

import click
import torch
from long_run.runs import Report, possible_paths, quiet, run_seed, run_worlds
from tabulate import tabulate
from tqdm import tqdm

MOST_NAMED = 30
"""Paths that were missed are named one by one where they are no more."""


@click.command()
@click.option("--steps", type=click.IntRange(1), default=100_000, show_default=True, help="Steps to run at least.")
@click.option("--seed", default=1, show_default=True, help="Seed of the first world; the next ones follow it.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes; the figures are the same with any number.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Of the graphs.")
def main(steps: int, seed: int, workers: int, device: str) -> None:
    """Run at least so many steps, and exit with 1 if any was wrong."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("device is cuda: PyTorch finds no GPU here")
    quiet()
    with tqdm(total=steps, unit="step") as bar:

        def tell(of_world: Report) -> None:
            bar.update(of_world.tally.steps)
            for failure in of_world.failures.values():
                bar.write(failure, sys.stderr)

        report = run_worlds(seed, steps, tell, workers=workers, device=device)
    click.echo(summary(report, steps, seed, device))
    for failed in sorted(report.failures)[:1]:
        click.echo(run_seed(failed, device, shrink=True).failures.get(failed), err=True)
    sys.exit(bool(report.failures))


def summary(report: Report, steps: int, seed: int, device: str) -> str:
    """The figures of a run of at least so many steps in markdown: one line, the counts, and the paths."""
    tally, possible = report.tally, possible_paths()
    assert set(tally.paths) <= possible, f"paths that no step should take: {set(tally.paths) - possible}"
    missed = possible - set(tally.paths)
    lines = [
        f"{tally.steps:,} steps of {report.worlds:,} worlds from seed {seed}: {len(report.failures)} failures, "
        f"{len(tally.paths)} of {len(possible)} dispatch paths, {report.seconds:,.0f} s of processor time "
        f"({device}; python {platform.python_version()}, torch {torch.__version__}, "
        f"hypothesis {version('hypothesis')}).",
        *([f"Stopped early, after {len(report.failures)} failures."] if tally.steps < steps else []),
        "Of these steps: " + ", ".join(f"{count:,} {what}" for what, count in tally.counts.most_common()) + ".",
        *(f"Not covered: {', '.join(path)}" for path in sorted(missed) if len(missed) <= MOST_NAMED),
        "",
        _path_table(tally.paths),
    ]
    return "\n".join(lines)


def _path_table(paths: Counter[tuple[str, str, str, str, str]]) -> str:
    """Steps by model reason, replay mode and reason; a column for each form of graphs and sharing of the pool."""
    columns = sorted({path[3:] for path in paths})
    rows = sorted({path[:3] for path in paths})
    table = [[*row, *(paths[(*row, *column)] for column in columns)] for row in rows]
    headers = ("Model", "Replay mode", "Replay layers", *(" ".join(column) for column in columns))
    return tabulate(table, headers, tablefmt="pipe")


if __name__ == "__main__":
    main()
