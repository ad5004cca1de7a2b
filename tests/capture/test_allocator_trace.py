"""Allocation traces: the file format, the replay through the model."""

import json
import lzma
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.capture.allocator_trace import (
    Alloc,
    EmptyCache,
    Free,
    Mark,
    MarkState,
    Release,
    Retain,
    Trace,
    TraceError,
    read_trace,
    replay,
    write_trace,
)
from replay_sim.capture.caching_allocator import Event, OutOfMemoryError

MIB = 1 << 20
BASE = 1 << 40
POOL = 1
TWO_GROUPS = Trace(
    (
        Retain(POOL),
        Alloc(0, 30 * MIB, 1, POOL),
        Alloc(1, 600, 1, POOL),
        Free(0),
        Mark("model graphs"),
        Alloc(2, 16 * MIB, 1, POOL),
        Free(2),
        Mark("replay graphs, same stream"),
        Alloc(2, 16 * MIB, 2, POOL),
        Mark("replay graphs, own stream"),
        Alloc(3, 4 * MIB),
        Free(3),
        Mark("default pool"),
        Free(1),
        Free(2),
        Release(POOL),
        EmptyCache(),
        Mark("reset"),
    )
)
HEADER = '{"format":"replay_sim allocator trace","version":1}'


def test_a_replay_answers_reserved_bytes_by_pool_at_each_mark() -> None:
    """O1, O2, O5: sharing pool and stream adds 0 bytes, the own stream adds its 16 MiB."""
    assert replay(TWO_GROUPS).marks == (
        MarkState("model graphs", {POOL: 32 * MIB}),
        MarkState("replay graphs, same stream", {POOL: 32 * MIB}),
        MarkState("replay graphs, own stream", {POOL: 48 * MIB}),
        MarkState("default pool", {POOL: 48 * MIB, None: 20 * MIB}),
        MarkState("reset", {}),
    )


def test_a_replay_answers_the_segment_events_in_order() -> None:
    """O5."""
    result = replay(TWO_GROUPS)
    assert [(event.action, event.size, event.stream, event.pool) for event in result.segment_events] == [
        ("segment_alloc", 30 * MIB, 1, POOL),
        ("segment_alloc", 2 * MIB, 1, POOL),
        ("segment_alloc", 16 * MIB, 2, POOL),
        ("segment_alloc", 20 * MIB, 0, None),
        ("segment_free", 20 * MIB, 0, None),
        ("segment_free", 2 * MIB, 1, POOL),
        ("segment_free", 30 * MIB, 1, POOL),
        ("segment_free", 16 * MIB, 2, POOL),
    ]
    assert result.allocator.reserved_bytes() == 0


def test_recorded_segment_addresses_decide_between_equal_blocks() -> None:
    """O5: of two free 2 MiB segments, the one placed lower is taken, whichever was made first."""
    events = (*(Alloc(i, MIB) for i in range(3)), Free(0), Free(1), Free(2), Alloc(3, 512))
    for segments, used in (
        (((64 * MIB, 2 * MIB), (32 * MIB, 2 * MIB)), 32 * MIB),
        (((32 * MIB, 2 * MIB), (64 * MIB, 2 * MIB)), 32 * MIB),
        ((), BASE),
    ):
        block = replay(Trace(events, segments)).allocator.block_at(used)
        assert block is not None and block.requested == 512


def test_a_replay_that_leaves_the_recorded_segments_places_its_own_beyond_them() -> None:
    """O5: the first size that differs ends the following."""
    trace = Trace((Alloc(0, 512), Alloc(1, 2 * MIB)), ((2 * BASE, 2 * MIB), (3 * BASE, 30 * MIB)))
    assert replay(trace).segment_events == (
        Event("segment_alloc", 2 * BASE, 2 * MIB, 0, None),
        Event("segment_alloc", 3 * BASE + 30 * MIB, 20 * MIB, 0, None),
    )


def test_a_capacity_bounds_the_replay() -> None:
    """D8."""
    with pytest.raises(OutOfMemoryError):
        replay(TWO_GROUPS, capacity_bytes=40 * MIB)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.xz"])
def test_a_written_trace_reads_back_equal(tmp_path: Path, name: str) -> None:
    """O5."""
    trace = Trace(TWO_GROUPS.events, ((BASE, 30 * MIB), (BASE * 2, 2 * MIB)))
    write_trace(trace, tmp_path / name)
    assert read_trace(tmp_path / name) == trace


def test_a_written_trace_is_one_readable_line_an_event_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    """O5."""
    write_trace(TWO_GROUPS, tmp_path / "a.xz")
    write_trace(TWO_GROUPS, tmp_path / "b.xz")
    data = (tmp_path / "a.xz").read_bytes()
    assert data == (tmp_path / "b.xz").read_bytes()
    lines = lzma.decompress(data).decode().splitlines()
    assert len(lines) == 1 + len(TWO_GROUPS.events)
    assert json.loads(lines[0])["version"] == 1
    assert lines[1:4] == ['["retain",1]', '["alloc",0,31457280,1,1]', '["alloc",1,600,1,1]']


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.xz"])
def test_a_failure_in_the_middle_of_writing_leaves_the_trace_before_and_nothing_else(tmp_path, monkeypatch, name: str):
    write_trace(TWO_GROUPS, path := tmp_path / name)
    monkeypatch.setattr(os, "fdopen", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="cannot be written: the disk is full"):
        write_trace(Trace((), ()), path)
    monkeypatch.undo()
    assert read_trace(path) == TWO_GROUPS and [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: not a header"),
        ("[]", "line 1: not a header"),
        ("{", "line 1: not JSON"),
        (HEADER.replace(":1", ":2"), "version 2; this reader knows 1"),
        (HEADER.replace("}", ',"segments":[[1]]}'), "segments must be pairs"),
        (HEADER.replace("}", ',"segments":[[1,true]]}'), "segments must be pairs"),
        (HEADER.replace("}", ',"segments":[[-1,2]]}'), "segments must be pairs"),
        (HEADER.replace("}", ',"segments":[[1,9223372036854775808]]}'), "segments must be pairs"),
        (HEADER + '\n["malloc",1]', "line 2: an event is an array that starts with one of alloc"),
        (HEADER + "\n[[]]", "line 2: an event is"),
        (HEADER + "\n7", "line 2: an event is"),
        (HEADER + '\n["alloc",1]', "line 2: alloc is followed by id, size, stream, pool; this one by 1"),
        (HEADER + '\n["empty_cache",1]', "line 2: empty_cache is followed by nothing"),
        (HEADER + '\n["mark","a"]\n["alloc",1,2.5,0,null]', "line 3: size is 2.5"),
        (HEADER + '\n["alloc",1,true,0,null]', "line 2: size is True"),
        (HEADER + '\n["alloc",1,-1,0,null]', "line 2: size is -1"),
        (HEADER + '\n["alloc",1,9223372036854775808,0,null]', "line 2: size is 9223372036854775808"),
        (HEADER + '\n["alloc",1,1,0,"x"]', "line 2: pool is 'x'"),
        (HEADER + '\n["mark",3]', "line 2: name must be text"),
        (HEADER + f'\n["mark","{"a" * 201}"]', "line 2: name must be text of at most 200"),
        (HEADER + "\n" + "[" * 5000, "line 2: not JSON"),
        (HEADER + '\n["free",1]', "event 1 frees id 1, which is not live"),
        (HEADER + '\n["alloc",1,1,0,null]\n["alloc",1,1,0,null]', "event 2 allocates id 1, which is live"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_place_and_the_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    """O5."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_reader_reads_no_more_than_it_is_allowed(tmp_path: Path) -> None:
    """O5: neither bytes, even if a small file unpacks to many, nor events."""
    bomb = tmp_path / "trace.xz"
    bomb.write_bytes(lzma.compress(b" " * (8 * MIB)))
    assert bomb.stat().st_size < 20_000
    with pytest.raises(TraceError, match=r"more than max_bytes=1048576"):
        read_trace(bomb, max_bytes=MIB)
    write_trace(TWO_GROUPS, bomb)
    with pytest.raises(TraceError, match=r"18 events, more than max_events=17"):
        read_trace(bomb, max_events=17)
    assert read_trace(bomb, max_events=18) == TWO_GROUPS


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"no xz", lambda data: data[:15]])
def test_a_damaged_xz_file_is_refused(tmp_path: Path, damage) -> None:
    """O5."""
    path = tmp_path / "trace.xz"
    write_trace(TWO_GROUPS, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match="not a whole xz file"):
        read_trace(path)


EVENTS = st.lists(
    st.one_of(
        st.builds(Mark, st.text(max_size=20)),
        st.just(EmptyCache()),
        st.builds(Retain, st.integers(0, 3)),
        st.builds(Release, st.integers(0, 3)),
        st.builds(Alloc, st.integers(0, 10**6), st.integers(0, 1 << 62), st.integers(0, 9), st.none()),
    ),
    max_size=30,
    unique_by=lambda event: getattr(event, "id", object()),
)


@settings(max_examples=50, deadline=None)
@given(events=EVENTS)
def test_any_trace_survives_the_file(tmp_path_factory: pytest.TempPathFactory, events: list) -> None:
    """O5: whatever its mark names hold."""
    path = tmp_path_factory.mktemp("traces") / "trace.xz"
    trace = Trace(tuple(events))
    write_trace(trace, path)
    assert read_trace(path) == trace
