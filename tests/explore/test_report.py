"""The report: the recommendation first, everything from files escaped, one script, no network."""

import json
import re

import pytest

from replay_sim.explore.advice import advise
from replay_sim.explore.job import Job, run_job
from replay_sim.explore.report import recommendation, render, write_report
from replay_sim.measure.records import Record, bundled_records

EVIL = "<img src=x onerror=alert(1)>"
ENVIRONMENT = {
    "gpu": f"GPU {EVIL}",
    "driver": "570",
    "torch": "2.11",
    "triton": "3.6",
    "date": "2026-01-02",
    "replay_sim": "0.1.0",
}
POOL = Record(
    kind="pool",
    environment=ENVIRONMENT,
    command=f"replay-sim measure {EVIL}",
    seed=3,
    settings={"plan": EVIL},
    points=[{"arrangement": "shared", "order": "x", "group": EVIL, "reserved_bytes": 3 << 20, "predicted_bytes": None}]
    * 30,
)
SMALL = {
    "model": "m",
    "window": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "cudagraph_capture_sizes": [16, 32, 64],
    "decoder_replay_cudagraph_capture_sizes": [8, 16, 24],
    "decoder_replay_trim_threshold": 16,
}
DROPPED = {"decoder_replay_cudagraph_capture_sizes": [2, 4, 32], "decoder_replay_trim_threshold": 32}


def small_job(folder, *, lengths="40,3\n20,2\n", execute=None, name="config.json", **settings) -> Job:
    config, trace = folder / name, folder / "lengths.csv"
    config.write_text(json.dumps(SMALL | settings))
    trace.write_text("prompt_tokens,output_tokens\n" + lengths)
    return run_job(str(config), trace=trace, execute=execute, num_steps=3)


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def job() -> Job:
    return run_job("default", num_requests=50)


@pytest.fixture(scope="module")
def page(job) -> str:
    return render(job, {"../notebooks/01.html": f"One {EVIL}"}, [("pool.json", POOL)])


def test_the_recommendation_comes_before_everything_else(job, page) -> None:
    body = without_scripts(page)
    headline = advise(job).headline
    assert body.index(headline) < body.index('id="plan"') < body.index('id="workload"') < body.index('id="records"')
    for fact in advise(job).facts:
        assert fact in body
    assert recommendation(advise(job)).splitlines()[0] == headline


def test_it_says_what_is_computed_and_claims_no_times(page) -> None:
    body = without_scripts(page)
    assert "Plan and workload are <i>computed</i>" in body and "none is claimed" in body
    assert "Executed run" not in body


def test_the_script_is_embedded_once_and_nothing_is_fetched(page) -> None:
    assert page.count("plotly.js v") == 1
    assert not re.search(r"""<(?:script|link|img|iframe)[^>]*\s(?:src|href)\s*=""", without_scripts(page))
    assert "<script src" not in page
    assert len(page.encode()) < 15_000_000


def test_four_figures_are_drawn_from_the_page_alone(page) -> None:
    names = ["figure-staircase", "figure-pool", "figure-dispatch", "figure-rows"]
    assert re.findall(r'<div id="(figure-\w+)"', page) == names


def test_pool_memory_is_predicted_for_every_arrangement_and_said_not_to_be_measured(page) -> None:
    """O1-O4: the only record of the page is of another plan."""
    body = without_scripts(page)
    pool = body[body.index('id="pool"') : body.index('id="workload"')]
    assert "Reserved by graph pools, predicted<" in pool and "no bundled record has this plan" in pool
    assert pool.count("<td>shared pool and stream</td>") == pool.count("<td>a pool of their own</td>") == 3
    assert "Model MiB, measured" not in pool and "cuBLAS workspace, 32 MiB" in pool
    assert re.search(r"predicted_pool_bytes</td>\s*<td>2,074.0 MiB", body)


def test_pool_memory_stands_beside_its_measurement_where_a_record_has_the_plan(job) -> None:
    """O5: the bundled record of the default plan, with its provenance."""
    records = list(bundled_records("pool"))
    body = without_scripts(render(job, {}, records))
    pool = body[body.index('id="pool"') : body.index('id="workload"')]
    assert "Reserved by graph pools, predicted and measured<" in pool and "Model MiB, measured" in pool
    assert "measured on NVIDIA H200" in pool and "replay-sim measure" in pool
    assert len(re.findall(r"<td>[+-]0\.\d\d%</td>", pool)) == 9


def test_records_stand_with_their_provenance_and_everything_in_them_is_escaped(page) -> None:
    body = without_scripts(page)
    assert EVIL not in page
    assert "Measured on GPU &lt;img src=x onerror=alert(1)&gt;, driver 570, torch 2.11, 2026-01-02" in body
    assert "3.0 MiB" in body and "10 more rows are not shown" in body


def test_names_of_files_are_escaped_in_text_and_in_figures(tmp_path) -> None:
    folder = tmp_path / "a<b>c"
    folder.mkdir()
    job = small_job(folder, name="c<i>.json", model="<u>m</u>")
    page = render(job, {}, [])
    assert "<i>.json" not in page and "a<b>c" not in page and "<u>m" not in page
    assert "a\\u003cb" not in page  # plotly reads tags in labels
    assert "No measurements are bundled" in page


def test_an_executed_run_on_a_cpu_shows_graphs_and_no_times(tmp_path) -> None:
    job = small_job(tmp_path, execute="host")
    assert job.executed is not None and len(job.executed.report.records) == 3
    body = without_scripts(render(job, {}, []))
    assert 'id="executed"' in body and "its times are no GPU" in body
    assert "Capture s" not in body
    assert "3 steps of the same workload on decoder tiny" in body


def test_the_page_is_written_whole_into_a_folder_that_may_not_exist(tmp_path, job) -> None:
    path = write_report(job, tmp_path / "new" / "report", records=[])
    assert path.name == "index.html" and path.read_text().rstrip().endswith("</html>")
    assert len(list(path.parent.iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_report(job, tmp_path / "file", records=[])


@pytest.mark.parametrize(
    ("settings", "lengths", "headline"),
    [
        ({"cudagraph_decoder_replay": False}, "40,3\n", "This config captures no replay graphs"),
        ({"decoder_replay_trim_threshold": None}, "40,3\n", "Replay never happens on this workload"),
        (
            {"decoder_replay_cudagraph_capture_sizes": [8]},
            "20,1\n20,1\n20,1\n",
            "Plan larger replay sizes: 1 of 1 replay batches run eagerly, the largest of 24 rows",
        ),
        (DROPPED, "40,1\n", "Drop the replay sizes 2, 4: no batch"),
        (
            {"decoder_replay_cudagraph_capture_sizes": [8, 16, 24, 32]},
            "40,1\n",
            "1 of 4 replay sizes hold every replay batch of this saturated workload; the others (16, 24, 32)",
        ),
        ({"decoder_replay_cudagraph_capture_sizes": [8]}, "40,1\n", "Keep the 1 replay sizes"),
    ],
)
def test_the_headline_names_what_to_change_first(tmp_path, settings, lengths, headline) -> None:
    """P6."""
    assert advise(small_job(tmp_path, lengths=lengths, **settings)).headline.startswith(headline)


def test_the_facts_count_rows_by_hand(tmp_path) -> None:
    facts = advise(small_job(tmp_path, lengths="40,1\n20,1\n")).facts
    assert any("skip 44 of 60 rows and run on 0 pads" in fact for fact in facts)
    assert any("has 16 rows (100% of replay batches) and runs as 16" in fact for fact in facts)
    assert any("every draft token is accepted: the busiest case" in fact for fact in facts)


def test_bad_input_is_a_value_error(tmp_path) -> None:
    with pytest.raises(ValueError, match="no-such-preset"):
        run_job("no-such-preset")
    with pytest.raises(ValueError, match="absent.csv: line 1, file"):
        run_job("default", trace=tmp_path / "absent.csv")
