"""Executing notebooks so that the saved file stands without a kernel, and their pages for readers without Jupyter.

`python -m replay_sim.explore.notebooks FILE...` executes each in place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import plotly.io
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

import replay_sim
from replay_sim.whole_file import write_whole

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
CELL_TIMEOUT_SECONDS = 300
THIS_MACHINE = "this-machine"
"""The tag of cells whose outputs are of the machine that ran them, such as times."""

TEMPLATES = Path(__file__).parent / "templates"


class NotebookError(RuntimeError):
    """A notebook with a cell that fails; the message names the file, the error and the cell's source."""


def execute(path: Path) -> Any:
    """Run every cell of the notebook at `path` in its folder and return it, settled; the file stays as it was.

    Raises NotebookError for a cell that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,  # however a busy machine splits what a cell prints
        extra_arguments=["--log-level=ERROR"],
    )
    try:
        client.execute(env=_with_this_package(os.environ))
    except CellExecutionError as error:
        source = next(cell.source for cell in notebook.cells if _has_failed(cell))
        raise NotebookError(f"{path}: {error.ename}: {error.evalue}\nin the cell\n{source}") from error
    return settle(notebook)


def _has_failed(cell: Any) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", ()))


def settle(notebook: Any) -> Any:
    """Drop what needs a live kernel or names the interpreter, so that the same code leaves the same file; in place.

    Widgets keep the still picture that they offer beside their view.
    """
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if len(output.get("data", ())) > 1:
                output["data"].pop(WIDGET_VIEW, None)
    return notebook


def write_notebook(notebook: Any, path: Path) -> None:
    """Write the notebook whole or not at all."""
    write_whole(path, nbformat.writes(notebook) + "\n")


def notebook_page(notebook: Any, title: str, plotly_js: str) -> str:
    """The notebook as an HTML page that fetches nothing but `plotly_js`, a path relative to the page."""
    copy = nbformat.from_dict(notebook)
    copy.metadata["title"] = title
    for index, cell in enumerate(copy.cells):
        for number, output in enumerate(cell.get("outputs", ())):
            data = output.get("data", {})
            if PLOTLY in data:
                data["text/html"] = _figure_html(data.pop(PLOTLY), f"figure-{index}-{number}")
    exporter = HTMLExporter(
        extra_loaders=[jinja2.FileSystemLoader(TEMPLATES)], template_file="notebook.html.j2", embed_images=True
    )
    page, _ = exporter.from_notebook_node(copy, resources={"plotly_js": plotly_js})
    return str(page)


def _figure_html(figure: dict[str, Any], div_id: str) -> str:
    known = {key: figure[key] for key in ("data", "layout") if key in figure}
    return str(plotly.io.to_html(known, full_html=False, include_plotlyjs=False, div_id=div_id, validate=False))


def _with_this_package(environment: Any) -> dict[str, str]:
    """The environment in which a kernel imports this very package, also from a checkout that is not installed."""
    root = str(Path(replay_sim.__file__).parents[1])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def main(paths: Sequence[str]) -> None:
    """Execute the notebooks in place."""
    for path in map(Path, paths):
        write_notebook(execute(path), path)
        print(f"executed {path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
