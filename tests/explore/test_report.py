"""The page: the recommendation first, everything from files escaped, one script, no network, written whole."""

import re

import attrs
import pytest
from explore.report_cases import (
    EVIL,
    HOSTILE,
    default_evidence,
    default_job,
    hostile_records,
    small_job,
    without_scripts,
)

from replay_sim.explore.advice import advise, recommendation
from replay_sim.explore.evidence import gather
from replay_sim.explore.report import render, sections, write_report
from replay_sim.measure.records import Record

ORDER = ("plan", "pool", "speedup", "threshold", "workload", "records", "notebooks", "sources")
FIGURES = ["staircase", "pool", "speedup", "published", "threshold", "tuned", "graphs", "dispatch", "rows"]
ENVIRONMENT = HOSTILE | {"triton": "3.6", "date": "2026-01-02", "replay_sim": "0.1.0"}
POOL = Record(
    kind="pool",
    environment=ENVIRONMENT,
    command=f"replay-sim measure {EVIL}",
    seed=3,
    settings={"subject": "default", "plan": EVIL},
    points=[{"arrangement": "shared", "order": "x", "group": EVIL, "reserved_bytes": 3 << 20, "predicted_bytes": None}]
    * 30,
)


@pytest.fixture(scope="module")
def page() -> str:
    return render(default_evidence(), {"../notebooks/01.html": f"One {EVIL}"})


@pytest.fixture(scope="module")
def hostile() -> str:
    """The default's page with records in which every name is markup."""
    return render(gather(default_job(), [("pool.json", POOL), *hostile_records()]), {})


def test_the_recommendation_comes_first_and_then_the_sections_in_their_order(page) -> None:
    body = without_scripts(page).replace("&#39;", "'")
    advice = advise(default_evidence())
    places = [body.index(advice.headline), *(body.index(f'<h2 id="{name}"') for name in ORDER)]
    assert places == sorted(places)
    assert all(fact in body for fact in advice.facts)
    assert recommendation(advice).splitlines()[0] == advice.headline


def test_every_section_has_a_figure_a_table_and_a_source() -> None:
    for section in sections(default_evidence()):
        kinds = {part.kind for part in section.parts}
        assert {"drawing", "table"} <= kinds, section.name
        assert any(part.kind == "words" and part.is_source for part in section.parts), section.name


def test_the_script_is_embedded_once_and_nothing_is_fetched(page) -> None:
    assert page.count("plotly.js v") == 1
    assert not re.search(r"""<(?:script|link|img|iframe)[^>]*\s(?:src|href)\s*=""", without_scripts(page))
    assert "<script src" not in page and "@import" not in without_scripts(page)
    assert len(page.encode()) < 15_000_000


def test_the_figures_are_drawn_from_the_page_alone(page) -> None:
    assert re.findall(r'<div id="figure-(\w+)"', page) == FIGURES


def test_notebooks_are_linked(page) -> None:
    assert '<a href="../notebooks/01.html">One &lt;img' in page


def test_it_says_what_is_computed_predicted_measured_and_modelled(page) -> None:
    body = without_scripts(page)
    for kind in ("Computed", "Predicted", "Measured", "Modelled"):
        assert f"<i>{kind}</i>" in body
    assert default_evidence().model_source in body and 'id="executed"' not in body


def test_pool_memory_is_predicted_for_every_arrangement_and_said_not_to_be_measured(hostile) -> None:
    """O1-O4: the only pool record of the page is of another plan."""
    body = without_scripts(hostile)
    pool = body[body.index('<h2 id="pool"') : body.index('<h2 id="speedup"')]
    assert "Reserved by graph pools, predicted<" in pool and "no bundled record has this plan" in pool
    assert pool.count(">shared pool and stream</td>") == pool.count(">a pool of their own</td>") == 3
    assert "Model MiB, measured" not in pool and "cuBLAS workspace, 32 MiB" in pool
    assert re.search(r"predicted_pool_bytes</td>\s*<td[^>]*>2,074.0 MiB", body)


def test_pool_memory_stands_beside_its_measurement_where_a_record_has_the_plan(page) -> None:
    """O5: the bundled record of the default plan, with its provenance."""
    body = without_scripts(page)
    pool = body[body.index('<h2 id="pool"') : body.index('<h2 id="speedup"')]
    assert "Reserved by graph pools, predicted and measured<" in pool and "Model MiB, measured" in pool
    assert "measured on NVIDIA H200" in pool and "replay-sim measure" in pool
    assert len(re.findall(r">[+-]0\.\d\d%</td>", pool)) == 9


def test_everything_in_records_is_escaped_in_text_tables_and_figures(hostile) -> None:
    """The hostile records are drawn: bars, curve and the prompts of the config stand on them."""
    body = without_scripts(hostile)
    assert re.findall(r'<div id="figure-(\w+)"', hostile) == [name for name in FIGURES if name != "published"]
    assert EVIL not in hostile and "<img" not in hostile
    assert "measured, prefill&lt;img src=x onerror=alert(1)&gt;.json, 70.0% to 70.0% over 2 runs" in body
    assert "GPU &lt;img src=x onerror=alert(1)&gt;, driver &lt;img" in body
    assert "3.0 MiB" in body and "10 more rows are not shown" in body


def test_names_of_files_are_escaped_in_text_and_in_figures(tmp_path) -> None:
    folder = tmp_path / "a<b>c"
    folder.mkdir()
    job = small_job(folder, name="c<i>.json", model="<u>m</u>")
    hostile = attrs.evolve(job, workload=f"trace {EVIL}.csv")
    page = render(gather(hostile, []), {})
    assert "<i>.json" not in page and "a<b>c" not in page and "<u>m" not in page and EVIL not in page
    assert "a\\u003cb" not in page  # plotly reads tags in labels
    assert "No measurements are bundled" in page


def test_an_executed_run_on_a_cpu_shows_graphs_and_no_times(tmp_path) -> None:
    job = small_job(tmp_path, execute="host")
    assert job.executed is not None and len(job.executed.report.records) == 3
    body = without_scripts(render(gather(job, []), {}))
    assert '<h2 id="executed"' in body and "its times are no GPU" in body
    executed = body[body.index('<h2 id="executed"') : body.index('<h2 id="records"')]
    assert "Capture s" not in executed
    assert "3 steps of the same workload on decoder tiny" in executed


def test_the_page_is_written_whole_into_a_folder_that_may_not_exist(tmp_path) -> None:
    path = write_report(default_evidence(), tmp_path / "new" / "report")
    assert path.name == "index.html" and path.read_text().rstrip().endswith("</html>")
    assert len(list(path.parent.iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_report(default_evidence(), tmp_path / "file")
