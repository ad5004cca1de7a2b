"""The rules that every notebook keeps, and that its committed outputs come from this code."""

import json
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_LINES = 12
MOST_BYTES = 300_000


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def test_there_are_notebooks_numbered_in_order() -> None:
    assert NOTEBOOKS and all(path.stem[:2].isdigit() and path.stem[2] == "_" for path in NOTEBOOKS)


def test_it_opens_with_its_question_and_ends_with_asserts(notebook) -> None:
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and first.source.rstrip("*").endswith("?")
    last = notebook.cells[-1]
    assert last.cell_type == "code" and last.source.count("assert ") >= 5


def test_one_idea_a_cell_and_no_logic_in_it(notebook) -> None:
    for cell in code(notebook):
        lines = cell.source.splitlines()
        assert len(lines) <= MOST_LINES, cell.source
        assert not any(line.lstrip().startswith(("def ", "class ", "if ", "while ", "try:")) for line in lines)


def test_about_two_text_cells_to_a_code_cell(notebook) -> None:
    assert 1.5 <= len(text(notebook)) / len(code(notebook)) <= 3


def test_it_is_committed_executed_in_order(notebook) -> None:
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 1
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


def test_figures_stand_without_a_kernel_and_without_a_script(notebook) -> None:
    outputs = [output.get("data", {}) for cell in code(notebook) for output in cell.outputs]
    assert any("application/vnd.plotly.v1+json" in data for data in outputs)
    assert not any("widget" in kind for data in outputs for kind in data)
    assert "<script" not in json.dumps(outputs)


def test_it_holds_no_widget_state_and_is_small(path, notebook) -> None:
    assert "widgets" not in notebook.metadata
    assert path.stat().st_size < MOST_BYTES


def test_its_outputs_come_from_this_code(path, notebook) -> None:
    """A stale notebook is remade by `make notebooks`; cells tagged as of one machine are not compared."""
    import torch

    from replay_sim.explore.notebooks import THIS_MACHINE, execute

    if torch.cuda.is_available():
        pytest.skip("committed outputs are those of the host backend")
    for kept, made in zip(notebook.cells, execute(path).cells, strict=True):
        if kept.cell_type == "code" and THIS_MACHINE not in kept.metadata.get("tags", ()):
            assert made.outputs == kept.outputs, kept.source
