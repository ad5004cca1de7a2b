"""What the report stands on: which records are drawn, what of a config was never measured, and where that leads."""

import attrs
import pytest
from explore.measured_cases import GPU, record, step_point
from explore.report_cases import default_evidence, default_job, small_job, steps_record

from replay_sim.explore import evidence
from replay_sim.explore.evidence import NO_BREAK, gather, replay_arm
from replay_sim.explore.job import Job, run_job
from replay_sim.explore.speedup_cells import CellKind
from replay_sim.measure.records import bundled_records
from replay_sim.plan import make_plan


@pytest.fixture(autouse=True)
def one_pool(monkeypatch) -> None:
    """Predicting a plan's pools takes seconds; here all plans have the default's, whose own tests are elsewhere."""
    pool = default_evidence().pool
    monkeypatch.setattr(evidence, "_pool", lambda *_: pool)


def changed(**settings) -> Job:
    """The default job planned anew for other settings; its workload stays."""
    job = default_job()
    config = attrs.evolve(job.config, **settings)
    return attrs.evolve(job, config=config, plan=make_plan(config))


def test_all_bundled_steps_and_prefills_are_drawn() -> None:
    found = default_evidence()
    kinds = ("steps", "prefill")
    assert found.gpu == "NVIDIA H200" and not found.left_out and not found.limits
    assert {name for name, _ in found.drawn} == {name for kind in kinds for name, _ in bundled_records(kind)}
    assert [one.tokens for one in found.prompts] == [256, 512, 1024, 2048, 4096, 8192]
    assert {one.eager.kind for one in found.prompts} == {CellKind.MEASURED}
    assert [one.tokens for one in found.prompts if one.replays] == [1024, 2048, 4096]


def test_the_gpu_of_most_steps_is_drawn_and_no_other_beside_it() -> None:
    few = steps_record(gpu="A few")
    few = attrs.evolve(few, points=few.points[:4])
    found = gather(default_job(), [("few.json", few), ("many.json", steps_record())])
    assert found.gpu == GPU and [name for name, _ in found.drawn] == ["many.json"]


@pytest.mark.parametrize(
    "spoilt",
    [{"arm": "another"}, {"step_us": 0.0}, {"n": 0}, {"num_tokens": 10**12}, {"sweep": 3}, {"num_reqs": 0}],
)
def test_points_that_cannot_be_drawn_are_left_out_and_counted(spoilt) -> None:
    good = steps_record()
    bad = record("steps", [*good.points, step_point("eager_off", 256, 1.0) | spoilt])
    found = gather(default_job(), [("steps.json", bad)])
    assert found.left_out == ("1 of 21 points of steps.json lack what figures show",)
    assert found.drawn[0][1].points == good.points


def test_steps_of_a_cpu_are_never_drawn() -> None:
    found = gather(default_job(), [("cpu.json", steps_record(gpu=None, cpu="a CPU"))])
    assert not found.drawn and found.gpu == ""


def test_without_records_all_times_are_modelled_and_it_says_so() -> None:
    found = gather(default_job(), [])
    assert found.limits[0].startswith("No record has steps of a GPU: nothing here was measured")
    assert {one.eager.kind for one in found.prompts} == {CellKind.MODELLED}
    assert found.threshold.shown.kind is CellKind.MODELLED and found.model_source in found.threshold.source


def test_a_window_that_was_not_measured_is_modelled_and_it_says_so() -> None:
    found = gather(changed(window=300))
    assert any("at this config's, 300, they are modelled" in limit for limit in found.limits)
    assert {one.eager.kind for one in found.prompts} == {CellKind.MODELLED}
    assert found.prompts[0].tokens == 512, "no prompt within the window"
    wide = gather(changed(window=2048, decoder_replay_trim_threshold=4092))
    assert {one.eager.kind for one in wide.prompts} == {CellKind.OUTSIDE}


def test_another_model_is_said_not_to_be_the_measured_one(tmp_path) -> None:
    found = gather(small_job(tmp_path), [])
    assert "not of m: of another model trust the counts" in found.limits[-1]
    assert found.prompts == ()
    assert found.threshold == "a step of this config has at most 64 tokens, and the curve begins at 129"


@pytest.mark.parametrize(
    ("settings", "arm"),
    [
        ({}, "piecewise_replay_graphs"),
        ({"cudagraph_decoder_replay": False}, "piecewise_replay_eager"),
        ({"cudagraph_mode": "NONE"}, "eager_replay"),
        ({"cudagraph_capture_sizes": (8, 16), "max_cudagraph_capture_size": 16}, "eager_replay"),
    ],
)
def test_the_arm_is_that_of_the_configs_prefills(settings, arm) -> None:
    """D1, D2: above the largest graph a step runs eagerly."""
    assert replay_arm(changed(**settings)) == arm


def test_a_config_whose_graphs_do_not_break_is_judged_by_what_no_break_costs() -> None:
    at = gather(changed(decoder_replay_trim_threshold=9000)).threshold
    assert at.threshold == NO_BREAK and at.costs.of(at.threshold) == at.costs.by_threshold[float("inf")]


def test_without_a_model_what_was_not_measured_has_no_number(monkeypatch) -> None:
    monkeypatch.setattr(evidence, "bundled_model", lambda: None)
    found = gather(changed(window=300), [("steps.json", steps_record())])
    assert found.model is None and found.model_source == "no step-time model is bundled"
    assert {one.eager.kind for one in found.prompts} == {CellKind.NONE}
    assert found.threshold == "not measured, and no step-time model is bundled"


def test_bad_input_is_a_value_error(tmp_path) -> None:
    with pytest.raises(ValueError, match="no-such-preset"):
        run_job("no-such-preset")
    with pytest.raises(ValueError, match="absent.csv: line 1, file"):
        run_job("default", trace=tmp_path / "absent.csv")
