"""Tables of measured steps: percent of the base arm, launches, bytes and calls, against sums by hand."""

import pandas as pd
import pytest
from explore.measured_cases import GPU, MODES, model, prefill_point, record, step_point

from replay_sim.explore import step_tables
from replay_sim.explore.published import H100_CALLS_MS, OUR_CALLS, TTFT_ROWS, ttft_table
from replay_sim.measure.records import bundled_records
from replay_sim.measure.step_case import case_of_point

GRAPHS, OFF = "piecewise_replay_graphs", "eager_off"
LAW = {("eager_off", 512): 200.0, ("eager_replay", 512): 210.0, (GRAPHS, 512): 100.0}
LAW |= {("eager_off", 1024): 400.0, ("eager_replay", 1024): 300.0, (GRAPHS, 1024): 240.0}


@pytest.fixture
def steps() -> pd.DataFrame:
    points = [step_point(arm, tokens, us) for (arm, tokens), us in LAW.items()]
    points[0]["device_us"] = points[0]["graph_launches"] = points[0]["kernel_launches"] = None
    return step_tables.measured_table([("steps-law.json", record("steps", points[::-1]))], "steps", GPU)


def test_points_come_in_the_order_of_the_arms_with_their_source(steps) -> None:
    assert list(dict.fromkeys(steps["arm"])) == [OFF, "eager_replay", GRAPHS]
    assert step_tables.source_of(steps) == "measured on Test GPU, driver 1.2, torch 9.9, 2026-01-02; steps-law.json"


def test_a_gpu_of_which_there_is_no_record_is_refused_by_name(steps) -> None:
    with pytest.raises(ValueError, match="'Other'"):
        step_tables.measured_table([("steps-law.json", record("steps", []))], "steps", "Other")


def test_percent_is_of_the_base_arms_median_at_the_same_tokens(steps) -> None:
    table = step_tables.percent_table(steps, "step_us", "num_tokens", OFF)
    assert table.loc[512].to_dict() == {OFF: 100.0, "eager_replay": 105.0, GRAPHS: 50.0}
    assert table.loc[1024].to_dict() == {OFF: 100.0, "eager_replay": 75.0, GRAPHS: 60.0}
    compared = step_tables.relative(steps, "step_us", "num_tokens", OFF).set_index(["arm", "num_tokens"])
    assert compared.loc[(GRAPHS, 512), ["low", "high"]].tolist() == pytest.approx([45.0, 55.0])


def test_launches_are_those_of_profiled_steps_and_the_others_are_counted(steps) -> None:
    """Issue 4, point 4."""
    table = step_tables.launch_table(steps)
    assert table["graph launches"].to_dict() == {OFF: "0 to 0", "eager_replay": "0 to 0", GRAPHS: "43 to 43"}
    assert (table["steps profiled"][OFF], table["of"][OFF]) == (1, 2)


def test_where_time_goes_adds_up_one_length_by_arm(steps) -> None:
    """Issue 4, points 3 and 5."""
    line = step_tables.where_time_goes(steps, 1024).loc[GRAPHS]
    assert line["step ms"] == 0.24 and line["device busy ms"] == 0.18 and line["host ms"] == 0.12
    assert line["device idle"] == "25.0 %" and line["step / roofline"] == 4.0
    assert step_tables.roofline_table(steps).loc[512].tolist() == [4.0, 4.0, 4.0]


def test_the_experts_sweep_is_of_one_share() -> None:
    points = [step_point(OFF, 512, 1.0), step_point(OFF, 512, 2.0, num_local_experts=8)]
    points.append(step_point(OFF, 512, 3.0, sweep="window"))
    table = step_tables.measured_table([("a.json", record("steps", points))], "steps", GPU)
    assert step_tables.experts_sweep(table, 48).step_us.tolist() == [1.0]


def test_counted_bytes_are_mostly_the_weights_of_the_rows_experts() -> None:
    """Against the weights by hand: 40 layers of 48 experts, 3 matrices of 5,120 x 2,304 in 2 bytes."""
    points = [step_point(arm, 1024, 1.0) for arm in ("eager_off", "eager_replay")]
    table = step_tables.bytes_table([("a.json", record("steps", points))], [1024])
    weights = 40 * 48 * 3 * 5120 * 2304 * 2 / 1e9
    off, on = (table.loc[(48, 1024, arm)] for arm in ("eager_off", "eager_replay"))
    assert weights < off["expert products GB"] < 1.05 * weights
    assert 0.85 * weights < on["expert products GB"] < weights, "128 rows pick nearly all"
    assert on["all else GB"] < 0.7 * off["all else GB"]
    assert case_of_point(points[1]).replay_rows == 128


def test_calls_stand_beside_the_published_ratios() -> None:
    """Issue 4, point 3."""
    points = [
        {
            "op": op,
            "rows": rows,
            "device_us": us,
            "p10": us,
            "p90": us,
            "n": 3,
            "bytes": rows,
            "flops": 1e9,
            "limit_us": 1,
        }
        for op in OUR_CALLS
        for rows, us in ((8192, 30.0), (128, 2.0))
    ]
    calls = step_tables.measured_table([("calls.json", record("calls", points))], "calls", GPU)
    table = step_tables.calls_table(calls)
    assert set(table["ratio"]) == {15.0} and set(table["bytes ratio"]) == {64.0}
    assert table["published H100 ratio"]["attention"] == 52.1
    assert table["published H100 ratio"]["expert gate and up"] == 6.0
    assert list(table.index) == list(H100_CALLS_MS)


def test_the_model_says_how_wrong_it_is_or_that_there_is_none() -> None:
    errors = step_tables.model_error_table(model())
    assert errors.loc["eager_off"].tolist() == [9, 2.0, 5.0]
    assert step_tables.model_sentence(model()) == "The step-time model: modelled, fitted to nothing."
    assert step_tables.model_error_table(None).empty
    assert step_tables.model_sentence(None).startswith("No step-time model is bundled")


def test_the_published_table_gives_percent_of_its_own_replay_off() -> None:
    table = ttft_table().set_index(["parallelism", "prompt_tokens"])
    assert table.loc[("TP4", 1024)].tolist() == [160.9, 165.9, 103.3, 103.1, 64.2]
    assert table.loc[("DEP2", 1024), "replay_eager, %"] == pytest.approx(111.9, abs=0.1)
    assert len(table) == len(TTFT_ROWS) == 10


def test_every_arm_of_the_bundled_records_ran_what_it_says() -> None:
    """Issue 4, point 4: graph arms launch graphs, eager arms none, in every profiled step."""
    table = pd.concat([pd.DataFrame(one.points) for _, one in bundled_records("steps")])
    profiled = table.dropna(subset="graph_launches")
    assert len(profiled) > 600
    launches = {mode: of_mode.graph_launches for mode, of_mode in profiled.groupby("mode")}
    assert (launches["NONE"] == 0).all() and (launches["PIECEWISE"] > 20).all() and (launches["FULL"] == 1).all()
    assert set(MODES) <= set(profiled["arm"])


def test_prefills_compare_by_prompt() -> None:
    points = [prefill_point(OFF, 16384, 800.0), prefill_point(GRAPHS, 16384, 600.0)]
    table = step_tables.measured_table([("p.json", record("prefill", points))], "prefill", GPU)
    assert step_tables.percent_table(table, "prefill_us", "prompt_tokens", OFF)[GRAPHS].tolist() == [75.0]


def test_runs_made_again_are_summed_up_by_arm() -> None:
    """Issue 4, point 1."""
    values = {"of": "steps", "run": 1, "sweep": "experts", "n": 18}
    ratios = [(GRAPHS, 0.99, 1.0, 1.02), (OFF, 0.8, 1.1, 1.9), (OFF, 0.9, 1.3, 1.5)]
    points = [
        values | {"arm": arm, "ratio_min": least, "ratio_median": median, "ratio_max": most}
        for arm, least, median, most in ratios
    ]
    points.append(points[0] | {"of": "prefill"})
    table = step_tables.repeats_table([("repeat.json", record("repeat", points))])
    assert list(table.index) == [OFF, GRAPHS]
    assert table.loc[OFF].tolist() == [2, 36, 0.8, 1.2, 1.9]
    assert step_tables.repeats_table([]).empty
