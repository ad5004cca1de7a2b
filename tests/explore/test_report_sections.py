"""The sections of the report: every figure with its source, and what is said where there is nothing to draw."""

import re

import attrs
import pytest
from explore.measured_cases import prefill_point, record, step_point
from explore.report_cases import ARM_TIMES, LENGTHS, default_evidence, default_job, small_job, steps_record

from replay_sim.explore import evidence
from replay_sim.explore.evidence import Evidence, gather
from replay_sim.explore.published import ttft_table
from replay_sim.explore.report import render, sections
from replay_sim.explore.report_parts import Beside, Drawing, Part, Table
from replay_sim.explore.report_speedup import speedup_section
from replay_sim.explore.report_threshold import threshold_section
from replay_sim.explore.report_workload import workload_section
from replay_sim.explore.step_tables import experts_sweep, measured_table, percent_table
from replay_sim.measure.records import bundled_records

MEASURED = r"measured on .+, driver .+, torch .+, \d{4}-\d\d-\d\d"
MODELLED = r"modelled, fitted to .+ off by [\d.]+% \(median\) and [\d.]+% \(p95\) on \d+ others"
COUNTED = r"(?:computed|counted) by replay_sim"
SOURCES = {
    "staircase": COUNTED,
    "pool": "predicted by replay_sim",
    "speedup": MEASURED,
    "published": MEASURED + ".*Published: vLLM project blog",
    "threshold": MEASURED,
    "tuned": MODELLED,
    "graphs": MODELLED,
    "dispatch": COUNTED,
    "rows": COUNTED,
}


@pytest.fixture(scope="module")
def without_records() -> Evidence:
    return gather(default_job(), [])


def parts_of(found: Evidence) -> list[Part]:
    return [part for section in sections(found) for part in section.parts]


def drawings(found: Evidence) -> dict[str, Drawing]:
    return {part.name: part for part in parts_of(found) if isinstance(part, Drawing)}


def tables(parts: list[Part]) -> dict[str, Table]:
    return {part.title: part for part in parts if isinstance(part, Table)}


def words(section) -> str:
    return " ".join(part.text for part in section.parts if part.kind in ("words", "heading", "pasted"))


def replanned(found: Evidence, **changes) -> Evidence:
    return attrs.evolve(found, job=attrs.evolve(found.job, **changes))


def test_every_figure_says_where_its_numbers_come_from() -> None:
    drawn = drawings(default_evidence())
    assert drawn.keys() == SOURCES.keys()
    for name, pattern in SOURCES.items():
        assert re.search(pattern, drawn[name].caption), f"{name}: {drawn[name].caption}"


def test_without_records_every_time_is_modelled_with_its_error_and_nothing_says_measured(without_records) -> None:
    drawn = drawings(without_records)
    assert drawn.keys() == SOURCES.keys() - {"speedup", "published"}
    assert re.search(MODELLED, drawn["threshold"].caption)
    assert all(", modelled" in trace.name for trace in drawn["threshold"].figure.data[:1])
    said = words(speedup_section(without_records))
    assert "No record has steps of a GPU" in said and "no measured arm is drawn" in said
    assert render(without_records, {}).count("No measurements are bundled") == 1


def test_the_table_of_measured_arms_is_percent_of_replay_off() -> None:
    """Eager replay off is 100 in every line; the cells are those of the records."""
    table = tables(list(speedup_section(default_evidence()).parts))[
        "Step time in % of replay off, eager: window 128, 48 experts a rank"
    ]
    steps = measured_table(bundled_records(), "steps", "NVIDIA H200")
    again = percent_table(experts_sweep(steps, 48), "step_us", "num_tokens", "eager_off")
    assert [[float(cell) for cell in row[1:]] for row in table.rows] == again.to_numpy().tolist()
    assert {row[1] for row in table.rows} == {"100"}


def test_the_published_table_stands_beside_ours() -> None:
    table = tables(list(speedup_section(default_evidence()).parts))[
        "Published: milliseconds to the first token, and % of replay off"
    ]
    published = ttft_table()
    assert len(table.rows) == len(published)
    assert [row[-1] for row in table.rows] == [f"{value:.1f}" for value in published["replay_graphs, %"]]


def test_prompts_say_how_the_config_runs_them() -> None:
    """D1, D2: below the threshold without replay, above the largest size eagerly."""
    (table,) = (one for one in tables(list(speedup_section(default_evidence()).parts)).values() if len(one.header) == 8)
    assert [row[6] for row in table.rows] == [
        "in a PIECEWISE graph of 288, without replay",
        "in a PIECEWISE graph of 576, without replay",
        "in a PIECEWISE graph of 1,536, replay in a graph of 128",
        "in a PIECEWISE graph of 3,072, replay in a graph of 128",
        "in a PIECEWISE graph of 6,144, replay in a graph of 128",
        "eagerly, replay in a graph of 128",
    ]


def test_a_sweep_without_replay_off_is_not_drawn_but_the_page_is_made() -> None:
    points = [step_point(arm, tokens, 1e3) for arm in list(ARM_TIMES)[1:] for tokens in LENGTHS]
    found = gather(default_job(), [("steps.json", record("steps", points))])
    drawn = drawings(found)
    assert "speedup" not in drawn and "threshold" in drawn
    assert "no measured arm is drawn" in words(speedup_section(found))


def test_two_records_of_the_same_steps_are_not_mixed() -> None:
    slow = steps_record()
    slow = attrs.evolve(slow, points=[point | {"step_us": 2 * point["step_us"]} for point in slow.points])
    found = gather(default_job(), [("a.json", steps_record()), ("b.json", slow)])
    assert re.search(r"; a\.json$", drawings(found)["speedup"].caption)


def test_prefills_of_another_budget_are_not_mixed_in() -> None:
    gpu = "NVIDIA H200"
    few, many = ([4096, 8192], [4096, 16384, 32768])
    prefills = {
        budget: [
            prefill_point(arm, tokens, us * tokens, max_num_batched_tokens=budget)
            for arm, us in ARM_TIMES.items()
            for tokens in prompts
        ]
        for budget, prompts in ((2048, few), (8192, many))
    }
    records = [(f"{budget}.json", record("prefill", points, gpu=gpu)) for budget, points in prefills.items()]
    twice = [(f"steps-{number}.json", steps_record(gpu=gpu)) for number in (1, 2)]
    drawn = drawings(gather(default_job(), [*twice, *records]))["published"]
    ours = [trace for trace in drawn.figure.data if trace.name.startswith("ours")]
    assert all(trace.x == (*LENGTHS, 16384, 32768) for trace in ours) and len(ours) == 2
    assert "8192.json, steps-1.json" in drawn.caption and "2048" not in drawn.caption


def test_a_curve_that_is_not_there_is_said_in_a_sentence(tmp_path) -> None:
    said = words(threshold_section(gather(small_job(tmp_path), [])))
    assert said == "Nothing is drawn: a step of this config has at most 64 tokens, and the curve begins at 129."


def test_what_no_break_costs_is_said_for_a_config_whose_graphs_do_not_break(monkeypatch) -> None:
    found = default_evidence()
    plan = attrs.evolve(found.job.plan, trim_threshold=None)
    monkeypatch.setattr(evidence, "_pool", lambda *_: found.pool)
    said = words(threshold_section(gather(attrs.evolve(found.job, plan=plan))))
    assert "No PIECEWISE graph of this config, up to 8,190 tokens, breaks for replay: that costs" in said


def test_an_eager_config_is_said_to_trim_at_any_threshold(monkeypatch) -> None:
    found = default_evidence()
    plan = attrs.evolve(found.job.plan, model_sizes=(), replay_sizes=(), trim_threshold=None)
    monkeypatch.setattr(evidence, "_pool", lambda *_: found.pool)
    said = words(threshold_section(gather(attrs.evolve(found.job, plan=plan))))
    assert "longer steps run eagerly, and trim whatever the threshold" in said


def test_the_tuned_plan_stands_beside_own_and_default_with_the_config_to_paste() -> None:
    section = workload_section(default_evidence())
    found = tables(list(section.parts))
    tuning = default_job().tuned.tuning
    rows = found["Expected step time, modelled"].rows
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (plan.name, half, f"{judged.expected_step_ms:,.3f}")
        for plan in tuning.plans
        for half, judged in (("tuned on", plan.seen), ("unseen", plan.unseen))
    ]
    sizes = found["Sizes and threshold"].rows
    assert sizes[1][3] == " ".join(map(str, tuning.tuned.plan.replay_sizes))
    (pasted,) = (part.text for part in section.parts if part.kind == "pasted")
    assert pasted.startswith("# --compilation-config") and "vllm serve" in pasted


def test_a_workload_that_could_not_be_tuned_is_counted_all_the_same() -> None:
    section = workload_section(replanned(default_evidence(), tuned="no reason at all"))
    assert "The config was not tuned on it: no reason at all." in words(section)
    assert [part.name for part in section.parts if isinstance(part, Drawing)] == ["dispatch", "rows"]
    (beside,) = (part for part in section.parts if isinstance(part, Beside))
    assert [table.title for table in beside.tables] == ["Model graphs", "Replay graphs"]


@pytest.mark.parametrize(
    "settings",
    [
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL"},
        {"cudagraph_decoder_replay": False},
        {"decoder_replay_trim_threshold": None},
        {"window": 63, "decoder_replay_trim_threshold": 64},
        {"window": 4000, "max_num_batched_tokens": 16384, "decoder_replay_trim_threshold": 9000},
    ],
)
def test_a_config_without_replay_or_of_other_shapes_has_a_report_that_says_so(tmp_path, settings) -> None:
    found = gather(small_job(tmp_path, **settings))
    page = render(found, {})
    assert "of another model trust the counts" in page and "were measured at window" in page
    assert page.rstrip().endswith("</html>")
    drawn = drawings(found)
    assert {"pool", "speedup", "dispatch", "rows"} <= drawn.keys()
    assert ("staircase" in drawn) is bool(found.job.plan.replay_sizes)
