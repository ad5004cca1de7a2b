"""Allocations recorded graph by graph and played again: what is heard, what is cut, what is live (O5)."""

from replay_sim.capture.caching_allocator import CachingAllocator
from replay_sim.capture.graph_memory import GraphMemory, MemoryPlayer, MemoryRecorder

MIB = 1 << 20
POOL = 3


def test_the_peak_counts_what_is_live_in_the_pool_at_once() -> None:
    """O5: an allocation outside of the pool is not the graph's."""
    assert GraphMemory("none", ()).peak_bytes == 0
    events = ((1, 10, True), (2, 30, True), (3, 1000, False), (2, 0, True), (4, 25, True), (3, 0, False), (1, 0, True))
    assert GraphMemory("some", events).peak_bytes == 40
    assert GraphMemory("again", ((1, 10, True), (1, 0, True), (1, 35, True))).peak_bytes == 35


def recorded() -> tuple[GraphMemory, GraphMemory]:
    """Two graphs' allocations of one allocator; the first keeps its second block, and the second frees it."""
    allocator = CachingAllocator()
    allocator.retain_pool(POOL)
    recorder = MemoryRecorder(allocator)
    one, kept = allocator.malloc(2 * MIB, 0, POOL), allocator.malloc(600, 0, POOL)
    plain = allocator.malloc(5000, 0, None)
    allocator.free(one)
    first = recorder.cut("first", [kept, plain, 12345])
    allocator.free(kept)
    last = allocator.malloc(4 * MIB, 0, POOL)
    return first, recorder.cut("second", [last, kept])


def test_a_recorder_cuts_what_it_hears_into_graphs_with_the_outputs_of_each() -> None:
    """O5: ids count from 1; 0 bytes free an id; only blocks of the pool that this graph made are its outputs."""
    first, second = recorded()
    (one, kept, plain), sizes = (event[0] for event in first.events[:3]), [event[1] for event in first.events]
    assert (one, kept, plain) == (1, 2, 3)
    assert [event[2] for event in first.events] == [True, True, False, True] and sizes[3] == 0 < min(sizes[:3])
    assert first.events[3][0] == one
    assert (first.name, first.outputs) == ("first", {kept})
    assert [(number, nbytes > 0, in_pool) for number, nbytes, in_pool in second.events] == [
        (kept, False, True),
        (4, True, True),
    ]
    assert (second.name, second.outputs) == ("second", {4})


def test_a_player_allocates_and_frees_as_recorded_and_says_what() -> None:
    """O5, D5: with outputs held, what the second graph frees of the first stays."""
    first, second = recorded()
    player, held = MemoryPlayer(), MemoryPlayer()
    for one in (player, held):
        one.allocator.retain_pool(7)
    touched = player.play(first, 0, 7)
    assert sorted(nbytes for _, nbytes in touched) == sorted(nbytes for _, nbytes, _ in first.events if nbytes)
    assert player.allocator.allocated_bytes(7) == 1024
    assert player.allocator.allocated_bytes() == 1024 + 5120
    player.play(second, 0, 7)
    assert player.allocator.allocated_bytes(7) == 4 * MIB

    held.play(GraphMemory("first", (*first.events, (2, 0, True)), first.outputs), 0, 7, holds_outputs=True)
    assert held.allocator.allocated_bytes(7) == 1024
