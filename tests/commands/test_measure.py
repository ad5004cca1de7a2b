"""`replay-sim measure`: the records that it writes, and the command that they hold."""

import json
import re
import shlex
from pathlib import Path

import pytest
from small_config import write_config, write_trace

from replay_sim import cli
from replay_sim.commands.measure import command, refuse_unread, remaking_command
from replay_sim.measure.records import bundled_records, read_record

ROOT = Path(__file__).resolve().parents[2]
UNREAD = {
    "a trace that is not run": ("--suite movement --trace t.csv", "trace is 't.csv': it needs suite run"),
    "steps that are not run": ("--suite pool --suite steps --steps 9", "steps is 9: it needs suite run"),
    "histories of no pools": ("--suite run --histories h", "histories is 'h': it needs suite pool"),
    "an arrangement of no pools": (
        "--suite region --arrangement shared",
        "arrangement is 'shared': it needs suite pool",
    ),
    "a sweep of no steps": ("--suite run --sweep decode", "sweep is 'decode': it needs suite steps"),
    "an arm of no steps": (
        "--suite region --arm full",
        "arm is 'full': it needs suite steps with sweep threshold, ",
    ),
    "an arm of a sweep without arms": (
        "--suite steps --sweep layers --sweep capture --arm full",
        "arm is 'full': it needs suite steps with sweep threshold, ",
    ),
    "a config of rows alone": ("--suite movement --preset default", "preset is 'default': it needs suite run, pool, "),
    "a config of other windows": (
        "--suite movement --suite steps --sweep window --preset default",
        "preset is 'default': it needs suite run, pool, region or steps with sweep threshold, ",
    ),
    "a decoder of no device": ("--suite laptop --shape tiny", "shape is 'tiny': it needs suite run, pool, "),
    "a backend of no device": ("--suite laptop --backend host", "backend is 'host': it needs suite run, pool, "),
    "a seed of no device": (
        "--suite laptop --seed 0",
        "seed is 0: it needs suite run, pool, movement, region or steps",
    ),
}
READ = (
    "--preset default --trace t --steps 9 --shape tiny --backend host --seed 1 --arrangement shared --histories h "
    "--sweep layers --arm full --suite run --suite pool --suite steps --sweep window",
    "--preset default --trace t --steps 9 --shape tiny --backend host --seed 1 --arrangement shared --histories h "
    "--sweep decode --arm full",
    "--suite region --preset default --shape tiny --backend host --seed 1",
    "--suite movement --shape tiny --backend host --seed 1",
    "--suite steps --sweep window --arm full --shape tiny --backend host --seed 1",
    "--suite steps --sweep window --sweep capture --preset default",
    "--suite laptop",
)


def parsed(args: tuple[str, ...]) -> str:
    """The command that a record of this call would hold."""
    return remaking_command(command.make_context("measure", list(args)))


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ("--out /home/me/records", "--out records"),
        ("--out=/mnt/x", "--out records"),
        ("--out build", "--out records"),
        ("--preset default --out records", "--preset default --out records"),
        ("--preset /srv/configs/my.json --out r", "--preset my.json --out records"),
        ("--trace ../data/trace.csv --out r", "--trace trace.csv --out records"),
        ("--trace '/a folder/a trace.csv' --out r", "--trace 'a trace.csv' --out records"),
        ("--suite pool --histories /data/h --out r", "--suite pool --histories h --out records"),
        ("--suite run --suite pool --out r", "--suite run --suite pool --out records"),
        ("--out r --seed 7 --steps 9 --shape tiny", "--steps 9 --shape tiny --seed 7 --out records"),
    ],
)
def test_a_records_command_names_files_without_the_folders_of_a_machine(args: str, kept: str) -> None:
    assert parsed(tuple(shlex.split(args))) == f"replay-sim measure {kept}"


def test_the_command_of_a_record_asks_for_the_same_again() -> None:
    """Those of repeats join two runs' records and are no command of their own."""
    for line in {record.command for _, record in bundled_records() if record.kind != "repeat"}:
        program, name, *args = shlex.split(line)
        assert (program, name) == ("replay-sim", "measure")
        again = parsed(tuple(args))
        assert sorted(shlex.split(again)) == sorted(shlex.split(line))


@pytest.mark.parametrize(("args", "line"), UNREAD.values(), ids=UNREAD)
def test_an_option_that_nothing_reads_is_refused_and_nothing_runs(args, line, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        cli.main(["measure", *shlex.split(args), "--out", "out"])
    out, err = capsys.readouterr()
    assert (exited.value.code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"replay-sim: {line}") and not list(tmp_path.iterdir())


def accept(args: list[str]) -> None:
    """Parse and check the options of a call; ValueError or ClickException for one that is refused."""
    refuse_unread(command.make_context("measure", args))


@pytest.mark.parametrize("args", READ)
def test_an_option_that_one_of_the_suites_reads_is_accepted(args: str) -> None:
    accept([*shlex.split(args), "--out", "r"])


def test_what_is_not_given_is_not_refused() -> None:
    """A default is no option that was given."""
    for suite in ("run", "pool", "movement", "region", "laptop", "steps"):
        accept(["--suite", suite, "--out", "r"])


def test_the_command_of_every_bundled_record_is_accepted() -> None:
    """Those of repeats go on with another program, after two measurements."""
    paths = sorted((ROOT / "replay_sim" / "records").glob("*.json"))
    for path in paths:
        measure, *_ = read_record(path).command.split(" && ")
        program, name, *args = shlex.split(measure)
        assert (program, name) == ("replay-sim", "measure")
        accept(args)
    assert len(paths) > 30


def test_every_measurement_that_a_document_names_is_accepted() -> None:
    """The README, the Makefile, and the sources of what is kept for tests."""
    documents = [ROOT / "README.md", ROOT / "Makefile", ROOT / "tests" / "capture" / "histories" / "SOURCE.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents)
    calls = re.findall(r"replay-sim measure ([^`\n]+)", text)
    for args in calls:
        accept(shlex.split(args))
    assert len(calls) >= 6


def test_records_are_written_and_named_on_standard_output(tmp_path, capsys) -> None:
    config, trace, out = write_config(tmp_path), write_trace(tmp_path), tmp_path / "made" / "records"
    args = ["--preset", config, "--trace", str(trace), "--suite", "run", "--steps", "2", "--backend", "host"]
    with pytest.raises(SystemExit) as exited:
        cli.main(["measure", *args, "--seed", "5", "--out", str(out)])
    text = capsys.readouterr().out
    assert not exited.value.code
    assert sorted(path.name for path in out.iterdir()) == ["capture-small-cpu.json", "run-small-cpu.json"]
    for path in out.iterdir():
        record = read_record(path)
        assert f"wrote {path}\n" in text
        assert record.seed == 5 and str(tmp_path) not in path.read_text()
        assert record.command == (
            "replay-sim measure --preset small.json --suite run --trace lengths.csv --steps 2 --backend host --seed 5 "
            "--out records"
        )
    assert "Ran 2 steps of tiny on the host backend in " in text


def test_records_that_are_there_already_are_replaced_whole(tmp_path, capsys) -> None:
    config, trace = write_config(tmp_path), write_trace(tmp_path)
    (tmp_path / "run-small-cpu.json").write_text("{")
    args = ["--preset", config, "--trace", str(trace), "--suite", "run", "--steps", "1", "--backend", "host"]
    with pytest.raises(SystemExit):
        cli.main(["measure", *args, "--out", str(tmp_path)])
    assert len(read_record(tmp_path / "run-small-cpu.json").points) == 1
    assert json.loads((tmp_path / "small.json").read_text())["window"] == 8
