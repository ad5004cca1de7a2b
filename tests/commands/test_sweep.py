"""The sweep command: its table, resuming, and one line for what it cannot use (issue 9)."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_config import write_config, write_trace

from replay_sim import cli
from replay_sim.explore.sweep_table import read_table

GRID = ("--grid", "window=4,8,20", "--grid", "max_num_seqs=2:4:2", "--grid", "plan=default,eager")
"""A window of 20 exceeds the threshold of 16: those points fail."""
ONE = ("--grid", "window=8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, beside the input."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        cli.main(["sweep", *args])
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    """A config and a trace that are swept in a moment, by one process."""
    return write_config(tmp_path), "--trace", str(write_trace(tmp_path)), "--workers", "1"


def test_it_writes_the_table_and_says_what_is_best(small, capsys, here: Path) -> None:
    status, out, err = run(capsys, *small, *GRID, "--out", "sweep.csv")
    first, failed, best, source, *_ = out.splitlines()
    assert (status, err) == (0, "") and first.startswith("12 points, 4 of which failed, on 1 worker process in ")
    assert failed.startswith("4 failed: decoder_replay_trim_threshold: 16 is not allowed; it must exceed window 20")
    table = read_table(here / "sweep.csv")
    least = table.loc[table["workload_s"].idxmin()]
    assert best.startswith(f"Least time: window {least['window']}, max_num_seqs {least['max_num_seqs']}, ")
    assert source.startswith("Times are modelled, fitted to ")
    assert table["window"].tolist() == [4] * 4 + [8] * 4 + [20] * 4 and table["error"].str.len().gt(0).sum() == 4
    assert [path.name for path in here.iterdir()] == ["sweep.csv"]


def test_json_holds_the_same(small, capsys, here: Path) -> None:
    assert (
        run(capsys, *small, *ONE, "--out", "sweep.json")[0] == run(capsys, *small, *ONE, "--out", "sweep.csv")[0] == 0
    )
    (row,) = json.loads((here / "sweep.json").read_text())
    (same,) = read_table(here / "sweep.csv").to_dict("records")
    assert row["num_replay_graphs"] == 2 and row["decoder_replay_cudagraph_capture_sizes"] == [8, 16]
    assert (row["expected_step_ms"], row["plan"]) == (same["expected_step_ms"], "explicit")


STOPS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


@pytest.mark.parametrize(("number", "status", "word"), STOPS)
def test_a_sweep_that_is_stopped_says_in_a_line_how_to_go_on(
    number: int, status: int, word: str, small, capsys, here: Path, monkeypatch
) -> None:
    """Ctrl-C, and what ends a job: the exit status is a shell's for that signal."""

    def stopped(rows, what):
        for row in rows:
            yield row
            signal.raise_signal(number)

    handlers = [signal.getsignal(each) for each, *_ in STOPS]
    monkeypatch.setattr("replay_sim.commands.sweep.progress_bar", stopped)
    done = run(capsys, *small, *GRID, "--out", "sweep.csv")
    kept = "6 of 12 points are in sweep.csv.points; the same command with --resume goes on with them"
    assert done == (status, "", f"replay-sim: {word}: {kept}\n")
    assert [signal.getsignal(each) for each, *_ in STOPS] == handlers


def test_a_sweep_that_is_stopped_before_a_point_has_finished_leaves_nothing(small, capsys, here, monkeypatch) -> None:
    monkeypatch.setattr("replay_sim.commands.sweep.progress_bar", lambda *_: signal.raise_signal(signal.SIGINT))
    status, out, err = run(capsys, *small, *GRID, "--out", "sweep.csv")
    assert (status, out, err) == (130, "", "replay-sim: interrupted: no point had finished, and nothing is kept\n")
    assert not list(here.iterdir())


ENDED_TWICE = """
import os, signal
from replay_sim.commands.sweep import _stopped_by_signals
with _stopped_by_signals():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGINT)
"""


def test_stopped_again_while_it_ends_the_process_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED_TWICE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_sweep_of_which_no_point_ran_fails_with_a_line_and_its_table(small, capsys, here: Path) -> None:
    status, out, err = run(capsys, *small, "--grid", "window=16,20", "--out", "sweep.csv")
    assert status == 1 and out.startswith("2 points, 2 of which failed, ")
    assert err == "replay-sim: no point ran: all 2 failed, each for the reason in sweep.csv\n"
    assert [path.name for path in here.iterdir()] == ["sweep.csv"]


def test_what_was_stopped_is_not_overwritten_and_is_resumed_to_the_same_table(
    small, capsys, here: Path, monkeypatch
) -> None:
    def stopped(rows, what):
        for row in rows:
            yield row
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr("replay_sim.commands.sweep.progress_bar", stopped)
        assert run(capsys, *small, *GRID, "--out", "sweep.csv")[0] == 130
    assert [path.name for path in here.iterdir()] == ["sweep.csv.points"]
    kept = (here / "sweep.csv.points").read_bytes()
    status, _, err = run(capsys, *small, *GRID, "--out", "sweep.csv")
    assert status == 2 and "did not end" in err and (here / "sweep.csv.points").read_bytes() == kept
    status, _, err = run(capsys, *small, *ONE, "--out", "sweep.csv", "--resume")
    assert status == 2 and "holds points of a sweep that differs from this one in designs;" in err
    assert run(capsys, *small, *GRID, "--out", "sweep.csv", "--resume")[0] == 0
    resumed = (here / "sweep.csv").read_bytes()
    assert run(capsys, *small, *GRID, "--out", "again.csv")[0] == 0
    assert (here / "again.csv").read_bytes() == resumed


@pytest.mark.parametrize("changed", [{"workload_s": "<b>"}, {"workload_s": -math.inf}, {"point": 999_999}, None])
def test_a_finished_point_that_this_sweep_cannot_have_is_refused(
    changed: dict | None, small, capsys, here: Path, monkeypatch
) -> None:
    """Issue 8: a file from outside; its numbers would be the best design."""
    with monkeypatch.context() as patched:
        patched.setattr("replay_sim.commands.sweep.progress_bar", lambda rows, _: (next(iter(rows)), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            cli.main(["sweep", *small, *GRID, "--out", "sweep.csv"])
    path = here / "sweep.csv.points"
    head, first, *_ = path.read_text().splitlines()
    row = {"point": 0} if changed is None else json.loads(first) | changed
    path.write_text(f"{head}\n{json.dumps(row)}\n")
    status, out, err = run(capsys, *small, *GRID, "--out", "sweep.csv", "--resume")
    assert (status, out) == (2, "") and err.startswith("replay-sim: sweep.csv.points: line 2 is no finished point of ")
    assert [entry.name for entry in here.iterdir()] == ["sweep.csv.points"]


def test_names_that_no_terminal_and_no_table_can_hold_are_escaped(small, capsys, here: Path) -> None:
    """Issue 8: of a config and of the table itself, that are no UTF-8."""
    Path("\udcff\x1b.json").write_text(Path(small[0]).read_text())
    status, out, _ = run(capsys, "\udcff\x1b.json", *small[1:], *ONE, "--out", "\udcfe\x07.csv")
    assert status == 0 and out.splitlines()[0].endswith(r" s: \udcfe\x07.csv")
    assert read_table(here / "\udcfe\x07.csv")["config"].tolist() == [r"\udcff\x1b.json"]


def test_profiles_and_configs_are_axes_too(capsys, here: Path) -> None:
    axes = ("--grid", "profile=conversation", "--grid", "max_num_seqs=8")
    status, _, _ = run(capsys, "default", "b200-tp4-c32", *axes, "--requests", "5", "--workers", "1", "--out", "t.csv")
    table = read_table(here / "t.csv")
    assert status == 0 and table["config"].tolist() == ["default", "b200-tp4-c32"]
    assert table["workload"].str.contains("profile conversation").all()


BAD = {
    "no grid": (("default", "--out", "t.csv"), ["--grid"]),
    "no config": ((*ONE, "--out", "t.csv"), ["CONFIG"]),
    "no file": (("default", *ONE), ["--out"]),
    "another form": (("default", *ONE, "--out", "t.parquet"), ["out", "t.parquet", ".csv or .json"]),
    "a folder": (("default", *ONE, "--out", "folder.csv"), ["out: 'folder.csv'", "it is a folder"]),
    "an unknown config": (("defualt", *ONE, "--out", "t.csv"), ["'defualt'", "did you mean 'default'"]),
    "no values": (("default", "--grid", "window", "--out", "t.csv"), ["grid", "'window'", "NAME=VALUES"]),
    "an unknown axis": (("default", "--grid", "windw=8", "--out", "t.csv"), ["'windw'", "did you mean 'window'"]),
    "a value that is no number": (("default", "--grid", "window=8,x", "--out", "t.csv"), ["window='x'"]),
    "an empty range": (("default", "--grid", "window=9:8:1", "--out", "t.csv"), ["window=9:8:1"]),
    "an unknown plan": (("default", "--grid", "plan=best", "--out", "t.csv"), ["plan", "'best'", "optimal-K"]),
    "an unknown profile": (("default", "--grid", "profile=chat", "--out", "t.csv"), ["'chat'", "conversation"]),
    "a trace and profiles": (
        ("default", "--grid", "profile=conversation", "--trace", "t.csv", "--out", "t.csv"),
        ["profile", "trace"],
    ),
    "a seed that draws nothing": (
        ("default", *ONE, "--trace", "t.csv", "--seed", "1", "--out", "t.csv"),
        ["seed is 1 and trace is 't.csv'"],
    ),
    "too many points": (
        ("default", "--grid", "window=1:2000:1", "--grid", "max_num_seqs=1:1000:1", "--out", "t.csv"),
        ["2,000,000 points", "1,000,000"],
    ),
    "no workers": (("default", *ONE, "--workers", "0", "--out", "t.csv"), ["--workers", "0"]),
    "workers for a measurement": (
        ("default", *ONE, "--workers", "2", "--measure", "--out", "t.csv"),
        ["workers is 2", "measure", "only one"],
    ),
    "workers and a cluster": (
        ("default", *ONE, "--workers", "2", "--dask", "x", "--out", "t.csv"),
        ["dask", "workers"],
    ),
}


@pytest.mark.parametrize(("args", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_nothing_is_written(args, named, capsys, here: Path) -> None:
    if "folder.csv" in args:
        (here / "folder.csv").mkdir()
    before = list(here.iterdir())
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "") and err.startswith("replay-sim: ") and err.count("\n") == 1
    assert all(part in err for part in named), err
    assert list(here.iterdir()) == before


def test_without_the_extra_a_cluster_is_refused(small, capsys, monkeypatch, here: Path) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    status, _, err = run(capsys, *small[:3], *ONE, "--dask", "tcp://127.0.0.1:1", "--out", "t.csv")
    assert status == 2 and "which the extra `dask` installs" in err and not list(here.iterdir())


def test_without_a_gpu_a_measurement_is_refused(small, capsys, monkeypatch, here: Path) -> None:
    """Issue 9: on GPUs through measurement."""
    monkeypatch.setattr("replay_sim.explore.sweep_executors.visible_gpus", list)
    status, out, err = run(capsys, *small[:3], *ONE, "--measure", "--out", "t.csv")
    assert (status, out) == (2, "") and not list(here.iterdir())
    assert err == ("replay-sim: measure: no CUDA device is available here; without --measure step times are modelled\n")


def test_a_point_that_finds_no_device_is_a_row_with_that_reason(small, capsys, monkeypatch, here: Path) -> None:
    """A GPU that is named and hidden, on any machine."""
    monkeypatch.setattr("replay_sim.explore.sweep_executors.visible_gpus", lambda: ["-1"])
    status, out, err = run(capsys, *small[:3], *ONE, "--measure", "--out", "t.csv")
    assert status == 1 and "no point ran" in err
    assert (
        "1 points, 1 of which failed, on 1 GPU in " in out and "1 failed: backend is 'cuda' and no CUDA device" in out
    )
