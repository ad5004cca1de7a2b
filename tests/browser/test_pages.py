"""The notebooks in JupyterLab and the report from disk, as a reader meets them in a browser.

One file, so that one worker has the one browser.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

if TYPE_CHECKING:
    from browser.lab import OpenNotebook

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"


@attrs.frozen
class Move:
    """A key on a control of a notebook's explorer, and the word that it leads to or by how much it moves a number."""

    notebook: str
    explorer: str
    label: str
    key: str
    control: str
    to: int | str


MOVES = [
    Move("01_tour_of_one_step", "TourExplorer", "window (rows)", "ArrowRight", "window", 1),
    Move("02_capture_sizes", "PlanExplorer", "window (rows)", "ArrowRight", "window", 16),
    Move("03_which_rows_are_kept", "BatchComposer", "window (rows)", "ArrowLeft", "window", -1),
    Move("04_graph_capture", "CaptureExplorer", "num_layers", "ArrowRight", "num_layers", 1),
    Move("05_pool_reuse", "PoolExplorer", "arrangement", "ArrowDown", "arrangement", "own_stream"),
    Move("06_speedup", "SpeedupExplorer", "num_reqs (requests a step)", "ArrowRight", "num_reqs", 1),
    Move("07_trim_threshold", "ThresholdExplorer", "num_reqs (requests a step)", "ArrowRight", "num_reqs", 1),
    Move("08_your_workload", "WorkloadExplorer", "at most (replay graphs)", "ArrowLeft", "max_graphs", -1),
    Move("09_sweeps", "SweepExplorer", "plan", "ArrowDown", "plan", "eager"),
]


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory) -> Iterator[str]:
    from browser.lab import running_lab

    folder, work = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, folder)
    with running_lab(folder, work) as url:
        yield url


@pytest.fixture(scope="module", params=MOVES, ids=lambda move: move.notebook)
def move(request) -> Move:
    return request.param


@pytest.fixture(scope="module")
def notebook(browser, lab, move) -> Iterator[OpenNotebook]:
    """The notebook, opened and not run yet."""
    from browser.lab import OpenNotebook

    opened = OpenNotebook(browser.new_page(), lab, f"{move.notebook}.ipynb")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def run(notebook) -> OpenNotebook:
    """The notebook after all of its cells have run."""
    notebook.run_all()
    return notebook


def test_committed_figures_show_before_anything_runs(notebook) -> None:
    from playwright.sync_api import expect

    outputs = [output.get("data", {}) for cell in notebook.code_cells() for output in cell["outputs"]]
    committed = sum(PLOTLY in data for data in outputs)
    assert committed >= 2 and not any(WIDGET in data for data in outputs)
    expect(notebook.figures).to_have_count(committed)


def test_all_cells_run_in_order_without_an_error(run) -> None:
    cells = run.code_cells()
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert run.ask("len(In) - 1") == len(cells), "these are the cells of this kernel"


def test_every_figure_is_drawn_and_the_explorer_is_live(run) -> None:
    from playwright.sync_api import expect

    outputs = [output.get("data", {}) for cell in run.code_cells() for output in cell["outputs"]]
    expect(run.figures).to_have_count(sum(PLOTLY in data for data in outputs))
    assert sum(WIDGET in data for data in outputs) == 1
    expect(run.output.locator(".js-plotly-plot")).to_have_count(1)


def test_the_live_figure_takes_the_width_of_its_page_and_nothing_scrolls_sideways(run) -> None:
    from browser.lab import MOVES_MS

    fits = """output => {
        const width = output.querySelector('.main-svg').getBoundingClientRect().width;
        return 0.9 * output.clientWidth < width && output.scrollWidth <= output.clientWidth;
    }"""
    run.page.wait_for_function(fits, arg=run.output.element_handle(), timeout=MOVES_MS)


def test_a_key_moves_a_control_and_figure_and_text_follow_and_reset_brings_them_back(run, move) -> None:
    name = next(name for name in ("explorer", "composer") if run.ask(f"{name!r} in globals()"))
    assert run.ask(f"type({name}).__name__") == move.explorer
    before, state = run.shown(), run.ask(f"{name}.state")
    run.control(move.label).press(move.key)
    after, said = run.shown_after(before, name, "review")
    assert said["state"] == state | {
        move.control: move.to if isinstance(move.to, str) else state[move.control] + move.to
    }
    assert after["data"] == said["data"] and after["title"] == said["title"] and said["sentence"] in after["words"]
    assert after["data"] != before["data"] and after["words"] != before["words"]
    run.output.get_by_role("button", name="Reset", exact=True).press("Enter")
    back, said = run.shown_after(after, name, "review")
    assert said["state"][move.control] == state[move.control]
    assert said["state"] == run.ask(f"{name}.reset() or {name}.state"), "as from Python"
    assert back["data"] == said["data"] and back["title"] == said["title"] and said["sentence"] in back["words"]


def test_a_letter_on_a_control_is_no_command_of_jupyterlab(run, move) -> None:
    """In command mode `b` would insert a cell below."""
    cells = run.code_cells()
    run.control(move.label).press("b")
    assert run.code_cells() == cells


def test_nothing_is_wrong_in_the_console_and_nothing_is_asked_of_the_network(run) -> None:
    assert not run.problems


def test_a_control_is_moved_in_every_explorer() -> None:
    from test_house import MODULES, name_of

    from replay_sim.explore.explorer import Explorer

    for path in MODULES:
        if path.parent.name == "explore" and "(Explorer)" in path.read_text():
            __import__(name_of(path))
    assert {kind.__name__ for kind in Explorer.__subclasses__()} == {move.explorer for move in MOVES}
    assert {move.notebook for move in MOVES} == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_the_report_opens_from_disk_and_asks_for_nothing_else(browser, tmp_path) -> None:
    from browser.lab import problems_of
    from playwright.sync_api import expect

    from replay_sim import cli

    with pytest.raises(SystemExit, match="0"):
        cli.main(["report", "default", "--requests", "50", "--out", str(tmp_path)])
    path = tmp_path / "index.html"
    page = browser.new_page()
    problems = problems_of(page, allowed=path.as_uri())
    page.goto(path.as_uri())
    figures = page.locator(".plotly-graph-div")
    assert figures.count() >= 3
    expect(page.locator(".plotly-graph-div:has(.main-svg)")).to_have_count(figures.count())
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing to scroll sideways"
    assert not problems
    page.close()


def test_a_notebook_page_opens_from_disk_with_its_figures_and_asks_for_the_one_script(browser, tmp_path) -> None:
    import nbformat
    from browser.lab import problems_of
    from playwright.sync_api import expect
    from plotly.offline import get_plotlyjs

    from replay_sim.explore.notebooks import notebook_page

    notebook = nbformat.read(ROOT / "notebooks" / "02_capture_sizes.ipynb", as_version=4)
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    (tmp_path / "plotly.min.js").write_text(get_plotlyjs())
    path = tmp_path / "notebook.html"
    path.write_text(notebook_page(notebook, "02", "plotly.min.js"))
    page = browser.new_page()
    problems = problems_of(page, allowed=tmp_path.as_uri())
    page.goto(path.as_uri())
    expect(page.locator(".plotly-graph-div:has(.main-svg)")).to_have_count(sum(PLOTLY in data for data in outputs))
    assert not problems
    page.close()
