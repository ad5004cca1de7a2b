"""The address map of the graph pools: which bytes each graph touches, and which graph was the first to use them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt
import pandas as pd

from replay_sim.capture.allocator_blocks import round_size
from replay_sim.capture.graph_memory import GraphMemory, MemoryPlayer
from replay_sim.config import DecoderShape
from replay_sim.decoder.pool_prediction import (
    MODEL_POOL,
    MODEL_STREAM,
    REPLAY_PLACES,
    PlanMemory,
    make_player,
    record_plan,
)
from replay_sim.plan import CapturePlan
from replay_sim.progress import progress_bar
from replay_sim.replay.sharing import PoolSharing

MIB = 1 << 20
GROUPS = ("model", "replay")

Range = tuple[int, int]
"""Start and end in bytes, the end excluded."""


@attrs.frozen
class MapSegment:
    """A segment that a graph pool reserves: `start` and `size` in bytes of the map, where segments lie end to end."""

    start: int
    size: int
    graph: int
    """The number of the graph whose capture reserved it."""


@attrs.frozen
class TouchedRange:
    """Bytes of the map that a graph's tensors occupy at some time, and the graph that was the first to use them."""

    start: int
    size: int
    first_user: int


@attrs.frozen
class MappedGraph:
    """One captured graph: `group` is model or replay, `reserved_bytes` what all graphs up to it have reserved."""

    name: str
    group: str
    ranges: tuple[TouchedRange, ...]
    reserved_bytes: int

    @property
    def touched_bytes(self) -> int:
        """Bytes of the pool that the graph's tensors occupy at some time."""
        return sum(touched.size for touched in self.ranges)


@attrs.frozen
class PoolMap:
    """The graph pools of one arrangement, graph by graph in the order of capture (C8, O1-O3)."""

    arrangement: PoolSharing
    largest_first: bool
    outputs_held: bool
    segments: tuple[MapSegment, ...]
    graphs: tuple[MappedGraph, ...]

    def reserved_bytes(self, group: str | None = None) -> int:
        """Bytes that the pools reserve for the graphs of a group, or for all: growth over the whole capture (O5)."""
        return sum(s.size for s in self.segments if group in (None, self.graphs[s.graph].group))

    def reused_bytes(self, group: str, first_group: str) -> int:
        """Bytes that graphs of `group` touch and that a graph of `first_group` was the first to use, each once."""
        found = [
            (touched.start, touched.start + touched.size)
            for graph in self.graphs
            if graph.group == group
            for touched in graph.ranges
            if self.graphs[touched.first_user].group == first_group
        ]
        return sum(end - start for start, end in _merged(found))

    def reuse_table(self) -> pd.DataFrame:
        """MiB of the pool that each group touches, by the group that was the first to use them, and MiB reserved."""
        rows = {
            f"{group} graphs": {
                "graphs": sum(graph.group == group for graph in self.graphs),
                **{f"first used by a {first} graph": self.reused_bytes(group, first) / MIB for first in GROUPS},
                "reserved for them": self.reserved_bytes(group) / MIB,
            }
            for group in GROUPS
        }
        return pd.DataFrame.from_dict(rows, orient="index").round(1)


@lru_cache(maxsize=16)
def recorded(shape: DecoderShape, plan: CapturePlan) -> PlanMemory:
    """What the graphs of the plan allocate on the shape, recorded once a process; takes seconds the first time."""
    return record_plan(shape, plan, progress_bar)


def pool_maps(
    memory: PlanMemory, *, largest_first: bool = True, hold_outputs: bool = False
) -> dict[PoolSharing, PoolMap]:
    """The address maps of the three arrangements, all from one playing of the model graphs.

    With `hold_outputs` no graph reuses another's outputs (D5).
    """
    # Blocks of another stream or pool are no candidates (O2), so the arrangements do not see each other.
    tracker = _Tracker(make_player(), hold_outputs)
    model, replay = memory.in_order(largest_first)
    captured = [tracker.capture(graph, "model", MODEL_STREAM, MODEL_POOL) for graph in model]
    return {
        sharing: _map_of(
            sharing,
            largest_first,
            hold_outputs,
            captured + [tracker.capture(graph, "replay", *REPLAY_PLACES[sharing]) for graph in replay],
        )
        for sharing in PoolSharing
    }


@attrs.frozen
class _Captured:
    """A graph as it was played: the segments that it added and the addresses that it touched, as ranges."""

    name: str
    group: str
    segments: tuple[Range, ...]
    touched: tuple[Range, ...]


class _Tracker:
    """Plays graphs into pools and notes for each what it reserves and touches there."""

    def __init__(self, player: MemoryPlayer, hold_outputs: bool) -> None:
        self._player, self._hold_outputs = player, hold_outputs
        self._known: set[int] = set()

    def capture(self, memory: GraphMemory, group: str, stream: int, pool: int) -> _Captured:
        """Play what the graph allocates in its pool."""
        allocator = self._player.allocator
        reserved = allocator.reserved_bytes()
        in_pool = attrs.evolve(memory, events=tuple(event for event in memory.events if event[2]))
        blocks = self._player.play(in_pool, stream, pool, holds_outputs=self._hold_outputs)
        segments: list[Range] = []
        if allocator.reserved_bytes() > reserved:
            found = (s for s in allocator.segments() if s.address not in self._known)
            segments = [(segment.address, segment.address + segment.size) for segment in found]
            self._known |= {start for start, _ in segments}
        touched = _merged((address, address + round_size(nbytes)) for address, nbytes in blocks)
        return _Captured(memory.name, group, tuple(segments), tuple(touched))


def _map_of(sharing: PoolSharing, largest_first: bool, hold_outputs: bool, captured: list[_Captured]) -> PoolMap:
    """Lay the segments end to end in the order in which they were reserved, and find each byte's first user."""
    segments: list[MapSegment] = []
    addresses: list[int] = []
    reserved = 0
    totals = []
    for number, graph in enumerate(captured):
        for start, end in graph.segments:
            segments.append(MapSegment(reserved, end - start, number))
            addresses.append(start)
            reserved += end - start
        totals.append(reserved)
    placed = [_placed(graph.touched, addresses, segments) for graph in captured]
    graphs = tuple(
        MappedGraph(graph.name, graph.group, ranges, total)
        for graph, ranges, total in zip(captured, _with_first_users(placed), totals, strict=True)
    )
    return PoolMap(sharing, largest_first, hold_outputs, tuple(segments), graphs)


def _placed(touched: Iterable[Range], addresses: list[int], segments: list[MapSegment]) -> list[Range]:
    """The ranges in bytes of the map; `addresses` of the segments ascend, as the allocator's model hands them out."""
    found = []
    for start, end in touched:
        index = int(np.searchsorted(addresses, start, side="right")) - 1
        offset = segments[index].start - addresses[index]
        found.append((start + offset, end + offset))
    return found


def _with_first_users(placed: list[list[Range]]) -> list[tuple[TouchedRange, ...]]:
    """Each graph's ranges, cut where the first user of their bytes changes."""
    cuts = np.unique(np.array([edge for ranges in placed for pair in ranges for edge in pair], np.int64))
    users: npt.NDArray[np.int64] = np.full(max(len(cuts) - 1, 0), -1)
    cut_up = []
    for number, ranges in enumerate(placed):
        found = []
        for start, end in ranges:
            low, high = np.searchsorted(cuts, (start, end))
            cells = users[low:high]
            cells[cells < 0] = number
            edges = [int(low), *(int(low) + 1 + int(i) for i in np.flatnonzero(np.diff(cells))), int(high)]
            found += [
                TouchedRange(int(cuts[a]), int(cuts[b] - cuts[a]), int(users[a]))
                for a, b in zip(edges, edges[1:], strict=False)
            ]
        cut_up.append(tuple(found))
    return cut_up


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in ascending order, those that touch or overlap joined."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
