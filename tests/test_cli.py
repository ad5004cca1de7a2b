"""The command line: answers, and one line for every bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replay_sim import cli
from replay_sim.command_group import group

ROOT = Path(__file__).parents[1]
NOT_WHILE_PLANNING = (
    "torch",
    "numpy",
    "pandas",
    "plotly",
    "ipywidgets",
    "IPython",
    "jupyter_client",
    "scipy",
)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        cli.main(list(args))
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a refused command."""
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err
    return err


def config_file(folder: Path, **settings: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return str(path)


def test_planning_loads_neither_torch_nor_numpy_nor_jupyter() -> None:
    program = (
        "import sys\nfrom replay_sim import cli\n"
        "try:\n    cli.main(['plan', 'default', '--json'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {NOT_WHILE_PLANNING} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["num_replay_graphs"] == 16


def test_the_module_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "replay_sim", "plan", "no-such-preset"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_the_module_lists_the_commands_with_what_they_do() -> None:
    done = subprocess.run([sys.executable, "-m", "replay_sim", "--help"], capture_output=True, text=True, check=True)
    commands = dict(line.split(maxsplit=1) for line in done.stdout.partition("Commands:\n")[2].splitlines())
    assert commands.keys() >= {"check", "measure", "plan", "report", "simulate"} and done.stderr == ""


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((), ("--help",), ("-h",)):
        status, out, _ = run(capsys, *args)
        listed = {line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()}
        assert status == 0 and listed >= {"check", "measure", "plan", "report", "simulate"}
    assert run(capsys, "--version")[1].startswith("replay-sim")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decoder_replay_cudagraph_capture_sizes": [128, 9000]}, ["9000", "max_num_batched_tokens", "8192"]),
        ({"decoder_replay_cudagraph_capture_sizes": [0]}, ["decoder_replay_cudagraph_capture_sizes", "0"]),
        ({"decoder_replay_cudagraph_capture_sizes": [-8]}, ["decoder_replay_cudagraph_capture_sizes", "-8"]),
        ({"decoder_replay_trim_threshold": 128}, ["decoder_replay_trim_threshold", "128", "window"]),
        ({"window": 0}, ["window", "0"]),
        ({"windows": 128}, ["'windows'", "did you mean 'window'"]),
        (
            {"max_num_seqs": 64, "max_cudagraph_capture_size": 8192, "max_num_batched_tokens": 4096},
            ["8192", "max_cudagraph_capture_size", "4096", "max_num_batched_tokens"],
        ),
    ],
)
def test_bad_settings_are_one_line(
    settings: dict, named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ((), ("--json",)):
        line = refused(capsys, "plan", config_file(tmp_path, **settings), *extra)
        assert all(part in line for part in named), line


def test_an_unknown_preset_is_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'h200-tp4-c8'" in refused(capsys, "plan", "h200-tp4-c9")


def test_unreadable_json_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    for text in ("{", "[1]", '{"window": 1,}', ""):
        path.write_text(text)
        assert "unreadable JSON" in refused(capsys, "plan", str(path))


def test_what_this_machine_cannot_hold_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str) -> None:
        raise MemoryError("arena full")

    monkeypatch.setattr("replay_sim.commands.plan.load_config", full)
    assert "arena full" in refused(capsys, "plan", "default")


def test_what_a_terminal_acts_on_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "simulate", "default", "--trace", "no\x1b[2J\x07\u00e4\n.csv")
    assert err.startswith(r"replay-sim: no\x1b[2J\x07\xe4 .csv: line 1, file: ") and err.strip().isprintable()


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, "plan", str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    "args",
    [
        ("plan",),
        ("plan", "default", "more"),
        ("plan", "default", "--no-such"),
        ("no-such",),
        ("plan", "a\nb\udc80"),
        ("simulate", "default", "--steps", str(10**30)),
        ("measure", "--seed", str(10**40), "--out", "absent"),
    ],
)
def test_a_wrong_command_line_is_one_line(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *args)


def test_a_fault_of_the_program_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr(group, "invoke", broken)
    with pytest.raises(TypeError):
        cli.main(["plan", "default"])


def test_an_interrupt_of_a_command_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, and while the help gathers all of them."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replay_sim.commands.plan.load_config", interrupted)
    assert run(capsys, "plan", "default") == (130, "", "replay-sim: interrupted\n")
    monkeypatch.setattr(group, "get_command", interrupted)
    assert run(capsys, "--help") == (130, "", "replay-sim: interrupted\n")


INTERRUPTED_AT = """
import builtins, signal
from replay_sim.cli import main
def importing(name, *args, real=builtins.__import__):
    if name == NAME:
        builtins.__import__ = real
        signal.raise_signal(signal.SIGINT)
    return real(name, *args)
builtins.__import__ = importing
main(["plan", "default"])
"""


@pytest.mark.parametrize("name", ["replay_sim.command_group", "importlib", "click", "json", "replay_sim.plan"])
def test_an_interrupt_while_it_starts_is_one_line(name: str) -> None:
    """From the first import that takes time to the last."""
    program = INTERRUPTED_AT.replace("NAME", repr(name))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "replay-sim: interrupted\n")


def test_until_an_interrupt_can_be_met_nothing_is_loaded() -> None:
    program = "import sys\nbefore = set(sys.modules)\nimport replay_sim.cli\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["replay_sim", "replay_sim.cli"]
