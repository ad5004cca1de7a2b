"""Writing a file whole or not at all."""

import os

import pytest

from replay_sim.whole_file import write_whole


def refused(*_: object, **__: object) -> None:
    raise OSError("the disk is full")


def test_a_file_is_written_with_its_folder_and_can_be_read_by_others(tmp_path) -> None:
    path = tmp_path / "made" / "page.html"
    write_whole(path, "first\n")
    assert path.read_text() == "first\n"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_name_as_long_as_a_file_can_have_is_written(tmp_path) -> None:
    path = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write_whole(path, "first")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("failing", ["open", "fdopen", "chmod", "replace"])
def test_a_failure_at_any_point_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing: str) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "first")
    monkeypatch.setattr(os, failing, refused)
    with pytest.raises(OSError, match=f"{path} cannot be written: the disk is full"):
        write_whole(path, "second")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "first"


@pytest.mark.parametrize("done", ["open", "fdopen", "chmod"])
def test_an_interrupt_after_any_step_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, done: str) -> None:
    path, real = tmp_path / "page.html", getattr(os, done)
    write_whole(path, "first")

    def interrupted(*args: object, **how: object) -> None:
        real(*args, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, done, interrupted)
        write_whole(path, "second")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "first"


def test_a_path_below_a_file_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/page.html cannot be written: File exists"):
        write_whole(tmp_path / "file" / "page.html", "")


def test_text_that_is_no_unicode_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "second \ud800")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "first"
