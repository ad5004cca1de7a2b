"""Allocation histories that `torch.cuda.memory` recorded on a GPU, as traces and measured segment events."""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from replay_sim.capture.allocator_blocks import Event, PoolId
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
    TraceEvent,
    reserved_by_pool,
)

LAST_MARK: Final = "end"
DEFAULT_POOL: Final = (0, 0)
EXPANDABLE_ACTIONS: Final = ("segment_map", "segment_unmap")


@attrs.frozen
class RecordedTrace:
    """A recorded history: what was asked (`trace`) and what the GPU's allocator did.

    `marks` and `segment_events` are the measured counterparts of a `ReplayResult`'s. `pool_ids` and `streams`
    name torch's own values of the small numbers used here. Segments from before the recording, their
    allocations (`skipped_allocs`) and their frees (`skipped_frees`) are left out of everything.
    """

    trace: Trace
    marks: tuple[MarkState, ...]
    segment_events: tuple[Event, ...]
    pool_ids: Mapping[int, tuple[int, int]]
    streams: Mapping[int, int]
    skipped_allocs: int
    skipped_frees: int


def from_torch_snapshot(
    snapshot: Mapping[str, Any], device: int | None = None, marks: Mapping[int, str] | None = None
) -> RecordedTrace:
    """Convert `torch.cuda.memory._snapshot()`, taken with the history on, for one device (O5).

    `marks` are names by `history_length` at the time; without them each earlier call of `_snapshot` within the history
    is a mark, "snapshot 1" and so on. The end of the history is the mark "end". A free counts when it is completed, so
    `record_stream` needs no model. Runs of segment frees become one emptying of the cache, after the release
    of the private pools among them. The pool of an entry is its `pool_id`; older versions of torch do not
    record it, and then it is that of the segment at the address, or the default pool if that segment is gone.

    Raises TraceError for a snapshot without history, with expandable segments, with marks outside of it, or with
    several devices' histories and no `device`.
    """
    entries = _history(snapshot, device)
    expandable = [entry["action"] for entry in entries if entry["action"] in EXPANDABLE_ACTIONS]
    if expandable:
        raise TraceError(f"the history has {expandable[0]} entries: expandable segments are not modelled")
    if marks is None:
        found = [position for position, entry in enumerate(entries) if entry["action"] == "snapshot"]
        marks = {position: f"snapshot {number}" for number, position in enumerate(found, 1)}
    outside = sorted(position for position in marks if not 0 <= position <= len(entries))
    if outside:
        raise TraceError(f"marks at {outside}: the history has {len(entries)} entries")
    converter = _Converter(snapshot, entries)
    for position, entry in enumerate(entries):
        if position in marks:
            converter.mark(marks[position])
        converter.add(entry)
    if len(entries) in marks:
        converter.mark(marks[len(entries)])
    return converter.finish()


def history_length(snapshot: Mapping[str, Any], device: int | None = None) -> int:
    """Entries of a snapshot's history: the place of a mark for what has happened so far.

    Raises TraceError as `from_torch_snapshot` does.
    """
    return len(_history(snapshot, device))


def _history(snapshot: Mapping[str, Any], device: int | None) -> Sequence[Mapping[str, Any]]:
    traces = snapshot.get("device_traces", [])
    recorded = [index for index, entries in enumerate(traces) if entries]
    if device is None:
        if len(recorded) != 1:
            raise TraceError(f"devices {recorded} have a history; name one of them, or record one")
        device = recorded[0]
    if device not in recorded:
        raise TraceError(f"device {device} has no history; those that have: {recorded}")
    return traces[device]


class _Converter:
    """The state of a conversion, one entry at a time."""

    def __init__(self, snapshot: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
        pointers = sorted({0} | {int(entry.get("stream") or 0) for entry in entries})
        self.streams = {pointer: number for number, pointer in enumerate(pointers)}
        last_placed = {entry["addr"]: i for i, entry in enumerate(entries) if entry["action"] == "segment_alloc"}
        owners = {s["address"]: tuple(s.get("segment_pool_id", DEFAULT_POOL)) for s in snapshot.get("segments", [])}
        self.pool_at_entry = {i: owners.get(address, DEFAULT_POOL) for address, i in last_placed.items()}
        self.pools: dict[tuple[int, ...], int] = {}
        self.retained: set[int] = set()
        self.events: list[TraceEvent] = []
        self.segment_events: list[Event] = []
        self.marks: list[MarkState] = []
        self.segments: dict[int, tuple[int, PoolId]] = {}
        self.starts: list[int] = []
        self.placed: list[tuple[int, int]] = []
        self.live: dict[int, int] = {}
        self.allocs = self.skipped_allocs = self.skipped_frees = self.position = 0
        self.emptying: list[PoolId] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take the next entry of the history."""
        action = entry["action"]
        if action == "segment_free":
            self._free_segment(entry)
        elif action in ("segment_alloc", "alloc", "free_completed"):
            self._end_emptying()
            if action == "segment_alloc":
                self._add_segment(entry)
            elif action == "alloc":
                self._alloc(entry)
            else:
                self._free(entry)
        self.position += 1

    def mark(self, name: str) -> None:
        """Mark what has happened so far."""
        self._end_emptying()
        self.events.append(Mark(name))
        self.marks.append(MarkState(name, reserved_by_pool(self.segment_events)))

    def finish(self) -> RecordedTrace:
        """The whole history."""
        self.mark(LAST_MARK)
        return RecordedTrace(
            Trace(tuple(self.events), tuple(self.placed)),
            tuple(self.marks),
            tuple(self.segment_events),
            {number: (pool[0], pool[1]) for pool, number in self.pools.items()},
            {number: pointer for pointer, number in self.streams.items()},
            self.skipped_allocs,
            self.skipped_frees,
        )

    def _pool(self, recorded: Sequence[int]) -> PoolId:
        identity = tuple(recorded)
        return None if identity == DEFAULT_POOL else self.pools.setdefault(identity, len(self.pools) + 1)

    def _segment_event(self, entry: Mapping[str, Any], pool: PoolId) -> None:
        stream = self.streams[int(entry.get("stream") or 0)]
        self.segment_events.append(Event(entry["action"], entry["addr"], entry["size"], stream, pool))

    def _add_segment(self, entry: Mapping[str, Any]) -> None:
        recorded = entry.get("pool_id", entry.get("segment_pool_id"))
        pool = self._pool(self.pool_at_entry.get(self.position, DEFAULT_POOL) if recorded is None else recorded)
        self.segments[entry["addr"]] = (entry["size"], pool)
        insort(self.starts, entry["addr"])
        self.placed.append((entry["addr"], entry["size"]))
        self._segment_event(entry, pool)

    def _free_segment(self, entry: Mapping[str, Any]) -> None:
        segment = self.segments.pop(entry["addr"], None)
        if segment is not None:
            self.starts.remove(entry["addr"])
            self.emptying.append(segment[1])
            self._segment_event(entry, segment[1])

    def _end_emptying(self) -> None:
        if not self.emptying:
            return
        for pool in sorted({pool for pool in self.emptying if pool is not None} & self.retained):
            self.retained.remove(pool)
            self.events.append(Release(pool))
        self.events.append(EmptyCache())
        self.emptying = []

    def _alloc(self, entry: Mapping[str, Any]) -> None:
        address = entry["addr"]
        index = bisect_right(self.starts, address) - 1
        start = self.starts[index] if index >= 0 else 0
        size, pool = self.segments.get(start, (0, None))
        if address >= start + size:
            self.skipped_allocs += 1
            return
        if pool is not None and pool not in self.retained:
            self.retained.add(pool)
            self.events.append(Retain(pool))
        self.live[address] = self.allocs
        self.events.append(Alloc(self.allocs, entry["size"], self.streams[int(entry.get("stream") or 0)], pool))
        self.allocs += 1

    def _free(self, entry: Mapping[str, Any]) -> None:
        number = self.live.pop(entry["addr"], None)
        if number is None:
            self.skipped_frees += 1
        else:
            self.events.append(Free(number))
