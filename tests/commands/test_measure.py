"""`replay-sim measure`: the records that it writes, and the command that they hold."""

import json
import shlex

import pytest
from small_config import write_config, write_trace

from replay_sim import cli
from replay_sim.commands.measure import command, remaking_command
from replay_sim.measure.records import bundled_records, read_record


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
