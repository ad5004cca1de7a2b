"""Executing notebooks: what is kept, what is dropped, and their pages."""

import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from replay_sim.explore.notebooks import (
    PLOTLY,
    WIDGET_VIEW,
    NotebookError,
    execute,
    notebook_page,
    settle,
    write_notebook,
)

FIGURE = {"data": [{"type": "bar", "x": [1], "y": ["</script><b>x</b>"]}], "layout": {"title": {"text": "a bar"}}}


def notebook(*cells):
    return new_notebook(cells=list(cells))


def written(folder, *cells):
    path = folder / "one.ipynb"
    nbformat.write(notebook(*cells), path)
    return path


def test_a_notebook_is_executed_in_its_folder_with_this_package(tmp_path) -> None:
    (tmp_path / "data.txt").write_text("beside it")
    source = "import replay_sim\nprint(open('data.txt').read(), replay_sim.__version__)"
    path = written(tmp_path, new_code_cell(source))
    before = path.read_text()
    done = execute(path)
    assert done.cells[0].outputs[0].text.startswith("beside it ")
    assert path.read_text() == before
    write_notebook(done, path)
    saved = json.loads(path.read_text())
    assert "execution" not in saved["cells"][0]["metadata"] and "version" not in saved["metadata"]["language_info"]


def test_what_a_cell_prints_is_one_output_however_it_arrives(tmp_path) -> None:
    source = "import sys\nfor word in 'ab':\n    print(word)\n    sys.stdout.flush()"
    (output,) = execute(written(tmp_path, new_code_cell(source))).cells[0].outputs
    assert output.text == "a\nb\n"


def test_a_cell_that_fails_is_an_error_that_names_file_and_cell(tmp_path) -> None:
    with pytest.raises(NotebookError, match=r"one.ipynb: AssertionError: half\nin the cell\nassert False, 'half'$"):
        execute(written(tmp_path, new_code_cell("1"), new_code_cell("assert False, 'half'")))


def test_settling_drops_widgets_and_keeps_the_still_picture_beside_them() -> None:
    beside = new_output("execute_result", data={WIDGET_VIEW: {"model_id": "1"}, PLOTLY: FIGURE, "text/plain": "x"})
    alone = new_output("execute_result", data={WIDGET_VIEW: {"model_id": "2"}})
    whole = notebook(new_code_cell("x", outputs=[beside, alone]))
    whole.metadata["widgets"] = {"state": {}}
    settled = settle(whole)
    assert "widgets" not in settled.metadata
    assert set(settled.cells[0].outputs[0].data) == {PLOTLY, "text/plain"}
    assert set(settled.cells[0].outputs[1].data) == {WIDGET_VIEW}


def test_a_page_draws_its_figures_and_fetches_only_the_script_beside_it() -> None:
    output = new_output("display_data", data={PLOTLY: FIGURE})
    source = notebook(new_markdown_cell("# A page"), new_code_cell("draw()", outputs=[output]))
    page = notebook_page(source, "A <page>", "plotly.min.js")
    assert page.count("Plotly.newPlot") == 1 and "figure-1-0" in page
    assert re.findall(r'<(?:script|link|img)[^>]*\s(?:src|href)="([^"]*)"', page) == ["plotly.min.js"]
    assert "<title>A &lt;page&gt;</title>" in page
    assert "</script><b>x" not in page
    assert set(source.cells[1].outputs[0].data) == {PLOTLY}
