"""What each graph of a capture allocates and frees, recorded once and played again in any pool, stream and order."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from replay_sim.capture.allocator_blocks import Event
from replay_sim.capture.caching_allocator import CachingAllocator


@attrs.frozen
class GraphMemory:
    """The allocations of one graph's warm-up and capture, or of what came before all graphs.

    `events` are (id, bytes, in_pool) in order, with 0 bytes for the free of an id; `outputs` the ids that hold what
    the graph returns.
    """

    name: str
    events: tuple[tuple[int, int, bool], ...]
    outputs: frozenset[int] = frozenset()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are live in the pool at once, before rounding."""
        live = peak = 0
        sizes: dict[int, int] = {}
        for number, nbytes, in_pool in self.events:
            if in_pool:
                live += nbytes or -sizes[number]
                sizes[number] = nbytes
                peak = max(peak, live)
        return peak


class MemoryRecorder:
    """Listens to an allocator and cuts what it hears into `GraphMemory`s."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._ids: dict[int, int] = {}
        self._count = 0
        self._events: list[tuple[int, int, bool]] = []
        allocator.on_event = self._hear

    def _hear(self, event: Event) -> None:
        if event.action == "alloc":
            self._count += 1
            self._ids[event.address] = self._count
            self._events.append((self._count, event.size, event.pool is not None))
        elif event.action == "free_completed":
            self._events.append((self._ids[event.address], 0, event.pool is not None))

    def cut(self, name: str, outputs: Iterable[int] = ()) -> GraphMemory:
        """What was heard since the last cut; `outputs` are the addresses at which the graph's outputs lie."""
        self._allocator.settle()
        made = {number for number, nbytes, in_pool in self._events if nbytes and in_pool}
        held = frozenset(self._ids[address] for address in outputs if self._ids.get(address) in made)
        memory = GraphMemory(name, tuple(self._events), held)
        self._events.clear()
        return memory


class MemoryPlayer:
    """An allocator of its own, in which recorded graphs are captured again."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self._addresses: dict[int, int] = {}

    def play(
        self, memory: GraphMemory, stream: int = 0, pool: int | None = None, *, holds_outputs: bool = False
    ) -> set[tuple[int, int]]:
        """Allocate and free as recorded: on `stream`, and in `pool` what was in a pool.

        With `holds_outputs` the graph's outputs are never freed (D5). Returns the (address, bytes) that were
        allocated, each once.
        """
        malloc, free, addresses = self.allocator.malloc, self.allocator.free, self._addresses
        held = memory.outputs if holds_outputs else frozenset()
        touched = set()
        for number, nbytes, in_pool in memory.events:
            if nbytes:
                address = addresses[number] = malloc(nbytes, stream, pool if in_pool else None)
                touched.add((address, nbytes))
            elif number not in held:
                free(addresses.pop(number))
        return touched
