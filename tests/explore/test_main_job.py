"""`python -m replay_sim.explore`: report, notebooks and recommendation, and what it refuses."""

import json

import nbformat
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from small_config import CONFIG

from replay_sim.explore.__main__ import MOST_AT_ONCE, execute_notebooks, main, notebooks_at_once


def inputs(folder, cell: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "trace.csv").write_text("prompt_tokens,output_tokens\n40,3\n")
    source = folder / "notebooks"
    source.mkdir()
    nbformat.write(new_notebook(cells=[new_markdown_cell("# A small one"), new_code_cell(cell)]), source / "01_a.ipynb")
    options = {"--trace": "trace.csv", "--out": "out", "--notebooks": "notebooks"}
    paths = [part for option, name in options.items() for part in (option, str(folder / name))]
    return [str(folder / "config.json"), *paths, "--steps", "2"]


def test_it_writes_the_report_and_the_notebooks_that_it_links_and_prints_the_recommendation(tmp_path) -> None:
    result = CliRunner().invoke(main, inputs(tmp_path, "print(1 + 1)"), catch_exceptions=False)
    assert result.exit_code == 0
    page = (tmp_path / "out/report/index.html").read_text()
    assert '<a href="../notebooks/01_a.html">A small one</a>' in page
    assert sorted(path.name for path in (tmp_path / "out/notebooks").iterdir()) == [
        "01_a.html",
        "01_a.ipynb",
        "plotly.min.js",
    ]
    assert nbformat.read(tmp_path / "out/notebooks/01_a.ipynb", 4).cells[1].outputs[0].text == "2\n"
    lines = result.output.splitlines()
    assert lines[0].startswith(("Keep the config", "Take the tuned sizes")), "the winner leads"
    assert lines[0] in page.replace("&#39;", "'")
    assert lines[-1].startswith("Planned 2 replay graphs, simulated 3 steps, ran 2, executed 1 notebooks in ")


def test_a_notebook_that_fails_stops_it_before_any_report(tmp_path) -> None:
    result = CliRunner().invoke(main, inputs(tmp_path, "assert 1 == 2"))
    assert result.exit_code == 1 and "AssertionError" in str(result.output) + str(result.exception)
    assert not (tmp_path / "out/report").exists()


def test_bad_input_is_one_line() -> None:
    result = CliRunner().invoke(main, ["no-such-preset"])
    assert result.exit_code != 0 and "no-such-preset" in str(result.output) + str(result.exception)


def test_notebooks_run_side_by_side_only_where_no_gpu_is_timed(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert notebooks_at_once() == MOST_AT_ONCE
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert notebooks_at_once() == 1


def test_pages_keep_the_order_of_the_notebooks(tmp_path) -> None:
    for name in ("02_b", "01_a", "03_c"):
        cells = [new_markdown_cell(f"# {name}"), new_code_cell("1 + 1")]
        nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    pages = execute_notebooks(tmp_path, tmp_path / "out")
    assert list(pages.values()) == ["01_a", "02_b", "03_c"]
