"""`replay-sim simulate`: what it prints and what it refuses."""

import json

import pytest
from click.testing import CliRunner
from small_config import NUM_MODEL_GRAPHS, NUM_REPLAY_GRAPHS, write_config, write_trace

from replay_sim.batch.dispatch import DispatchTable, StepRecord
from replay_sim.commands.simulate import command
from replay_sim.explore import tuning_costs

PRESET = "b200-tp4-c32"


def output(*args: str) -> str:
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_is_one_object_with_the_plan_the_counts_and_the_tables() -> None:
    """D4, G3."""
    data = json.loads(output(PRESET, "--requests", "40", "--json"))
    summary = data["summary"]
    assert summary["requests_finished"] == 40
    assert sum(row["count"] for row in data["dispatch"]["model_graphs"]) == summary["steps"]
    assert sum(row["count"] for row in data["dispatch"]["replay_graphs"]) == summary["replay_steps"]
    assert sum(data["dispatch"]["replay_reasons"].values()) == summary["steps"]
    assert 0 < summary["replay_step_share"] < 1
    assert data["decoder_replay_trim_threshold"] == 768
    assert data["source"].startswith("counted, not timed")


def test_the_same_seed_prints_the_same_and_another_seed_does_not() -> None:
    first, again, other = (
        output(PRESET, "--requests", "40", "--acceptance-rate", "0.6", "--json", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_text_has_both_tables_the_counts_and_a_last_line_of_what_was_done() -> None:
    text = output(PRESET, "--requests", "40", "--rows", "3", "--steps", "30")
    assert "**Model graphs**" in text and "**Replay graphs**" in text
    assert "not shown." in text
    assert text.splitlines()[-1].startswith("Simulated 30 steps in ")
    assert "drawn with seed 0 from profile conversation" in text


def test_a_trace_file_is_run_to_its_end(tmp_path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n2000,3\n100,1\n")
    summary = json.loads(output(PRESET, "--trace", str(path), "--json"))["summary"]
    assert (summary["requests_finished"], summary["replay_steps"], summary["trimmed_rows"]) == (2, 1, 1872)


def test_prompts_whose_rows_are_all_read_trim_nothing() -> None:
    """S1."""
    data = json.loads(output(PRESET, "--requests", "40", "--prompt-logprobs-share", "1", "--json"))
    assert data["summary"]["trimmed_rows"] == 0


def test_a_prefix_cache_saves_what_prompts_share(tmp_path) -> None:
    """The second prompt starts a window of 128 before the end of the two blocks that it shares."""
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 3]}
    path.write_text("\n".join(json.dumps(row | {"timestamp": 0}) for _ in range(33)))
    args = (PRESET, "--trace", str(path), "--prefix-cache-blocks")
    plain, cached = (json.loads(output(*args, blocks, "--json")) for blocks in ("0", "100"))
    assert (plain["summary"]["cached_tokens"], plain["prefix_cache_blocks"]) == (0, 0)
    saved = cached["summary"]["cached_tokens"]
    assert saved > 0 and saved % (1024 - 128) == 0
    assert plain["summary"]["tokens"] - cached["summary"]["tokens"] == saved
    assert f"Prefix hits saved {saved:,} prompt tokens." in output(*args, "100")


UNUSED = {
    "a seed that draws nothing": (("--trace", "{trace}", "--seed", "3"), ["seed is 3", "trace is '{trace}'"]),
    "a number of requests beside a trace": (("--trace", "{trace}", "--requests", "9"), ["requests is 9", "trace is"]),
    "a rate without times": (("--request-rate", "2"), ["request_rate is 2.0: it needs timed"]),
    "a burstiness without times": (("--burstiness", "2"), ["burstiness is 2.0: it needs timed"]),
    "a burstiness of no rate": (
        ("--timed", "--burstiness", "2", "--profile", "summarisation"),
        ["burstiness is 2.0: it needs request_rate", "summarisation"],
    ),
    "a prefix cache of drawn requests": (("--prefix-cache-blocks", "9"), ["prefix_cache_blocks is 9", "a trace"]),
    "a prefix cache without hashes": (
        ("--trace", "{trace}", "--prefix-cache-blocks", "9"),
        ["prefix_cache_blocks is 9: it needs prefix hashes", "lengths.csv have none"],
    ),
    "rows of no table": (("--json", "--rows", "3"), ["rows is 3 and json is given"]),
}


@pytest.mark.parametrize(("args", "named"), UNUSED.values(), ids=UNUSED)
def test_an_option_that_would_change_nothing_is_refused_with_the_reason(args, named, tmp_path) -> None:
    trace = str(write_trace(tmp_path))
    with pytest.raises(ValueError) as refused:
        CliRunner().invoke(command, (PRESET, *(arg.format(trace=trace) for arg in args)), catch_exceptions=False)
    assert all(part.format(trace=trace) in str(refused.value) for part in named), refused.value


def test_a_seed_of_what_is_drawn_beside_a_trace_is_taken(tmp_path) -> None:
    """Which draft tokens are accepted, and whose prompt rows are read, are draws."""
    args = (PRESET, "--trace", str(write_trace(tmp_path)), "--seed", "3", "--json")
    for more in (("--acceptance-rate", "0.5"), ("--prompt-logprobs-share", "0.5")):
        assert json.loads(output(*args, *more))["seed"] == 3


def test_in_virtual_time_a_higher_rate_fills_the_batches_and_requests_have_times(monkeypatch) -> None:
    """Issue 6: TTFT, time per output token and step times, here by a step time of a test's own."""

    class Costs:
        source = "a step time for tests"

        @staticmethod
        def seconds(record: StepRecord) -> float:
            return 0.005 + record.padded_tokens * 1e-6

        @staticmethod
        def guesses_of_table(table: DispatchTable) -> tuple[str, ...]:
            return (f"{table.num_steps} steps guessed",)

    monkeypatch.setattr(tuning_costs, "fitted_costs", lambda config: Costs())
    slow, fast = (
        json.loads(output(PRESET, "--requests", "60", "--timed", "--request-rate", rate, "--json"))
        for rate in ("0.5", "500")
    )
    assert slow["source"] == "in virtual time, a step time for tests"
    assert slow["outside_of_what_was_measured"] == [f"{slow['summary']['steps']} steps guessed"]
    assert slow["summary"]["requests_finished"] == slow["times"]["ttft_s"]["count"] == 60
    assert fast["summary"]["steps"] < slow["summary"]["steps"] == slow["times"]["step_s"]["count"]
    assert 0.005 <= slow["times"]["ttft_s"]["p50"] < fast["times"]["ttft_s"]["p50"]
    counts = slow["histograms"]["num_tokens"]
    assert (
        sum(value * count for value, count in zip(counts["values"], counts["counts"], strict=True))
        == (slow["summary"]["tokens"])
    )
    text = output(PRESET, "--requests", "20", "--timed")
    assert "Dispatch is in virtual time, a step time for tests." in text and "steps guessed" in text
    assert all(f"{name}: median " in text for name in ("Step time", "TTFT", "Time per output token"))


def test_steps_are_run_for_real_and_dispatched_as_simulated(tmp_path) -> None:
    """G3: both print the same dispatch table."""
    trace, config = str(write_trace(tmp_path, ((40, 9), (20, 2), (9, 1)))), write_config(tmp_path)
    text = output(config, "--trace", trace, "--steps", "5", "--execute", "host")
    assert text.startswith("Workload: 3 requests of lengths.csv\n")
    assert "Ran 5 steps of tiny on the host backend in " in text.splitlines()[-1]
    for group, graphs in (("model", NUM_MODEL_GRAPHS), ("replay", NUM_REPLAY_GRAPHS)):
        (row,) = [line.split("|") for line in text.splitlines() if line.startswith(f"| {group} ") and "." in line]
        assert int(row[2]) == graphs
    simulated = output(config, "--trace", trace, "--steps", "5")
    tables = [line for line in simulated.splitlines() if line.startswith("|")]
    assert len(tables) > 8 and all(line in text for line in tables)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no-such-preset",), "no-such-preset"),
        ((PRESET, "--profile", "chat"), "profile is 'chat': it must be one of code, conversation"),
        ((PRESET, "--profile", "conversation", "--trace", "x"), "only one of them may be given"),
        ((PRESET, "--request-rate", "2", "--trace", "x"), "request_rate is 2.0 and trace is 'x': only one of them"),
        ((PRESET, "--burstiness", "2", "--trace", "x"), "burstiness is 2.0 and trace is 'x': only one of them"),
        ((PRESET, "--timed", "--steps", "1", "--execute", "host"), "takes none of .* timed, acceptance_rate"),
        ((PRESET, "--trace", "absent.csv"), "absent.csv: line 1, file: expected a readable file"),
    ],
)
def test_bad_input_is_one_value_error(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(command, args, catch_exceptions=False)


def test_options_out_of_range_are_refused() -> None:
    for option in (("--request-rate", "0"), ("--burstiness", "-1"), ("--prefix-cache-blocks", "-1")):
        assert option[0] in CliRunner().invoke(command, (PRESET, *option)).output
    for option in (("--steps", "0"), ("--requests", "-1"), ("--acceptance-rate", "2"), ("--seed", "-1")):
        result = CliRunner().invoke(command, (PRESET, *option))
        assert result.exit_code == 2
        assert option[0] in result.output
