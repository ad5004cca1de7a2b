"""The file of finished points: whole lines, taken up again, and refused where it is another sweep's."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from replay_sim.explore.sweep_file import MAX_LINE_BYTES, PointsFile

ONE = {"designs": "a", "requests": "b", "version": "1"}
TWO = {"designs": "a", "requests": "c", "version": "2"}
ROWS = [{"point": 3, "ms": 0.1 + 0.2}, {"point": 0, "ms": None}, {"point": 7, "sizes": [1, 2]}]


def numbered(row: dict) -> bool:
    """What these tests take for a row of their sweep."""
    return row.get("point") in range(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "out.csv.points"


def written(path: Path) -> bytes:
    with PointsFile(path, ONE, numbered, resume=False) as file:
        file.append(ROWS[:2])
        file.append(ROWS[2:])
    return path.read_bytes()


def test_what_was_appended_is_taken_up_exactly(path: Path) -> None:
    data = written(path)
    assert data.count(b"\n") == 4 and data.endswith(b"\n")
    with PointsFile(path, ONE, numbered, resume=True) as file:
        assert file.rows == {row["point"]: row for row in ROWS}
        file.append([{"point": 1}])
    assert path.read_bytes() == data + b'{"point":1}\n'


def test_a_line_torn_at_any_byte_costs_that_line_alone(path: Path) -> None:
    """What a kill in the middle of a write leaves."""
    data = written(path)
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with PointsFile(path, ONE, numbered, resume=True) as file:
            whole = max(0, sum(end <= cut for end in ends) - 1)
            assert list(file.rows.values()) == ROWS[:whole]
            file.append(ROWS[whole:])
        assert [json.loads(line) for line in path.read_bytes().splitlines()[1:]] == ROWS


def test_rows_are_on_disk_when_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr("os.fsync", lambda _: synced.append(path.read_bytes()))
    with PointsFile(path, ONE, numbered, resume=False) as file:
        file.append(ROWS)
        assert synced[-1] == path.read_bytes() and synced[-1].count(b"\n") == 4


def test_a_file_that_is_there_is_not_overwritten(path: Path) -> None:
    data = written(path)
    with pytest.raises(ValueError, match="holds 3 points of this sweep, which did not end; --resume goes on with them"):
        PointsFile(path, ONE, numbered, resume=False)
    assert path.read_bytes() == data


def test_an_empty_file_that_is_there_is_said_to_be_empty(path: Path) -> None:
    """Nobody knows who made it."""
    path.parent.mkdir()
    path.touch()
    with pytest.raises(ValueError, match=f"{path}: is empty; --resume takes it for the finished points, or delete the"):
        PointsFile(path, ONE, numbered, resume=False)
    assert path.read_bytes() == b""


def test_with_nothing_to_resume_it_starts(path: Path) -> None:
    with PointsFile(path, ONE, numbered, resume=True) as file:
        assert file.rows == {} and path.read_bytes().count(b"\n") == 1


def test_left_without_a_row_it_is_deleted_and_with_one_it_stays(path: Path) -> None:
    """A header alone is nothing to go on with."""
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt), PointsFile(path, ONE, numbered, resume=resume):
            raise KeyboardInterrupt
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), PointsFile(path, ONE, numbered, resume=False) as file:
        file.append(ROWS)
        raise KeyboardInterrupt
    assert path.exists()


FOREIGN = {
    b"window,plan\n8,eager\n": "holds no points of a sweep; name another file as out, or move this one away",
    b"notes": "holds no points of a sweep",
    b'{"point":1}\n': "holds no points of a sweep",
    b"[" * 100_000 + b"\n": "holds no points of a sweep",
    b'{"sweep":"c0ffee","form":1}\n': "holds points in the form of another version of this package",
}


@pytest.mark.parametrize("data", FOREIGN)
@pytest.mark.parametrize("resume", [True, False])
def test_what_this_sweep_did_not_write_is_left_alone_and_named_for_what_it_is(
    path: Path, data: bytes, resume: bool
) -> None:
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path}: {FOREIGN[data]}"):
        PointsFile(path, ONE, numbered, resume=resume)
    assert path.read_bytes() == data


def test_of_points_of_another_sweep_it_is_said_what_differs(path: Path) -> None:
    written(path)
    with pytest.raises(ValueError, match="holds points of a sweep that differs from this one in requests, version; "):
        PointsFile(path, TWO, numbered, resume=True)


def test_a_disk_that_is_full_is_an_error_that_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with PointsFile(path, ONE, numbered, resume=False) as file:
        monkeypatch.setattr("os.write", full)
        with pytest.raises(OSError, match=f"{path} cannot be written: No space left on device"):
            file.append(ROWS)


NO_ROWS = {
    "no JSON": b"{\n",
    "a list": b"[1]\n",
    "without its point": b'{"ms":1}\n',
    "given above": b'{"point":3}\n',
    "of another sweep": b'{"point":10}\n',
    "no UTF-8": b"\xff\n",
    "a key twice": b'{"point":2,"point":1}\n',
    "no number": b'{"point":1,"ms":NaN}\n',
    "infinite": b'{"point":1,"ms":-Infinity}\n',
    "blank": b"\n",
    "nested too deeply": b"[" * 100_000 + b"\n",
    "without an end": b'{"point":1,"error":"' + b" " * MAX_LINE_BYTES,
}


@pytest.mark.parametrize("line", NO_ROWS.values(), ids=NO_ROWS)
def test_a_line_that_is_no_new_point_is_named(path: Path, line: bytes) -> None:
    path.write_bytes(written(path) + line)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"{path}: line 5 is no finished point of this sweep, or one that a line abov"):
        PointsFile(path, ONE, numbered, resume=True)
    assert path.read_bytes() == before


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [as_pipe, as_device, Path.mkdir])
def test_what_is_no_regular_file_is_named_and_neither_read_nor_written(path: Path, make: Callable) -> None:
    """A pipe that nobody writes to would be waited for, and a device has no end."""
    path.parent.mkdir()
    make(path)
    for resume in (True, False):
        with pytest.raises(ValueError, match=f"^out: {path} cannot hold the finished points: it must be a regular fil"):
            PointsFile(path, ONE, numbered, resume=resume)


def test_a_place_where_no_file_can_be_is_named_with_the_option(path: Path) -> None:
    path.parent.write_text("a file, and no folder")
    with pytest.raises(OSError, match=f"^out: {path} cannot be written: File exists$"):
        PointsFile(path, ONE, numbered, resume=False)
    with pytest.raises(OSError, match="^out: /proc/t.csv.points cannot be written: No such file or directory$"):
        PointsFile(Path("/proc/t.csv.points"), ONE, numbered, resume=True)
