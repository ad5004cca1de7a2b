"""`replay-sim report`: the page that it writes and what it refuses."""

import pytest

from replay_sim import cli


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        cli.main(["report", *args])
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


def test_it_writes_one_page_and_ends_with_a_line_that_says_so(capsys, tmp_path) -> None:
    status, out, _ = run(capsys, "b200-tp4-c32", "--requests", "30", "--out", str(tmp_path / "site"))
    assert status == 0
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["index.html"]
    (line,) = out.splitlines()
    assert line.startswith(f"Wrote {tmp_path}/site/index.html, ") and line.endswith(" s.")


def test_a_trace_is_read_and_named_in_the_page_without_its_folder(capsys, tmp_path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("prompt_tokens,output_tokens\n2000,3\n100,1\n")
    assert run(capsys, "default", "--trace", str(trace), "--out", str(tmp_path))[0] == 0
    page = (tmp_path / "index.html").read_text()
    assert "2 requests of mine.csv" in page and str(tmp_path) not in page


def test_names_that_no_terminal_and_no_page_can_hold_are_escaped(capsys, tmp_path) -> None:
    """Issue 8: a folder, a config and a trace whose names are no UTF-8 and hold what a terminal acts on."""
    trace, config = tmp_path / "\udcff\n.csv", tmp_path / "\udcfe\x1b[2J.json"
    trace.write_text("prompt_tokens,output_tokens\n2000,3\n100,1\n")
    config.write_text("{}")
    status, out, _ = run(capsys, str(config), "--trace", str(trace), "--out", str(tmp_path / "\udcfd"))
    assert status == 0 and out.startswith(rf"Wrote {tmp_path}/\udcfd/index.html, ")
    page = (tmp_path / "\udcfd" / "index.html").read_text()
    assert r"2 requests of \udcff\n.csv" in page and r"Config \udcfe\x1b[2J.json" in page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no-such-preset", "--out", "x"), "no-such-preset"),
        (("default",), "Missing option '--out'"),
        (("default", "--trace", "absent.csv", "--out", "x"), "absent.csv: line 1, file: expected a readable file"),
        (("default", "--requests", "1", "--out", "/dev/null/x"), "/dev/null"),
        (("default", "--requests", "0", "--out", "x"), "--requests"),
        (("default", "--steps", "9", "--out", "x"), "steps is 9: it needs execute host, cuda or auto"),
        (
            ("default", "--steps", "9", "--execute", "none", "--out", "x"),
            "steps is 9: it needs execute host, cuda or auto",
        ),
        (("default", "--trace", "t.csv", "--requests", "9", "--out", "x"), "requests is 9 and trace is 't.csv'"),
        (
            ("default", "--trace", "t.csv", "--requests", "9", "--execute", "host", "--out", "x"),
            "requests is 9 and trace is 't.csv'",
        ),
        (("default", "--trace", "t.csv", "--seed", "9", "--out", "x"), "seed is 9 and trace is 't.csv'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, args, message) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1 and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_what_real_steps_read_is_accepted_beside_a_trace(capsys, tmp_path) -> None:
    """The seed, of the decoder's weights, and the number of steps: refused is the file alone, which is absent."""
    args = ("--trace", "absent.csv", "--execute", "host", "--steps", "1", "--seed", "9", "--out", str(tmp_path))
    status, _, err = run(capsys, "default", *args)
    assert status == 2 and "absent.csv: line 1, file" in err
