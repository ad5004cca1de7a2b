"""`replay-sim simulate`: what it prints and what it refuses."""

import json

import pytest
from click.testing import CliRunner
from small_config import NUM_MODEL_GRAPHS, NUM_REPLAY_GRAPHS, write_config, write_trace

from replay_sim.commands.simulate import command

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
        ((PRESET, "--profile", "chat"), "profile is 'chat': it must be one of conversation"),
        ((PRESET, "--profile", "conversation", "--trace", "x"), "only one of them may be given"),
        ((PRESET, "--trace", "absent.csv"), "absent.csv: line 1, file: expected a readable file"),
    ],
)
def test_bad_input_is_one_value_error(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(command, args, catch_exceptions=False)


def test_options_out_of_range_are_refused() -> None:
    for option in (("--steps", "0"), ("--requests", "-1"), ("--acceptance-rate", "2"), ("--seed", "-1")):
        result = CliRunner().invoke(command, (PRESET, *option))
        assert result.exit_code == 2
        assert option[0] in result.output
