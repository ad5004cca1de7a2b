"""Cells of speedup: measured where one run has both arms, modelled elsewhere, and never one taken for the other."""

import attrs
import pytest
from explore.measured_cases import GPU, model, prefill_point, record, step_point

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.explore.speedup_cells import (
    CellKind,
    PrefillSettings,
    SpeedupCells,
    dispatched_steps,
    refused,
    shape_of,
)
from replay_sim.measure.step_case import case_of_record

GRAPHS, OFF = "piecewise_replay_graphs", "eager_off"
AT = PrefillSettings(window=128, num_reqs=1, max_num_batched_tokens=8192, prompt_tokens=2048, num_local_experts=48)


def cells(*records, with_model: bool = True) -> SpeedupCells:
    named = [(f"steps-{index}.json", one) for index, one in enumerate(records)]
    return SpeedupCells(named, model() if with_model else None, GPU)


def both(arm_us: float, base_us: float, **changes):
    return record("steps", [step_point(GRAPHS, 2048, arm_us, **changes), step_point(OFF, 2048, base_us, **changes)])


def test_a_measured_cell_is_the_ratio_within_one_run() -> None:
    """Issue 4: ratios within one run travel; the two arms are never taken from different runs."""
    cell = cells(both(60.0, 100.0)).cell(AT, GRAPHS, OFF)
    assert (cell.kind, cell.ratio, cell.arm_us, cell.base_us) == (CellKind.MEASURED, 0.6, 60.0, 100.0)
    assert cell.source == "measured, steps-0.json"
    apart = record("steps", [step_point(GRAPHS, 2048, 1.0)]), record("steps", [step_point(OFF, 2048, 100.0)])
    assert cells(*apart).cell(AT, GRAPHS, OFF).kind is CellKind.MODELLED


def test_of_several_runs_the_median_ratio_is_shown_and_their_spread_is_said() -> None:
    cell = cells(both(60.0, 100.0), both(90.0, 100.0), both(140.0, 200.0)).cell(AT, GRAPHS, OFF)
    assert (cell.ratio, cell.arm_us) == (0.7, 140.0)
    assert cell.source == "measured, steps-2.json, 60.0% to 90.0% over 3 runs"


def test_a_budget_that_holds_the_prompt_changes_nothing() -> None:
    found = cells(both(60.0, 100.0))
    for budget in (2048, 4096, 16384):
        assert found.cell(attrs.evolve(AT, max_num_batched_tokens=budget), GRAPHS, OFF).kind is CellKind.MEASURED
    assert found.cell(attrs.evolve(AT, max_num_batched_tokens=1024), GRAPHS, OFF).kind is CellKind.MODELLED


def test_prefills_of_several_steps_are_cells_under_their_own_budget() -> None:
    points = [prefill_point(GRAPHS, 32768, 400.0), prefill_point(OFF, 32768, 800.0)]
    found = cells(record("prefill", points))
    settings = attrs.evolve(AT, prompt_tokens=32768)
    assert found.cell(settings, GRAPHS, OFF).ratio == 0.5
    other = found.cell(attrs.evolve(settings, max_num_batched_tokens=4096), GRAPHS, OFF)
    assert other.kind is CellKind.MODELLED


@pytest.mark.parametrize(
    "changes", [{"computed": 2048}, {"num_decodes": 3}, {"num_reqs": 4, "longest_query": 2000}], ids=str
)
def test_steps_that_are_no_equal_prompts_from_their_start_are_no_cells(changes) -> None:
    settings = attrs.evolve(AT, num_reqs=changes.get("num_reqs", 1))
    assert cells(both(60.0, 100.0, **changes)).cell(settings, GRAPHS, OFF).kind is not CellKind.MEASURED


def test_records_of_another_gpu_are_left_out() -> None:
    other = record("steps", both(60.0, 100.0).points, gpu="Another GPU")
    assert cells(other).cell(AT, GRAPHS, OFF).kind is CellKind.MODELLED
    assert "Another" not in cells(both(60.0, 100.0), other).source


def test_a_modelled_cell_is_the_sum_of_its_steps_predictions_and_says_how_wrong_they_are() -> None:
    """Against predicting each chunk of the prefill alone."""
    found, settings = cells(), attrs.evolve(AT, prompt_tokens=20000)
    cell = found.cell(settings, GRAPHS, OFF)
    shape = shape_of(settings, "flash-rank")
    alone = 0.0
    for tokens, computed in ((8192, 0), (8192, 8192), (3616, 16384)):
        one = attrs.evolve(settings, prompt_tokens=tokens)
        ((dispatched, _, _, _),) = dispatched_steps(one, OFF)
        alone += found.model.predict(shape, case_of_record(dispatched, computed)).step_us
    assert cell.base_us == pytest.approx(alone, rel=1e-4), "a context beyond what all rows can see counts as that"
    assert cell.kind is CellKind.MODELLED and "step time is off by 2.0% (median of such steps)" in cell.source


def test_a_cell_outside_of_what_the_model_saw_is_marked_with_the_reason() -> None:
    found = cells()
    large = found.cell(attrs.evolve(AT, max_num_batched_tokens=16384, prompt_tokens=16384), GRAPHS, OFF)
    assert large.kind is CellKind.OUTSIDE and "num_tokens 16384 is outside of 256 to 8192" in large.source
    unseen = found.cell(AT, "eager_replay", OFF)
    assert unseen.kind is CellKind.OUTSIDE and "arm eager_replay was not measured" in unseen.source


def test_without_a_model_what_was_not_measured_has_no_number() -> None:
    cell = cells(with_model=False).cell(AT, GRAPHS, OFF)
    assert (cell.kind, cell.ratio) == (CellKind.NONE, None)
    assert cell.source == "not measured, and no step-time model is bundled"


@pytest.mark.parametrize(
    ("changes", "arm", "reason"),
    [
        ({"prompt_tokens": 16, "num_reqs": 32}, OFF, "16 tokens are fewer than the 32 requests"),
        ({"max_num_batched_tokens": 16, "num_reqs": 32}, OFF, "smaller than its 32 requests"),
        ({"prompt_tokens": 128}, "eager_replay", "no step of this prefill breaks for replay"),
        ({"prompt_tokens": 128}, GRAPHS, "no step of this prefill breaks for replay"),
        ({"prompt_tokens": 129}, "eager_replay", ""),
        ({"prompt_tokens": 129}, GRAPHS, ""),
    ],
)
def test_what_cannot_run_as_an_arm_is_refused_with_the_reason(changes, arm, reason) -> None:
    found = refused(attrs.evolve(AT, **changes), arm)
    assert reason in found and bool(reason) == bool(found)


def test_steps_are_dispatched_as_the_engine_would_and_alike_ones_are_counted() -> None:
    """D1-D3: 40,000 tokens in chunks of 8,192 break in graphs; the 7,232 left are padded to 8,192."""
    settings = attrs.evolve(AT, prompt_tokens=40000)
    steps = list(dispatched_steps(settings, GRAPHS))
    assert [(record.num_tokens, computed > 0, count) for record, computed, _, count in steps] == [
        (8192, False, 1),
        (8192, True, 3),
        (7232, True, 1),
    ]
    assert all(record.padded_tokens == 8192 and record.replay_rows == 128 for record, *_ in steps)
    assert all(record.replay_mode is CudagraphMode.PIECEWISE and is_arm for record, _, is_arm, _ in steps)


def test_a_short_last_chunk_runs_without_replay() -> None:
    steps = list(dispatched_steps(attrs.evolve(AT, prompt_tokens=8192 + 100), "eager_replay"))
    assert [(record.num_tokens, record.replay_rows, is_arm) for record, _, is_arm, _ in steps] == [
        (8192, 128, True),
        (100, 0, False),
    ]


def test_what_was_just_measured_stands_before_the_records() -> None:
    found = cells(both(60.0, 100.0))
    found.add_live(both(80.0, 100.0).points, "run 1 just now on Mine")
    assert found.cell(AT, GRAPHS, OFF).ratio == 0.8
    assert "measured by run 1 just now on Mine" in found.source
