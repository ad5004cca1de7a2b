"""Histories recorded by torch.cuda.memory, as traces and measured segment events."""

from collections.abc import Iterable
from itertools import groupby

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
    TraceError,
    replay,
)
from replay_sim.capture.caching_allocator import CachingAllocator, Event
from replay_sim.capture.torch_snapshot import from_torch_snapshot, history_length

MIB = 1 << 20
DEFAULT, GRAPHS = (0, 0), (0, 7)
SIDE_STREAM = 94_000_123_456
SMALL_AT, LARGE_AT, OLD_AT = 0x7F00_0000_0000, 0x7F00_4000_0000, 0x7E00_0000_0000


def entry(action: str, addr: int = 0, size: int = 0, stream: int = 0, pool: tuple | None = None) -> dict:
    recorded = {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 5, "frames": []}
    return recorded if pool is None else recorded | {"pool_id": pool}


def hand_made(pools: bool) -> dict:
    """A graph's history: one output kept, a default-pool buffer, memory from before, then a reset."""
    graphs, default = (GRAPHS, DEFAULT) if pools else (None, None)
    trace = [
        entry("alloc", OLD_AT, 512, 0, default),
        entry("segment_alloc", LARGE_AT, 20 * MIB, SIDE_STREAM, graphs),
        entry("alloc", LARGE_AT, 4 * MIB, SIDE_STREAM, graphs),
        entry("alloc", LARGE_AT + 4 * MIB, 3 * MIB + 5, SIDE_STREAM, graphs),
        entry("free_requested", LARGE_AT, 4 * MIB, SIDE_STREAM, graphs),
        entry("segment_alloc", SMALL_AT, 2 * MIB, 0, default),
        entry("alloc", SMALL_AT, 600, 0, default),
        entry("free_completed", LARGE_AT, 4 * MIB, SIDE_STREAM, graphs),
        entry("snapshot", 0, 12345),
        entry("free_requested", OLD_AT, 512, 0, default),
        entry("free_completed", OLD_AT, 512, 0, default),
        entry("free_requested", SMALL_AT, 600, 0, default),
        entry("free_completed", SMALL_AT, 600, 0, default),
        entry("segment_free", OLD_AT, 2 * MIB, 0, default),
        entry("segment_free", SMALL_AT, 2 * MIB, 0, default),
        entry("user_defined", 0, 0),
    ]
    segments = [{"address": LARGE_AT, "total_size": 20 * MIB, "stream": SIDE_STREAM, "segment_pool_id": GRAPHS}]
    return {"segments": segments, "device_traces": [[], trace]}


@pytest.mark.parametrize("pools", [True, False])
def test_a_hand_made_snapshot_converts_with_its_pools_recorded_or_looked_up_by_address(pools: bool) -> None:
    """O5: frees count when completed; memory from before the recording is left out."""
    recorded = from_torch_snapshot(hand_made(pools), marks={8: "captured"})
    assert recorded.trace.events == (
        Retain(1),
        Alloc(0, 4 * MIB, 1, 1),
        Alloc(1, 3 * MIB + 5, 1, 1),
        Alloc(2, 600, 0, None),
        Free(0),
        Mark("captured"),
        Free(2),
        EmptyCache(),
        Mark("end"),
    )
    assert recorded.trace.segments == ((LARGE_AT, 20 * MIB), (SMALL_AT, 2 * MIB))
    assert recorded.marks == (
        MarkState("captured", {1: 20 * MIB, None: 2 * MIB}),
        MarkState("end", {1: 20 * MIB}),
    )
    assert recorded.pool_ids == {1: GRAPHS}
    assert recorded.streams == {0: 0, 1: SIDE_STREAM}
    assert (recorded.skipped_allocs, recorded.skipped_frees) == (1, 1)


@pytest.mark.parametrize("pools", [True, False])
def test_the_model_reproduces_the_hand_made_history(pools: bool) -> None:
    """O5: the same segment events and reserved bytes, at the recorded addresses."""
    recorded = from_torch_snapshot(hand_made(pools))
    result = replay(recorded.trace)
    assert result.marks == recorded.marks
    assert result.segment_events == recorded.segment_events
    assert [mark.name for mark in recorded.marks] == ["snapshot 1", "end"]


def test_marks_lie_where_they_were_set_whatever_snapshots_others_took() -> None:
    """O5: a pool is weighed by snapshots too, and those are no marks."""
    snapshot = hand_made(True)
    entries = snapshot["device_traces"][1]
    for position in (0, 5, 5, len(entries) + 3):
        entries.insert(position, entry("snapshot"))
    names = {10: "first large", 12: "captured", len(entries): "at the end"}
    recorded = from_torch_snapshot(snapshot, marks=names)
    assert recorded.marks == (
        MarkState("first large", {1: 20 * MIB, None: 2 * MIB}),
        MarkState("captured", {1: 20 * MIB, None: 2 * MIB}),
        MarkState("at the end", {1: 20 * MIB}),
        MarkState("end", {1: 20 * MIB}),
    )
    events = recorded.trace.events
    assert events.index(Mark("first large")) < events.index(Free(0)) < events.index(Mark("captured"))
    assert events[-3:] == (EmptyCache(), Mark("at the end"), Mark("end"))
    assert replay(recorded.trace).marks == recorded.marks
    assert from_torch_snapshot(snapshot, marks={}).marks == recorded.marks[-1:]


def test_the_place_of_a_mark_is_the_length_of_the_history_so_far() -> None:
    """O5: it does not matter whether the snapshot that looks is in the history already."""
    snapshot = hand_made(True)
    entries = snapshot["device_traces"][1]
    assert history_length(snapshot) == len(entries) == 16
    for place in (8, 9):
        recorded = from_torch_snapshot(snapshot, marks={place: "captured"})
        assert recorded == from_torch_snapshot(snapshot, marks={8: "captured"})
    with pytest.raises(TraceError, match="have a history"):
        history_length({"device_traces": [[], []]})


def test_a_private_pool_whose_segments_are_freed_was_released_before() -> None:
    """O5: one emptying for the run of segment frees."""
    snapshot = hand_made(True)
    snapshot["device_traces"][1] += [
        entry("free_completed", LARGE_AT + 4 * MIB, 3 * MIB + 5, SIDE_STREAM, GRAPHS),
        entry("segment_free", LARGE_AT, 20 * MIB, SIDE_STREAM, GRAPHS),
    ]
    recorded = from_torch_snapshot(snapshot)
    assert recorded.trace.events[-4:] == (Free(1), Release(1), EmptyCache(), Mark("end"))
    assert replay(recorded.trace).segment_events == recorded.segment_events
    assert recorded.marks[-1] == MarkState("end", {})


def test_a_pool_whose_segments_are_freed_in_two_turns_is_released_once() -> None:
    """O5: an output that outlives its graph keeps its segment until the next emptying."""
    snapshot = hand_made(True)
    snapshot["device_traces"][1] += [
        entry("segment_alloc", OLD_AT, 2 * MIB, SIDE_STREAM, GRAPHS),
        entry("alloc", OLD_AT, 512, SIDE_STREAM, GRAPHS),
        entry("free_completed", OLD_AT, 512, SIDE_STREAM, GRAPHS),
        entry("segment_free", OLD_AT, 2 * MIB, SIDE_STREAM, GRAPHS),
        entry("free_completed", LARGE_AT + 4 * MIB, 3 * MIB + 5, SIDE_STREAM, GRAPHS),
        entry("segment_free", LARGE_AT, 20 * MIB, SIDE_STREAM, GRAPHS),
    ]
    recorded = from_torch_snapshot(snapshot)
    assert recorded.trace.events.count(Release(1)) == 1
    assert replay(recorded.trace).segment_events == recorded.segment_events


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda s: s.update(device_traces=[[], []]), {}, r"devices \[\] have a history"),
        (lambda s: s["device_traces"][0].append(entry("oom")), {}, r"devices \[0, 1\] have a history"),
        (lambda s: None, {"device": 0}, r"device 0 has no history; those that have: \[1\]"),
        (lambda s: s["device_traces"][1].append(entry("segment_map")), {}, "expandable segments are not"),
        (lambda s: None, {"marks": {3: "a", 17: "b"}}, r"marks at \[17\]: the history has 16 entries"),
    ],
)
def test_a_snapshot_that_cannot_be_converted_is_refused_with_the_reason(change, arguments, message) -> None:
    """O5."""
    snapshot = hand_made(True)
    change(snapshot)
    with pytest.raises(TraceError, match=message):
        from_torch_snapshot(snapshot, **arguments)


def by_turn(events: Iterable[Event]) -> list[list[Event]]:
    """Segment events in order, but those of one emptying by address: pools are emptied in no given order."""
    turns = groupby(events, key=lambda event: event.action)
    return [sorted(turn, key=lambda e: e.address) if action == "segment_free" else list(turn) for action, turn in turns]


MALLOCS = st.tuples(
    st.just("malloc"),
    st.sampled_from((100, 4096, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 25 * MIB)),
    st.sampled_from((0, 1)),
    st.sampled_from((1, 1, 2, None)),
)
FREES = st.tuples(st.just("free"), st.integers(0, 1000))
OPERATIONS = st.lists(
    st.one_of(MALLOCS, MALLOCS, FREES, FREES, st.sampled_from((("empty",), ("snapshot",)))),
    min_size=20,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(
    operations=OPERATIONS,
    order=st.permutations(range(64)),
    release=st.booleans(),
    pools=st.booleans(),
    unrecorded=st.floats(0, 1),
)
def test_a_history_that_the_model_made_converts_and_replays_to_itself(
    operations, order: list[int], release: bool, pools: bool, unrecorded: float
) -> None:
    """O5: with segments at shuffled addresses, recorded whole or from the middle on, released or not."""
    entries: list[dict] = []
    streams = {0: 0, 1: SIDE_STREAM}
    places = iter(order)

    def record(event: Event) -> None:
        pool = ((0, 0) if event.pool is None else (event.pool, 0)) if pools or release else None
        entries.append(entry(event.action, event.address, event.size, streams[event.stream], pool))

    allocator = CachingAllocator(lambda size: SMALL_AT + next(places) * 64 * MIB, on_event=record)
    allocator.retain_pool(1)
    allocator.retain_pool(2)
    live: list[int] = []
    states = []
    for operation in operations:
        if operation[0] == "malloc":
            live.append(allocator.malloc(*operation[1:]))
        elif operation[0] == "free" and live:
            allocator.free(live.pop(operation[1] % len(live)))
        elif operation[0] == "empty":
            allocator.empty_cache()
        elif operation[0] == "snapshot":
            entries.append(entry("snapshot"))
            states.append(allocator.reserved_bytes())
    if release:
        for address in live:
            allocator.free(address)
        allocator.release_pool(1)
        allocator.release_pool(2)
        allocator.empty_cache()
    segments = [
        {"address": s.address, "segment_pool_id": DEFAULT if s.pool is None else (s.pool, 0)}
        for s in allocator.segments()
    ]
    if not entries:
        return
    recorded = from_torch_snapshot({"segments": segments, "device_traces": [entries]})
    result = replay(recorded.trace)
    assert by_turn(result.segment_events) == by_turn(recorded.segment_events)
    assert result.marks == recorded.marks
    assert [sum(mark.reserved.values()) for mark in recorded.marks] == [*states, allocator.reserved_bytes()]
    assert (recorded.skipped_allocs, recorded.skipped_frees) == (0, 0)

    tail = entries[int(unrecorded * (len(entries) - 1)) :]
    recorded = from_torch_snapshot({"segments": segments, "device_traces": [tail]})
    result = replay(recorded.trace)
    assert by_turn(result.segment_events) == by_turn(recorded.segment_events)
    assert result.marks == recorded.marks
