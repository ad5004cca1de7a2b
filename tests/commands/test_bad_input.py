"""Every command's bad input: one line that names it, exit status 2, no traceback, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_config import CONFIG, write_trace

from replay_sim import cli

COMMANDS = {
    "plan": ["plan", "{config}"],
    "plan as JSON": ["plan", "{config}", "--json"],
    "plan with memory": ["plan", "{config}", "--memory"],
    "simulate": ["simulate", "{config}"],
    "simulate as JSON": ["simulate", "{config}", "--json"],
    "simulate for real": ["simulate", "{config}", "--execute", "host", "--steps", "1"],
    "measure": ["measure", "--preset", "{config}", "--backend", "host", "--out", "out"],
    "report": ["report", "{config}", "--out", "out"],
}
SETTINGS = {
    "a replay size above the token budget": (
        {"decoder_replay_cudagraph_capture_sizes": [8, 65]},
        ["decoder_replay_cudagraph_capture_sizes", "65", "max_num_batched_tokens", "64"],
    ),
    "a model size above the token budget": (
        {"cudagraph_capture_sizes": [16, 128]},
        ["cudagraph_capture_sizes", "128", "max_num_batched_tokens", "64"],
    ),
    "a size of zero": ({"decoder_replay_cudagraph_capture_sizes": [0]}, ["_capture_sizes", "0", "from 1 to"]),
    "a negative size": ({"cudagraph_capture_sizes": [-8, 16]}, ["cudagraph_capture_sizes", "-8", "from 1 to"]),
    "a threshold at the window": (
        {"decoder_replay_trim_threshold": 8},
        ["decoder_replay_trim_threshold", "8", "window"],
    ),
    "a threshold below the window": (
        {"decoder_replay_trim_threshold": 3},
        ["decoder_replay_trim_threshold", "3", "window"],
    ),
    "window 0": ({"window": 0}, ["window", "0", "from 1 to"]),
    "an unknown key": (
        {"decoder_replay_threshold": 16},
        ["'decoder_replay_threshold'", "'decoder_replay_trim_threshold'"],
    ),
    "a size that is text": ({"cudagraph_capture_sizes": "16 64"}, ["cudagraph_capture_sizes", "'16 64'", "a list"]),
    "a maximum that is not the largest size": (
        {"max_cudagraph_capture_size": 32},
        ["max_cudagraph_capture_size", "32", "cudagraph_capture_sizes", "64"],
    ),
}
FILES = {
    "no JSON": ("{", "unreadable JSON"),
    "a comma too many": ('{"window": 8,}', "unreadable JSON"),
    "no object": ("[8]", "must be an object"),
    "a number that JSON has not": ('{"window": NaN}', "NaN"),
    "a key twice": ('{"window": 8, "window": 9}', "'window' is given twice"),
}
TRACES = {
    "absent.csv": (None, ["absent.csv: line 1, file", "a readable file"]),
    "empty.csv": ("", ["empty.csv: line 1, header"]),
    "header.csv": ("prompt,answer\n1,2\n", ["header.csv: line 1, header", "prompt_tokens"]),
    "negative.csv": ("prompt_tokens,output_tokens\n5,1\n-5,1\n", ["negative.csv: line 3, prompt_tokens", "'-5'"]),
    "none.csv": ("prompt_tokens,output_tokens\n", ["none.csv: line 1"]),
}
OPTIONS = {
    "an unknown option": (["plan", "default", "--jsn"], ["--jsn"]),
    "no config": (["simulate"], ["CONFIG"]),
    "an unknown shape": (["plan", "default", "--shape", "tin"], ["--shape", "'tin'", "tiny"]),
    "an unknown order": (["plan", "default", "--order", "random"], ["--order", "largest_first"]),
    "no requests": (["simulate", "default", "--requests", "0"], ["--requests", "0"]),
    "no steps": (["simulate", "default", "--steps", "0"], ["--steps", "0"]),
    "a rate above 1": (["simulate", "default", "--acceptance-rate", "1.5"], ["--acceptance-rate", "1.5"]),
    "a share that is no number": (["simulate", "default", "--prompt-logprobs-share", "x"], ["--prompt-logprobs-share"]),
    "a negative seed": (["report", "default", "--out", "out", "--seed", "-1"], ["--seed", "-1"]),
    "an unknown profile": (["simulate", "default", "--profile", "chat"], ["profile", "'chat'", "conversation"]),
    "a profile and a trace": (
        ["simulate", "default", "--profile", "conversation", "--trace", "x.csv"],
        ["profile", "trace", "only one"],
    ),
    "a real run without steps": (["simulate", "default", "--execute", "host"], ["execute", "'host'", "steps"]),
    "a real run as JSON": (["simulate", "default", "--execute", "host", "--steps", "1", "--json"], ["execute", "json"]),
    "an unknown suite": (["measure", "--suite", "speed", "--out", "out"], ["--suite", "'speed'", "movement"]),
    "an unknown arrangement": (["measure", "--arrangement", "mine", "--out", "out"], ["--arrangement", "own_pool"]),
    "an unknown decoder": (["measure", "--shape", "huge", "--out", "out"], ["--shape", "'huge'", "tiny"]),
    "an unknown backend": (["measure", "--backend", "tpu", "--out", "out"], ["--backend", "'tpu'", "host"]),
    "a history of the host": (
        ["measure", "--backend", "host", "--histories", "h", "--out", "out"],
        ["histories", "'h'", "cuda"],
    ),
    "no folder for records": (["measure"], ["--out"]),
    "no folder for the report": (["report", "default"], ["--out"]),
    "a function without a module": (["check", "f"], ["'f'", "MODULE:FUNCTION"]),
    "a module that is absent": (["check", "no_such_module_here:f"], ["no_such_module_here:f", "cannot be imported"]),
}
NEEDS_A_DEVICE = {
    "simulate": ["simulate", "{config}", "--execute", "cuda", "--steps", "1"],
    "measure": ["measure", "--preset", "{config}", "--backend", "cuda", "--out", "out"],
    "report": ["report", "{config}", "--execute", "cuda", "--out", "out"],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, beside the input."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(capsys, here, tmp_path):
    """Runs a command with `config` for {config}; the one line of its refusal."""

    def run(args: list[str], config: str = "") -> str:
        with pytest.raises(SystemExit) as exited:
            cli.main([arg.format(config=config) for arg in args])
        out, err = capsys.readouterr()
        assert (exited.value.code, out) == (2, "")
        assert err.startswith("replay-sim: ") and err.endswith("\n") and err.count("\n") == 1 and err.isascii()
        assert "Traceback" not in err
        assert not list(here.iterdir())
        return err

    return run


def write(folder: Path, text: str) -> str:
    path = folder / "config.json"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("settings", "named"), SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)
def test_bad_settings_are_named_with_their_value_and_what_is_allowed(args, settings, named, refused, tmp_path) -> None:
    """Issue 2: every command that takes a config refuses it in the same words."""
    line = refused(args, write(tmp_path, json.dumps(CONFIG | settings)))
    assert all(part in line for part in named), line


@pytest.mark.parametrize(("text", "named"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)
def test_an_unreadable_file_is_named_with_the_reason(args, text, named, refused, tmp_path) -> None:
    line = refused(args, write(tmp_path, text))
    assert named in line and "config.json" in line


@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)
def test_an_unknown_preset_is_named_with_the_nearest(args, refused) -> None:
    assert "'h200-tp4-c9'" in (line := refused(args, "h200-tp4-c9")) and "did you mean 'h200-tp4-c8'" in line


@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)
def test_a_config_that_is_absent_or_a_folder_is_refused(args, refused, tmp_path) -> None:
    assert "No such file" in refused(args, str(tmp_path / "absent.json"))
    assert "regular file" in refused(args, str(tmp_path))


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("command", ["simulate", "measure", "report"])
def test_a_bad_trace_is_named_with_line_and_field(command, name, refused, tmp_path) -> None:
    text, named = TRACES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    config = write(tmp_path, json.dumps(CONFIG))
    line = refused([*COMMANDS[command], "--trace", str(tmp_path / name)], config)
    assert all(part in line for part in named), line


@pytest.mark.parametrize(("args", "named"), OPTIONS.values(), ids=OPTIONS)
def test_a_bad_option_is_named_with_what_is_allowed(args, named, refused) -> None:
    line = refused(args)
    assert all(part in line for part in named), line


@pytest.mark.parametrize("args", NEEDS_A_DEVICE.values(), ids=NEEDS_A_DEVICE)
def test_a_device_that_is_not_there_is_refused(args, refused, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused(args, write(tmp_path, json.dumps(CONFIG)))
    assert "'cuda'" in line and "host" in line


def test_a_request_too_long_for_the_decoder_is_refused_before_graphs_are_captured(refused, tmp_path) -> None:
    trace = write_trace(tmp_path, ((300_000, 1),))
    line = refused([*COMMANDS["simulate for real"], "--trace", str(trace)], write(tmp_path, json.dumps(CONFIG)))
    assert "max_position 16384" in line and "a request of 3000" in line


@pytest.mark.parametrize("command", ["measure", "report"])
def test_a_folder_that_cannot_be_made_is_refused(command, refused, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    config = write(tmp_path, json.dumps(CONFIG))
    args = [*COMMANDS[command][:-1], str(tmp_path / "file" / "out")]
    assert "Not a directory" in refused([*args, "--trace", str(write_trace(tmp_path))], config)


@pytest.mark.parametrize("args", [["plan", "no-such"], ["simulate", "default", "--trace", "absent.csv"]])
def test_the_program_itself_exits_with_2_and_one_line(args, here) -> None:
    done = subprocess.run([sys.executable, "-m", "replay_sim", *args], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("replay-sim: ") and done.stderr.count("\n") == 1
    assert not list(here.iterdir())
