"""`replay-sim check`: what it refuses, with the operation, the user's line and the remedy, and what it lets pass."""

import json
import textwrap
from pathlib import Path

import pytest

from replay_sim import cli

USER_CODE = textwrap.dedent(
    """
    import numpy as np
    import torch
    from replay_sim.capture import eager_break

    numbers = np.arange(1, 5, dtype=np.float32)
    x = torch.arange(128.0).view(8, 16) / 128
    total = torch.zeros(())
    calls = 0
    workspace = None


    def pure():
        return (x * 2).tanh()


    def reads_on_the_host(t):
        y = t * 2
        if y.sum() > 0:
            return y
        return -y


    def reads_an_item(t):
        return t * t.max().item()


    def allocates_by_data(t):
        return torch.nonzero(t)


    def allocates_by_a_mask(t):
        return t[t > 0].sum()


    @eager_break
    def new_from_a_break(t):
        return t + 1


    def returns_new_from_a_break(t):
        u = t * 2
        return new_from_a_break(u) * 3


    @eager_break
    def fills(t, out):
        out.copy_(t + 1)


    def writes_in_a_break(t):
        u = t * 2
        out = torch.empty_like(u)
        fills(u, out)
        return out * 3


    def counts(t):
        global calls
        calls += 1
        return t * calls


    def counts_into_a_buffer(t):
        global calls
        calls += 1
        total.add_(calls)
        return t * 2


    def reads_through_numpy():
        return (lambda t: t * float(numbers[0])), (torch.from_numpy(numbers).expand(3, 4),)


    def accumulates(t):
        total.add_(t.sum())
        return total * 2


    def draws(t):
        return t + torch.rand_like(t)


    def memoises(t):
        global workspace
        if workspace is None:
            workspace = torch.zeros(8, 16)
        return t + workspace


    def made():
        weight = torch.randn(16, 4)

        def function(t, places):
            return torch.mm(t, weight).index_select(0, places)

        return function, (torch.randn(8, 16), torch.arange(8))


    def made_by_name():
        return lambda t, scale: t * scale, {"t": x.clone(), "scale": 3.0}


    def spread():
        return (lambda t, u: (t + 1, u + 1)), (torch.ones(1, 4).expand(3, 4), torch.arange(8.0).unfold(0, 4, 2))


    def without_elements():
        return (lambda t: t * 2), (torch.zeros(0, 4),)


    def bags(t):
        return torch.nn.functional.embedding_bag(torch.zeros(2, 2, dtype=torch.int64), t)


    def fails(t):
        raise RuntimeError("not today\\nbut tomorrow")


    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 4)

        def forward(self, t):
            print("forward runs")
            return self.linear(t).relu()


    layer = Layer()


    def encoder():
        return torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), (torch.randn(2, 5, 16),)
    """
)
INPUT = ["--input", "8x16"]


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "model_code.py"
    path.write_text(USER_CODE)
    return path


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        cli.main(["check", *args])
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(USER_CODE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("function", "operation", "line", "remedy"),
    [
        ("reads_on_the_host", "__bool__", "if y.sum() > 0", "move the read into an eager break"),
        ("reads_an_item", "item", "t.max().item()", "keep the value on the device"),
        ("allocates_by_data", "nonzero", "torch.nonzero(t)", "pad to a fixed shape and mask"),
        ("allocates_by_a_mask", "aten.index", "t[t > 0]", "pad to a fixed shape and mask"),
        ("returns_new_from_a_break", "new_from_a_break", "new_from_a_break(u) * 3", "Write into a tensor passed"),
    ],
)
def test_what_a_graph_forbids_is_refused_with_operation_line_and_remedy(
    function: str, operation: str, line: str, remedy: str, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point 6, C4, C10."""
    target = f"{user_file}:{function}"
    status, out, _ = run(capsys, target, *INPUT)
    assert status == 1 and "NOT safe" in out
    assert operation in out and remedy in out
    assert f"{user_file}:{line_of(line)}: " in out and line in out
    status, out, _ = run(capsys, target, *INPUT, "--json")
    (finding,) = json.loads(out)["findings"]
    assert status == 1 and finding["kind"] == "forbidden"
    assert (finding["file"], finding["line"]) == (str(user_file), line_of(line))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("pure", []),
        ("writes_in_a_break", INPUT),
        ("accumulates", INPUT),
        ("draws", INPUT),
        ("memoises", INPUT),
        ("made", []),
        ("made_by_name", []),
        ("spread", []),
        ("without_elements", []),
        ("encoder", []),
        ("layer", INPUT),
    ],
)
def test_a_safe_function_passes(
    function: str, args: list[str], user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C2, C12: buffers it writes, random numbers and breaks included."""
    status, out, _ = run(capsys, f"{user_file}:{function}", *args, "--json")
    report = json.loads(out)
    assert (status, report["safe"], report["findings"]) == (0, True, [])
    assert report["num_segments"] == report["num_breaks"] + 1


def test_an_operation_that_cannot_be_replayed_is_found(user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C10: it is not the eager call that fails."""
    status, out, _ = run(capsys, f"{user_file}:bags", *INPUT)
    assert status == 1 and "forbidden: aten._embedding_bag_forward_only" in out and "eager break" in out


def test_what_would_go_stale_is_said(user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D1: an output in the pool; one in the user's own buffer is not."""
    _, out, _ = run(capsys, f"{user_file}:writes_in_a_break", *INPUT)
    assert "output 0, (8, 16) float32, lies in the graphs' pool and goes stale" in out
    assert "2 segments, 1 eager breaks" in out


@pytest.mark.parametrize(
    ("function", "args", "inputs", "place"),
    [
        ("counts", INPUT, "the inputs of the capture", "output 0"),
        ("counts_into_a_buffer", INPUT, "the inputs of the capture", "its state"),
        ("reads_through_numpy", [], "changed inputs", "output 0"),
    ],
)
def test_a_value_that_python_holds_is_found(
    function: str, args: list[str], inputs: str, place: str, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5 of the known faults: fixed at capture."""
    status, out, _ = run(capsys, f"{user_file}:{function}", *args)
    assert status == 1 and f"differs: a replay on {inputs} gives other bits in {place} than" in out and "counter" in out


def test_a_workspace_first_made_inside_the_capture_is_found(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D2: without the warm-up that makes it before."""
    status, out, _ = run(capsys, f"{user_file}:memoises", *INPUT, "--no-warm-up")
    assert status == 1
    assert "aten.zeros" in out and "Make it before the capture" in out
    assert f"{user_file}:{line_of('workspace = torch.zeros')}" in out


def test_a_module_is_found_from_the_current_folder(
    user_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_file.parent)
    monkeypatch.setattr("sys.path", [])
    assert run(capsys, "model_code:pure")[0] == 0


def test_what_the_function_prints_stays_off_standard_output(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, f"{user_file}:layer", *INPUT, "--json")
    assert json.loads(out)["safe"] and "forward runs" in err


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("model_code.py", [], "MODULE:FUNCTION"),
        ("no_such_file.py:f", [], "no such file"),
        ("no_such_module:f", [], "cannot be imported"),
        ("{file}:absent", [], "has no 'absent'"),
        ("{file}:calls", [], "must be a function"),
        ("{file}:accumulates", [], "takes t: give --input"),
        ("{file}:fails", INPUT, "raises when it is called eagerly: RuntimeError: not today, at {file}:"),
        ("{file}:accumulates", ["--input", "8by16"], "SHAPE[:DTYPE]"),
        ("{file}:accumulates", ["--input", "8:quarter"], "SHAPE[:DTYPE]"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    target: str, args: list[str], words: str, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, target.format(file=user_file), *args)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and words.format(file=user_file) in err
