"""Curves of the trim threshold: measured where they were, modelled elsewhere, and what thresholds cost, by hand."""

import numpy as np
import pytest
from explore.measured_cases import GPU, model, record, step_point

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.explore import threshold_curves
from replay_sim.explore.speedup_cells import CellKind, PrefillSettings, shape_of
from replay_sim.explore.threshold_curves import (
    EVERY_SIZE,
    SIZES,
    ThresholdCurves,
    costs_of,
    crossing_table,
    crossings_by_host,
    curve_key,
    step_histogram,
)
from replay_sim.measure.records import bundled_records
from replay_sim.measure.step_case import StepCase
from replay_sim.workload.profiles import load_profile, profile_names

GRAPHS, OFF = "piecewise_replay_graphs", "piecewise_off"
COUNTS = (256, 512, 1024, 2048, 4096)
# Without the break 1000 + t, with it 1400 + t / 2: they cross at 800.
LAW = {OFF: lambda tokens: 1000.0 + tokens, GRAPHS: lambda tokens: 1400.0 + tokens / 2}


def points(counts=COUNTS, **changes):
    still = {"p10": 1.0, "p90": 1.0}
    return [step_point(arm, count, law(count), **still, **changes) for arm, law in LAW.items() for count in counts]


def curves(*records, with_model: bool = True) -> ThresholdCurves:
    named = [(f"steps-{index}.json", one) for index, one in enumerate(records)]
    return ThresholdCurves(named, model() if with_model else None, GPU)


def test_five_measured_counts_are_a_measured_curve_with_its_crossing() -> None:
    shown = curves(record("steps", points())).shown(curve_key(GRAPHS))
    assert shown.kind is CellKind.MEASURED and shown.dots is None
    assert shown.curve.num_tokens.tolist() == list(COUNTS)
    lost, gained = 1656 / 1512 - 1, 1 - 1912 / 2024
    assert shown.crossing.tokens == pytest.approx(512 + 512 * lost / (lost + gained)), "between the gains at both sides"
    assert shown.verdict.startswith("pays from 836 tokens on")
    assert shown.source == "measured on Test GPU, driver 1.2, torch 9.9, 2026-01-02; steps-0.json"


def test_fewer_counts_are_dots_beside_a_modelled_curve() -> None:
    shown = curves(record("steps", points((512, 2048)))).shown(curve_key(GRAPHS))
    assert shown.dots.num_tokens.tolist() == [512, 2048]
    assert shown.kind is CellKind.OUTSIDE, "the model never saw graphs without replay"
    assert "asked outside of what it saw: arm piecewise_off was not measured" in shown.source
    assert "measured" not in shown.verdict


def test_without_a_model_fewer_counts_are_all_there_is() -> None:
    found = curves(record("steps", points((512, 2048))), with_model=False)
    assert found.shown(curve_key(GRAPHS)).kind is CellKind.MEASURED
    assert found.shown(curve_key(GRAPHS, window=256)) == "not measured, and no step-time model is bundled"


def test_records_of_another_gpu_are_left_out() -> None:
    assert not curves(record("steps", points(), gpu="Other")).measured


def test_a_modelled_point_is_the_models_prediction_of_that_step() -> None:
    """D1-D3, against a case written down by hand: 4 requests, 1,025 tokens, padded to 1,280, 512 rows kept."""
    found = curves()
    shown = found.shown(curve_key(GRAPHS, num_reqs=4, num_local_experts=8))
    index = shown.curve.num_tokens.tolist().index(1025)
    settings = PrefillSettings(
        window=128, num_reqs=4, max_num_batched_tokens=8192, prompt_tokens=1025, num_local_experts=8
    )
    case = StepCase(
        num_tokens=1025,
        padded_tokens=1280,
        mode=CudagraphMode.PIECEWISE,
        replay_rows=512,
        padded_rows=512,
        replay_mode=CudagraphMode.PIECEWISE,
        num_reqs=4,
        computed=0,
    )
    expected = found.model.predict(shape_of(settings, "flash-rank"), case).step_us
    assert shown.curve.with_us[index] == pytest.approx(expected)
    assert shown.curve.padded_tokens[index] == 1280


def test_modelled_counts_are_every_size_and_one_more_above_the_window() -> None:
    counts = curves().shown(curve_key(GRAPHS, window=1024)).curve.num_tokens.tolist()
    assert counts == sorted({1025} | {size + extra for size in SIZES if size > 1024 for extra in (0, 1)} - {8193})


def test_a_batch_that_never_trims_has_no_eager_curve() -> None:
    found = curves().shown(curve_key("eager_replay", window=1024, num_reqs=32))
    assert found == "with 32 requests of window 1024 no step here breaks for replay"


def test_steps_of_a_profile_are_its_prompts_in_chunks() -> None:
    """Against going through the quantiles one by one."""
    profile = load_profile("long_context")
    by_hand: dict[int, float] = {}
    before = 0.0
    for probability, tokens in zip(profile.probabilities, profile.prompt_tokens, strict=True):
        share, before = probability - before, probability
        left = tokens
        while left:
            chunk = min(left, 4096)
            by_hand[2 * chunk] = by_hand.get(2 * chunk, 0.0) + share
            left -= chunk
    found = step_histogram("long_context", 2, 128)
    by_hand = {count: weight for count, weight in by_hand.items() if count > 128 and weight > 0}
    assert found == pytest.approx(by_hand) and max(found) == 8192


def test_each_size_once_is_every_size_above_the_window() -> None:
    assert step_histogram(EVERY_SIZE, 1, 512) == {size: 1.0 for size in SIZES if size > 512}
    assert all(step_histogram(name, 16, 128) for name in profile_names())


def test_a_table_line_says_crossing_and_cost_of_a_curve() -> None:
    found = curves(record("steps", points((256, 512, 1024, 2048, 8192))), with_model=False)
    table = crossing_table(found, [curve_key(GRAPHS), curve_key(GRAPHS, window=64)], 512)
    (line,) = table.to_dict("records")
    shown = found.shown(curve_key(GRAPHS))
    regret = costs_of(shown, step_histogram(EVERY_SIZE, 1, 128)).regret(512)
    assert line["best threshold"] == 1024 and line["512 costs more, %"] == round(100 * regret, 1) > 0
    assert line["crossing / (requests × window)"] == round(shown.crossing.tokens / 128, 2)


def test_a_slower_host_moves_the_crossing_of_eager_replay_up() -> None:
    table = crossings_by_host(model(), 8, (6.0, 9.0))
    assert list(table.columns) == ["6 µs a launch", "9 µs a launch"]
    eager = table.loc["eager_replay"].fillna(np.inf)
    assert eager["6 µs a launch"] <= eager["9 µs a launch"]
    assert crossings_by_host(None, 8, (6.0,)).empty


def test_every_breaking_arm_has_a_curve_in_the_bundled_records() -> None:
    found = ThresholdCurves(list(bundled_records()), None, "NVIDIA H200")
    for arm in threshold_curves.PAIRS:
        shown = found.shown(curve_key(arm))
        assert shown.kind is CellKind.MEASURED and len(shown.curve.num_tokens) > 40
