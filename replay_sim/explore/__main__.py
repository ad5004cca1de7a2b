"""`python -m replay_sim.explore`, the main job: report, executed notebooks and recommendation for one config."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import torch
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from replay_sim.explore.advice import advise, recommendation
from replay_sim.explore.evidence import gather
from replay_sim.explore.job import run_job
from replay_sim.explore.notebooks import NotebookError, execute, notebook_page, write_notebook
from replay_sim.explore.report import write_report
from replay_sim.whole_file import write_whole

MOST_AT_ONCE = 4
"""Kernels, each a process with decoders and figures of its own in memory."""


@click.command()
@click.argument("config", default="default")
@click.option("--trace", metavar="FILE", help="Requests from a trace.  [default: drawn from the bundled profile]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build"), show_default=True, help="Folder.")
@click.option(
    "--notebooks",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("notebooks"),
    show_default=True,
    help="Folder of notebooks to execute; none are if it does not exist.",
)
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True, help="Steps to run for real.")
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="Requests to draw.")
def main(config: str, trace: str | None, out: Path, notebooks: Path, steps: int, requests: int) -> None:
    """Plan, simulate, tune and run CONFIG, a preset's name or a JSON file, and write OUT/report and OUT/notebooks."""
    began = time.perf_counter()
    try:
        job = run_job(config, trace=trace, num_requests=requests, execute="auto", num_steps=steps)
        executed = execute_notebooks(notebooks, out / "notebooks")
        links = {os.path.relpath(page, out / "report"): title for page, title in executed.items()}
        found = gather(job)
        report = write_report(found, out / "report", notebooks=links)
    except (ValueError, OSError, NotebookError) as error:
        sys.exit(f"replay_sim.explore: {error}")
    click.echo(f"{recommendation(advise(found))}\n\nReport: {report}")
    click.echo(
        f"Planned {len(job.plan.replay_sizes)} replay graphs, simulated {job.simulation.steps:,} steps, ran {steps}, "
        f"executed {len(executed)} notebooks in {time.perf_counter() - began:.0f} s."
    )


def notebooks_at_once() -> int:
    """One on a machine with a GPU, whose times would be of all that run beside; elsewhere one a core, up to a few."""
    return 1 if torch.cuda.is_available() else min(MOST_AT_ONCE, os.cpu_count() or 1)


def execute_notebooks(source: Path, target: Path) -> dict[Path, str]:
    """Execute every notebook of `source` into `target`, each with a page; returns the pages and their titles.

    Raises NotebookError for a notebook that fails.
    """
    pages: dict[Path, str] = {}
    paths = sorted(source.glob("*.ipynb"))
    with ThreadPoolExecutor(notebooks_at_once()) as kernels:
        notebooks = list(tqdm(kernels.map(execute, paths), "notebooks", len(paths), disable=None, leave=False))
    for path, notebook in zip(paths, notebooks, strict=True):
        title = notebook.cells[0].source.splitlines()[0].lstrip("# ")
        write_notebook(notebook, target / path.name)
        page = target / f"{path.stem}.html"
        write_whole(page, notebook_page(notebook, title, "plotly.min.js"))
        pages[page] = title
    if pages:
        write_whole(target / "plotly.min.js", get_plotlyjs())
    return pages


if __name__ == "__main__":
    main()
