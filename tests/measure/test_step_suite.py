"""The steps suite through the command: every sweep on the host backend, its records, and what a failure leaves."""

import attrs
import pytest
from click.testing import CliRunner
from small_config import write_config

from replay_sim.commands import measure as measure_command
from replay_sim.config import TINY, load_config, preset_names
from replay_sim.measure import call_times, capture_times, step_runs, step_suite, suites
from replay_sim.measure.capture_times import capture_plans
from replay_sim.measure.held_out import ONE_IN
from replay_sim.measure.records import read_record
from replay_sim.measure.step_suite import ARM_NAMES, SWEEPS
from replay_sim.measure.step_sweeps import CPU_GRID
from replay_sim.measure.suites import make_request, run_suites

GRID = attrs.evolve(
    CPU_GRID,
    sizes=(16, 32),
    small_sizes=(2, 8),
    replay_sizes=(8, 16),
    thin_sizes=(32,),
    thin_requests=(2,),
    contexts=(8,),
    decode_counts=(1, 2),
    request_counts=(1, 2),
    request_tokens=(32,),
    mixed_decodes=(1,),
    prompts=(8, 64),
    budgets=(16, 32),
    budget_prompt=32,
    windows=(4,),
    window_tokens=(32,),
    expert_shares=(4,),
    expert_sizes=(16,),
)
RECORDS = {
    "steps-threshold-cpu.json", "steps-decode-cpu.json", "steps-requests-cpu.json", "steps-prompt-cpu.json",
    "steps-experts-cpu.json", "steps-window-cpu.json", "steps-budget-cpu.json", "prefill-prompt-cpu.json",
    "prefill-budget-cpu.json", "calls-layers-cpu.json", "capture-plans-cpu.json",
}  # fmt: skip
REPLAY_ARMS = {"eager_replay", "piecewise_replay_eager", "piecewise_replay_graphs", "piecewise_replay_one_launch"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every record of one run of the whole suite, by file name, and what the command printed."""
    folder = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_suite, "CPU_GRID", GRID)
        for name in ("LEAST_ROUNDS", "LEAST_LONG_ROUNDS", "MOST_ROUNDS"):
            patch.setattr(step_runs, name, 2)
        patch.setattr(call_times, "ROUNDS", 2)
        patch.setattr(capture_times, "REPLAY_COUNTS", (2,))
        asked = ["--suite", "steps", "--preset", write_config(folder), "--backend", "host", "--shape", "tiny"]
        result = CliRunner().invoke(measure_command.command, [*asked, "--seed", "4", "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return {path.name: read_record(path) for path in (folder / "out").iterdir()}, result.output


def test_the_command_line_offers_every_sweep_and_arm() -> None:
    assert measure_command.SWEEPS == SWEEPS and measure_command.ARMS == ARM_NAMES


def test_every_sweep_writes_its_records(made) -> None:
    records, printed = made
    assert set(records) == RECORDS
    assert all(record.points and record.seed == 4 for record in records.values())
    assert all(name in printed for name in RECORDS)
    assert "piecewise_replay_graphs ms" in printed


def test_settings_name_the_decoder_the_rates_and_the_sizes(made) -> None:
    records, _ = made
    settings = records["steps-threshold-cpu.json"].settings
    assert settings["subject"] == "threshold" and settings["model"] == "tiny"
    assert settings["copy_bandwidth_gbps"] > 0 and settings["matmul_tflops"] > 0
    assert settings["launch_us_before"] > 0 and settings["launch_us_after"] > 0
    assert settings["model_sizes"] == [2, 8, 16, 32] and settings["replay_sizes"] == [8, 16]


def test_points_hold_times_records_and_bounds(made) -> None:
    records, _ = made
    points = [point for name, record in records.items() if name.startswith("steps") for point in record.points]
    assert {point["arm"] for point in points} == {*ARM_NAMES}
    for point in points:
        assert 0 < point["p10"] <= point["step_us"] <= point["p90"] and point["n"] == 2
        assert point["limit_us"] > 0 and point["host_us"] > 0 and point["predicted_us"] is None
        assert (point["replay_rows"] > 0) == (point["arm"] in REPLAY_ARMS)
        assert (point["mode"] == "NONE") == point["arm"].startswith("eager")
        assert (point["replay_mode"] == "PIECEWISE") == (point["arm"] in sorted(REPLAY_ARMS)[2:])
        assert point["graph_launches"] is point["device_us"] is None, "there is no GPU whose launches count"


def test_the_sweeps_vary_what_they_are_named_after(made) -> None:
    records, _ = made

    def values(sweep: str, key: str) -> set:
        return {point[key] for point in records[f"steps-{sweep}-cpu.json"].points}

    assert values("window", "window") == {4} and values("experts", "num_local_experts") == {4}
    assert values("budget", "max_num_batched_tokens") == {16, 32} and values("prompt", "computed") == {0, 32}
    assert values("decode", "is_decode") == {True} and values("requests", "num_decodes") == {0, 1}
    assert {8, 9, 16, 17, 32} <= values("threshold", "num_tokens")


def test_all_arms_of_a_batch_are_held_out_together_a_fifth_of_the_batches(made) -> None:
    """Issue 4, point 2."""
    records, _ = made
    points = records["steps-threshold-cpu.json"].points
    batches: dict[tuple, set] = {}
    for point in points:
        key = tuple(point[name] for name in ("num_tokens", "num_reqs", "longest_query"))
        batches.setdefault(key, set()).add(point["held_out"])
    assert all(len(flags) == 1 for flags in batches.values())
    assert sum(flags == {True} for flags in batches.values()) == len(batches) // ONE_IN > 0


def test_a_prefill_is_measured_as_a_whole(made) -> None:
    records, _ = made
    points = records["prefill-budget-cpu.json"].points
    assert {(point["max_num_batched_tokens"], point["num_steps"]) for point in points} == {(16, 2), (32, 1)}
    assert all(point["prompt_tokens"] == 32 and point["prefill_us"] > 0 for point in points)


def test_calls_are_timed_on_whole_and_kept_rows(made) -> None:
    records, _ = made
    points = records["calls-layers-cpu.json"].points
    ops = ["attend_window", "attend_shared", "expert_w13", "expert_w2", "wqkv_a", "wq_b", "wo_b"]
    assert [point["op"] for point in points[:9]] == [*ops, "shared_w13", "shared_w2"]
    assert [point["rows"] for point in points] == [64] * 9 + [8] * 9
    product = next(point for point in points if point["op"] == "wq_b" and point["rows"] == 64)
    inner, width = TINY.q_lora_rank, TINY.num_heads * TINY.head_dim
    assert product["flops"] == 2 * 64 * inner * width
    assert product["bytes"] == 4 * (64 * inner + 64 * width + inner * width)


def test_captures_weigh_model_and_replay_graphs_apart(made) -> None:
    """O5."""
    records, _ = made
    points = records["capture-plans-cpu.json"].points
    assert [(p["plan"], p["group"], p["num_graphs"]) for p in points] == [
        ("2 replay sizes", "model", 1),
        ("2 replay sizes", "replay", 2),
    ]


def test_the_plans_of_presets_are_captured_where_they_have_replay_graphs() -> None:
    plans = capture_plans(load_config("default"), preset_names())
    assert {"b200-tp4-c8", "b200-tp4-c32", "b300-tp-recipe"} <= plans.keys()
    assert not {"default", "h200-tp4-c8"} & plans.keys()
    assert [len(plans[f"{count} replay sizes"].replay_sizes) for count in (4, 8, 16, 32)] == [4, 8, 16, 32]
    assert all(len(plan.model_sizes) == 1 and not plan.full_sizes for plan in plans.values())


def test_a_sweep_that_fails_leaves_the_others_theirs_and_is_raised_after_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(step_suite, "CPU_GRID", GRID)
    monkeypatch.setattr(call_times, "ROUNDS", 2)

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(step_suite.STEP_SWEEPS, "decode", fails)
    request = make_request(command="", config_name=write_config(tmp_path), backend="host", sweeps=("decode", "layers"))
    with pytest.raises(RuntimeError, match="sweeps failed.*decode: out of memory"):
        list(run_suites([suites.STEPS], request, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["calls-layers-cpu.json"]


def test_an_arm_that_no_step_of_a_sweep_runs_as_is_named_and_nothing_is_written(tmp_path, monkeypatch) -> None:
    """A sweep of prefills has no batch for FULL graphs."""
    monkeypatch.setattr(step_suite, "CPU_GRID", GRID)
    request = make_request(
        command="", config_name=write_config(tmp_path), backend="host", sweeps=("threshold",), arms=("full",)
    )
    with pytest.raises(RuntimeError, match="threshold: arm is full: no step of sweep threshold runs so"):
        list(run_suites([suites.STEPS], request, tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())
