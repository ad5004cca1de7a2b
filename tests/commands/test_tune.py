"""The tune command: JSON, text, what it emits, and one line for what it cannot use."""

import json
from pathlib import Path

import pytest
from explore.tuning_cases import PlainCosts

from replay_sim import cli
from replay_sim.config import load_config
from replay_sim.explore import tuning_report

TABLE = (
    "INFO 11-29 10:00:00 [cudagraph.py:12] | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n"
    "INFO 11-29 10:00:00 [cudagraph.py:12] |---|---|---|---|---|\n"
    "INFO 11-29 10:00:00 [cudagraph.py:12] | 96 | 96 | 0 | FULL | 900 |\n"
    "INFO 11-29 10:00:00 [cudagraph.py:12] | 1300 | 1536 | 236 | PIECEWISE | 40 |\n"
)
SCORES = ("expected_step_ms", "padded_rows", "num_replay_graphs", "source")


@pytest.fixture(autouse=True)
def plain_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a plain law, so that the test needs no fitted model."""
    monkeypatch.setattr("replay_sim.explore.tuning_costs.fitted_costs", lambda config: PlainCosts())


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        cli.main(["tune", *args])
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


def test_names_that_no_terminal_can_show_are_escaped(capsys, tmp_path) -> None:
    """Issue 8: of a table of statistics, that is no UTF-8 and holds what a terminal acts on."""
    log = tmp_path / "\udcfe\x1b[2J.log"
    log.write_text(TABLE)
    status, out, _ = run(capsys, "default", "--statistics", str(log))
    assert status == 0 and r"the statistics table \udcfe\x1b[2J.log" in out


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "server.log"
    path.write_text(TABLE)
    return str(path)


def test_json_has_the_promised_names_and_tuned_is_no_worse(capsys: pytest.CaptureFixture[str]) -> None:
    """product.md, `tune --json`; tuned on the first half, judged on the second."""
    status, out, _ = run(capsys, "default", "--requests", "60", "--json")
    told = json.loads(out)
    assert status == 0
    assert told["cudagraph_capture_sizes"] == sorted(set(told["cudagraph_capture_sizes"]))
    assert told["decoder_replay_cudagraph_capture_sizes"] and told["decoder_replay_trim_threshold"] > 128
    for name in ("default", "own", "tuned"):
        assert all(key in told[name] for key in SCORES) and all(key in told["unseen"][name] for key in SCORES)
    assert told["default"]["num_replay_graphs"] == 16 >= told["tuned"]["num_replay_graphs"]
    assert told["tuned"]["expected_step_ms"] <= told["default"]["expected_step_ms"]


def test_most_graphs_bound_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "default", "--requests", "60", "--max-graphs", "2", "--json")
    assert len(json.loads(out)["decoder_replay_cudagraph_capture_sizes"]) <= 2


def test_the_text_leads_with_the_winner_and_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "default", "--requests", "60")
    first = out.splitlines()[0]
    assert status == 0 and first.split()[0] in ("Take", "Keep") and "ms" in first
    assert "decoder_replay_cudagraph_capture_sizes: " in out and "a plain law" in out


def test_a_pasted_table_gives_a_plan_without_a_trace(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 6, 6."""
    status, out, _ = run(capsys, "default", "--statistics", table, "--json")
    told = json.loads(out)
    assert status == 0 and 1300 in told["cudagraph_capture_sizes"] and told["unseen"] is None
    assert told["decoder_replay_cudagraph_capture_sizes"] == [224]
    assert any("assumed" in sentence for sentence in told["assumed"])


def test_a_table_of_a_server_with_a_larger_budget_is_refused(table: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"max_num_seqs": 96, "max_num_batched_tokens": 1024}))
    status, _, err = run(capsys, str(path), "--statistics", table)
    assert status == 2 and "line 4, Unpadded Tokens: expected at most max_num_batched_tokens 1024 " in err


def test_emit_prints_the_config_to_paste(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "default", "--statistics", table, "--emit", "vllm")
    verdict, _, *lines = out.splitlines()
    assert status == 0 and verdict.startswith("# Take the tuned sizes: ")
    assert 1300 in json.loads(lines[1])["cudagraph_capture_sizes"]
    assert lines[4].startswith("vllm serve deepseek-ai/DeepSeek-V4.1-Flash --max-num-seqs 16 ")


def test_emit_prints_the_configs_own_sizes_where_they_are_to_be_kept(
    table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_report, "keeps_own", lambda _: True)
    status, out, _ = run(capsys, "default", "--statistics", table, "--emit", "vllm")
    own = load_config("default")
    lines = out.splitlines()
    assert status == 0 and tuple(json.loads(lines[3])["cudagraph_capture_sizes"]) == own.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_cudagraph_capture_size": 1024}, "tuned raises max_cudagraph_capture_size from 1024 to 1300: "),
        (
            {"cudagraph_decoder_replay": False},
            "tuned sets cudagraph_decoder_replay to true, which CONFIG sets to false",
        ),
        ({}, None),
    ],
)
def test_what_the_tuned_config_sets_against_the_users_is_said_wherever_it_is_told(
    changes: dict, told: str | None, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A largest size above the one that CONFIG states, and replay graphs that CONFIG turns off."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"max_num_seqs": 96, "max_cudagraph_capture_size": 4096} | changes))
    args = (str(path), "--statistics", table)
    text, pasted = (run(capsys, *args, *more)[1].splitlines() for more in ((), ("--emit", "vllm")))
    said = json.loads(run(capsys, *args, "--json")[1])["overrides"]
    assert [line for line in text if line.startswith("Note: tuned ")] == [f"Note: {line}" for line in said]
    assert [line for line in pasted if line.startswith("# tuned ")] == [f"# {line}" for line in said]
    assert len(said) == (told is not None) and all(line.startswith(told or "") for line in said)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("default", "--max-pool-mib", "inf"), "max_pool_mib: inf is not allowed"),
        (("default", "--max-capture-s", "inf"), "max_capture_s: inf is not allowed"),
        (("no-such",), "no-such"),
        (("default", "--json", "--emit", "vllm"), "emit"),
        (("default", "--trace", "a", "--statistics", "b"), "statistics"),
        (("default", "--statistics", "absent.log"), "absent.log"),
        (("default", "--statistics", "b", "--seed", "1"), "seed is 1 and statistics is 'b'"),
        (("default", "--trace", "a", "--requests", "9"), "requests is 9 and trace is 'a'"),
        (("default", "--profile", "no-such"), "no-such"),
        (("default", "--max-graphs", "-1"), "max-graphs"),
        (("default", "--requests", "20", "--max-capture-s", "0.5"), "max_capture_s"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "") and err.splitlines()[-1].startswith("replay-sim: ") and named in err
