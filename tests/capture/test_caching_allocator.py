"""The caching allocator's model: its rules one by one, its invariants, and a naive second opinion."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.capture.caching_allocator import ALL, CachingAllocator, Event, OutOfMemoryError

KIB, MIB = 1 << 10, 1 << 20
BASE = 1 << 40
POOL, OTHER_POOL = 1, 2
SIZES = (
    1,
    512,
    513,
    700 * KIB,
    MIB,
    MIB + 1,
    3 * MIB,
    9 * MIB,
    10 * MIB - 512,
    10 * MIB,
    11 * MIB + 1,
    40 * MIB,
)


def sizes_and_state(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    return [[(block.size, block.allocated) for block in segment.blocks] for segment in allocator.segments()]


@pytest.mark.parametrize(
    ("nbytes", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (5000, 5120)]
)
def test_a_size_is_rounded_up_to_512_bytes(nbytes: int, block: int) -> None:
    """C12."""
    allocator = CachingAllocator()
    address = allocator.malloc(nbytes)
    found = allocator.block_at(address)
    assert found is not None
    assert (found.size, found.requested, allocator.allocated_bytes()) == (block, nbytes, block)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_has_2_mib_for_small_20_for_medium_and_the_next_2_mib_for_large_sizes(
    nbytes: int, segment: int
) -> None:
    """C12: 10 MiB - 511 bytes is already 10 MiB once rounded."""
    allocator = CachingAllocator()
    allocator.malloc(nbytes)
    assert [s.size for s in allocator.segments()] == [segment]
    assert allocator.reserved_bytes() == segment


def test_zero_bytes_take_no_memory_and_address_zero_is_freed_silently() -> None:
    """C12."""
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.reserved_bytes() == 0


def test_a_split_gives_out_the_low_part() -> None:
    """C12."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(600), allocator.malloc(512)
    assert (first, second) == (BASE, BASE + 1024)
    assert sizes_and_state(allocator) == [[(1024, True), (512, True), (2 * MIB - 1536, False)]]


def test_a_small_block_is_split_down_to_the_last_512_bytes() -> None:
    """C12: 2 MiB hold 1 MiB, then 1 MiB - 512, then 512."""
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert sizes_and_state(allocator) == [[(MIB, True), (MIB - 512, True), (512, False)]]
    assert allocator.malloc(1) == BASE + 2 * MIB - 512
    assert allocator.reserved_bytes() == 2 * MIB


def test_a_large_block_is_not_split_when_at_most_1_mib_would_be_left() -> None:
    """C12: 20 MiB - 18 MiB - 1 MiB leave exactly 1 MiB, which stays with the block."""
    allocator = CachingAllocator()
    a = allocator.malloc(9 * MIB)
    b = allocator.malloc(9 * MIB)
    c = allocator.malloc(2 * MIB - 512)
    assert [c - BASE, b - a] == [18 * MIB, 9 * MIB]
    assert sizes_and_state(allocator) == [[(9 * MIB, True), (9 * MIB, True), (2 * MIB, True)]]
    assert allocator.allocated_bytes() == 20 * MIB
    exact = CachingAllocator()
    exact.malloc(12 * MIB - MIB)
    assert sizes_and_state(exact) == [[(12 * MIB, True)]]


def test_a_large_block_is_split_when_more_than_1_mib_is_left() -> None:
    """C12: 13 MiB - 512 in 14 MiB leave 1 MiB + 512."""
    allocator = CachingAllocator()
    allocator.malloc(13 * MIB - 512)
    assert sizes_and_state(allocator) == [[(13 * MIB - 512, True), (MIB + 512, False)]]


def test_the_best_fit_is_the_smallest_block_that_holds_the_size_whatever_its_address() -> None:
    """C12: of free blocks of 4, 2 and 3 KiB, 2,049 bytes take the 3 KiB one."""
    allocator = CachingAllocator()
    blocks = []
    for size in (4 * KIB, 2 * KIB, 3 * KIB):
        blocks.append(allocator.malloc(size))
        allocator.malloc(512)
    for address in blocks:
        allocator.free(address)
    assert allocator.malloc(2049) == blocks[2]
    assert allocator.malloc(2049) == blocks[0]


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    """C12: not the one freed last."""
    allocator = CachingAllocator()
    blocks = []
    for _ in range(3):
        blocks.append(allocator.malloc(4 * KIB))
        allocator.malloc(512)
    for address in (blocks[2], blocks[0], blocks[1]):
        allocator.free(address)
    assert [allocator.malloc(4 * KIB) for _ in range(3)] == blocks


def test_a_freed_block_merges_with_free_neighbours_on_both_sides() -> None:
    """C12."""
    allocator = CachingAllocator()
    a, b, c, d = (allocator.malloc(KIB) for _ in range(4))
    allocator.free(a)
    allocator.free(c)
    tail = 2 * MIB - 4 * KIB
    assert sizes_and_state(allocator) == [[(KIB, False), (KIB, True), (KIB, False), (KIB, True), (tail, False)]]
    allocator.free(b)
    assert sizes_and_state(allocator) == [[(3 * KIB, False), (KIB, True), (tail, False)]]
    allocator.free(d)
    assert sizes_and_state(allocator) == [[(2 * MIB, False)]]


def test_blocks_of_adjacent_segments_do_not_merge() -> None:
    """C12: two 2 MiB segments side by side hold no block of 3 MiB."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(MIB) for _ in range(4)]
    for address in blocks:
        allocator.free(address)
    assert sizes_and_state(allocator) == [[(2 * MIB, False)], [(2 * MIB, False)]]


def test_small_and_large_requests_do_not_share_segments() -> None:
    """C12: a free 20 MiB segment serves no request of 1 MiB."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(2 * MIB))
    allocator.malloc(MIB)
    assert [(s.size, s.is_small) for s in allocator.segments()] == [(20 * MIB, False), (2 * MIB, True)]


def test_a_segment_serves_only_its_own_stream() -> None:
    """O2, D3: the same pool on another stream shares nothing."""
    allocator = CachingAllocator()
    allocator.retain_pool(POOL)
    first = allocator.malloc(4 * MIB, stream=1, pool=POOL)
    allocator.free(first)
    assert allocator.malloc(4 * MIB, stream=2, pool=POOL) != first
    assert allocator.reserved_bytes(POOL) == 40 * MIB
    assert allocator.malloc(4 * MIB, stream=1, pool=POOL) == first
    assert allocator.reserved_bytes(POOL) == 40 * MIB


def test_the_same_pool_and_stream_reuse_what_is_free() -> None:
    """O1: later and smaller needs add 0 bytes of reserved memory."""
    allocator = CachingAllocator()
    allocator.retain_pool(POOL)
    for _ in range(2):
        live = [allocator.malloc(size, 1, POOL) for size in (30 * MIB, 5 * MIB, 700)]
        for address in live:
            allocator.free(address)
    assert allocator.reserved_bytes(POOL) == 52 * MIB


def test_outputs_that_stay_alive_pin_the_pool_and_dropped_ones_do_not() -> None:
    """D5: sizes 4, 3, 2, 1 units, largest first: 4 units when outputs are dropped, 10 when they are held."""
    unit = 16 * MIB
    reserved = []
    for held in (False, True):
        allocator = CachingAllocator()
        allocator.retain_pool(POOL)
        for size in (4, 3, 2, 1):
            address = allocator.malloc(size * unit, 1, POOL)
            if not held:
                allocator.free(address)
        reserved.append(allocator.reserved_bytes(POOL))
    assert reserved == [4 * unit, 10 * unit]


def test_pools_do_not_share_blocks_and_the_default_pool_is_one_of_them() -> None:
    """C12."""
    allocator = CachingAllocator()
    allocator.retain_pool(POOL)
    allocator.retain_pool(OTHER_POOL)
    for pool in (None, POOL, OTHER_POOL):
        allocator.free(allocator.malloc(512, 0, pool))
    assert [allocator.reserved_bytes(pool) for pool in (None, POOL, OTHER_POOL, ALL)] == [
        2 * MIB,
        2 * MIB,
        2 * MIB,
        6 * MIB,
    ]
    assert [segment.pool for segment in allocator.segments()] == [None, POOL, OTHER_POOL]
    assert len(allocator.segments(POOL)) == 1


def test_emptying_the_cache_gives_back_only_wholly_free_segments() -> None:
    """C12."""
    allocator = CachingAllocator()
    held = allocator.malloc(512)
    allocator.free(allocator.malloc(4 * MIB))
    assert allocator.empty_cache() == [BASE + 2 * MIB]
    assert allocator.reserved_bytes() == 2 * MIB
    allocator.free(held)
    assert allocator.empty_cache() == [BASE]
    assert (allocator.reserved_bytes(), allocator.segments()) == (0, ())


def test_the_default_pool_gives_back_large_segments_first_and_a_released_pool_small_ones() -> None:
    """O5: by size within each, so that segment events come in the GPU's order."""
    freed = []
    for pool in (None, POOL):
        allocator = CachingAllocator()
        allocator.retain_pool(POOL)
        blocks = [allocator.malloc(size, 0, pool) for size in (512, 30 * MIB, 5 * MIB)]
        for address in blocks:
            allocator.free(address)
        allocator.release_pool(POOL)
        freed.append([blocks.index(address) for address in allocator.empty_cache()])
    assert freed == [[2, 1, 0], [0, 2, 1]]


def test_a_held_pool_keeps_its_segments_when_the_cache_is_emptied() -> None:
    """C7, C12: release by its last user, then an emptied cache, gives the memory back."""
    allocator = CachingAllocator()
    allocator.retain_pool(POOL)
    allocator.retain_pool(POOL)
    address = allocator.malloc(4 * MIB, 1, POOL)
    allocator.free(address)
    assert allocator.empty_cache() == []
    allocator.release_pool(POOL)
    assert allocator.empty_cache() == []
    allocator.release_pool(POOL)
    assert allocator.reserved_bytes(POOL) == 20 * MIB
    assert allocator.empty_cache() == [address]
    assert allocator.reserved_bytes(POOL) == 0


def test_a_released_pool_with_a_live_output_lasts_until_the_output_dies() -> None:
    """C12."""
    allocator = CachingAllocator()
    allocator.retain_pool(POOL)
    output = allocator.malloc(4 * MIB, 1, POOL)
    allocator.release_pool(POOL)
    assert allocator.empty_cache() == []
    with pytest.raises(ValueError, match=r"retain_pool\(1\)"):
        allocator.malloc(512, 1, POOL)
    with pytest.raises(ValueError, match="20971520 bytes not given back"):
        allocator.retain_pool(POOL)
    allocator.free(output)
    assert allocator.empty_cache() == [output]
    allocator.retain_pool(POOL)
    allocator.malloc(512, 1, POOL)


def test_out_of_memory_empties_the_cache_and_tries_again() -> None:
    """D8: 20 cached MiB make room for 30 of 40."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(4 * MIB))
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes() == 30 * MIB


def test_out_of_memory_in_a_private_pool_empties_nothing_as_a_capture_is_under_way() -> None:
    """D8."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(4 * MIB))
    allocator.retain_pool(POOL)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB, 1, POOL)
    assert allocator.reserved_bytes() == 20 * MIB


def test_an_out_of_memory_error_carries_its_numbers() -> None:
    """D8: 136 MiB wanted where 120 are free."""
    allocator = CachingAllocator(capacity_bytes=160 * MIB)
    allocator.malloc(39 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(135 * MIB + 1)
    error = caught.value
    assert (error.requested, error.segment) == (135 * MIB + 1, 136 * MIB)
    assert (error.reserved, error.allocated, error.capacity) == (40 * MIB, 40 * MIB, 160 * MIB)
    assert "capacity_bytes=167772160" in str(error)
    assert allocator.malloc(119 * MIB) > 0


def test_events_are_those_of_a_recorded_history() -> None:
    """O5."""
    events: list[Event] = []
    allocator = CachingAllocator(on_event=events.append)
    allocator.retain_pool(POOL)
    address = allocator.malloc(600, 3, POOL)
    allocator.free(address)
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert events == [
        Event("segment_alloc", BASE, 2 * MIB, 3, POOL),
        Event("alloc", BASE, 600, 3, POOL),
        Event("free_requested", BASE, 600, 3, POOL),
        Event("free_completed", BASE, 600, 3, POOL),
        Event("segment_free", BASE, 2 * MIB, 3, POOL),
    ]


def test_the_block_at_an_address_is_found_from_any_byte_of_it() -> None:
    """C12."""
    allocator = CachingAllocator()
    allocator.malloc(512)
    second = allocator.malloc(1000, 0)
    found = allocator.block_at(second + 1023)
    assert found is not None and (found.address, found.requested) == (second, 1000)
    free = allocator.block_at(second + 1024)
    assert free is not None and not free.allocated and free.requested == 0
    assert allocator.block_at(BASE - 1) is None
    assert allocator.block_at(BASE + 2 * MIB) is None


@pytest.mark.parametrize("overlapping", [MIB, 5 * MIB, 9 * MIB, 27 * MIB])
def test_segments_lie_where_the_caller_places_them_and_must_not_overlap(overlapping: int) -> None:
    """C12: 20 MiB at 8 MiB and 2 MiB at 2 MiB leave no room for 30 MiB at any of these."""
    places = iter((8 * MIB, 2 * MIB, overlapping))
    allocator = CachingAllocator(place_segment=lambda size: next(places))
    assert allocator.malloc(4 * MIB) == 8 * MIB
    assert allocator.malloc(512) == 2 * MIB
    with pytest.raises(ValueError, match="overlaps"):
        allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes() == 22 * MIB


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda a: a.malloc(-1), "malloc of -1 bytes"),
        (lambda a: a.malloc(1, 0, 7), r"retain_pool\(7\)"),
        (lambda a: a.free(12345), "free of address 12345"),
        (lambda a: [a.free(address) for address in [a.malloc(1)] * 2], "no allocated block"),
        (lambda a: a.release_pool(7), r"release_pool\(7\)"),
        (lambda a: a.retain_pool(None), "default pool"),
        (lambda a: CachingAllocator(capacity_bytes=-1), "capacity_bytes is -1"),
    ],
)
def test_misuse_is_a_value_error_that_names_the_value(misuse, message: str) -> None:
    """C12."""
    with pytest.raises(ValueError, match=message):
        misuse(CachingAllocator())


class NaiveAllocator:
    """The same rules from scratch: segments as lists of [start, end, live], scanned from end to end."""

    def __init__(self) -> None:
        self.next_address, self.segments = BASE, []

    def malloc(self, nbytes: int, stream: int, pool: int | None) -> int:
        size = nbytes + -nbytes % 512
        small = size <= 1_048_576
        candidates = [
            (end - start, start, segment)
            for segment in self.segments
            if segment["key"] == (small, stream, pool)
            for start, end, live in segment["spans"]
            if not live and end - start >= size
        ]
        if not candidates:
            length = 2_097_152 if small else 20_971_520
            if size >= 10_485_760:
                length = next(n for n in range(0, size + 2_097_152, 2_097_152) if n >= size)
            start = self.next_address
            self.next_address += length
            segment = {"key": (small, stream, pool), "spans": [[start, start + length, False]]}
            self.segments.append(segment)
            candidates = [(length, start, segment)]
        length, start, segment = min(candidates, key=lambda found: found[:2])
        keep_whole = length - size < 512 if small else length - size <= 1_048_576
        end = start + (length if keep_whole else size)
        spans = [span for span in segment["spans"] if span[0] != start] + [[start, end, True]]
        if end < start + length:
            spans.append([end, start + length, False])
        segment["spans"] = sorted(spans)
        return start

    def free(self, address: int) -> None:
        for segment in self.segments:
            joined: list[list] = []
            for start, end, live in segment["spans"]:
                live = live and start != address
                if joined and not live and not joined[-1][2]:
                    joined[-1][1] = end
                else:
                    joined.append([start, end, live])
            segment["spans"] = joined

    def empty(self, pools: set) -> None:
        self.segments = [
            s for s in self.segments if s["key"][2] not in pools or len(s["spans"]) > 1 or s["spans"][0][2]
        ]

    def reserved(self) -> int:
        return sum(s["spans"][-1][1] - s["spans"][0][0] for s in self.segments)


def check_invariants(allocator: CachingAllocator, live: dict[int, tuple[int, int, int | None]]) -> None:
    segments = allocator.segments()
    for segment in segments:
        position = segment.address
        for block in segment.blocks:
            assert block.address == position and block.size > 0 and block.size % 512 == 0
            assert block.stream == segment.stream
            position += block.size
        assert position == segment.address + segment.size
        states = [block.allocated for block in segment.blocks]
        assert all(left or right for left, right in zip(states, states[1:], strict=False))
    for low, high in zip(segments, segments[1:], strict=False):
        assert low.address + low.size <= high.address
    allocated = {b.address: (b, s) for s in segments for b in s.blocks if b.allocated}
    assert allocated.keys() == live.keys()
    for address, (nbytes, stream, pool) in live.items():
        block, segment = allocated[address]
        assert (block.requested, segment.stream, segment.pool) == (nbytes, stream, pool)
        assert block.size >= nbytes and segment.is_small == (nbytes <= MIB)
    assert allocator.reserved_bytes() == sum(s.size for s in segments)
    assert allocator.allocated_bytes() == sum(b.size for b, _ in allocated.values())


MALLOCS = st.tuples(
    st.just("malloc"),
    st.one_of(st.sampled_from(SIZES), st.integers(1, 4 * KIB), st.integers(1, 45 * MIB)),
    st.sampled_from((0, 0, 0, 1)),
    st.sampled_from((POOL, POOL, POOL, OTHER_POOL, None)),
)
FREES = st.tuples(st.just("free"), st.integers(0, 1000))
OPERATIONS = st.lists(st.one_of(MALLOCS, MALLOCS, FREES, FREES, st.just(("empty",))), min_size=40, max_size=120)


def run_both(operations: Iterable[tuple]) -> None:
    """Run a trace through the model and the naive allocator, with all checks after every step."""
    allocator, naive = CachingAllocator(), NaiveAllocator()
    allocator.retain_pool(POOL)
    allocator.retain_pool(OTHER_POOL)
    live: dict[int, tuple[int, int, int | None]] = {}
    for operation in operations:
        if operation[0] == "malloc":
            address = allocator.malloc(*operation[1:])
            assert address not in live
            assert address == naive.malloc(*operation[1:])
            live[address] = operation[1:]
        elif operation[0] == "free" and live:
            address = sorted(live)[operation[1] % len(live)]
            del live[address]
            allocator.free(address)
            naive.free(address)
        elif operation[0] == "empty":
            allocator.empty_cache()
            naive.empty({None})
        assert allocator.reserved_bytes() == naive.reserved()
        check_invariants(allocator, live)
    for address in live:
        allocator.free(address)
    for pool in (POOL, OTHER_POOL):
        allocator.release_pool(pool)
    allocator.empty_cache()
    assert (allocator.reserved_bytes(), allocator.segments()) == (0, ())


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_random_traces_keep_the_invariants_and_agree_with_the_naive_allocator(operations) -> None:
    """C12: blocks tile segments, free neighbours are merged, streams and pools never share."""
    run_both(operations)


@pytest.mark.parametrize("seed", [1, 2])
def test_long_traces_that_fragment_the_pool_agree_with_the_naive_allocator(seed: int) -> None:
    """C12, O5: 1,500 operations about a level of 60 live blocks."""
    draw = random.Random(seed)
    operations: list[tuple] = []
    live = 0
    for _ in range(1500):
        if draw.random() * 120 > live:
            size = int(2 ** draw.uniform(6, 24.5))
            operations.append(("malloc", size, draw.choice((0, 0, 1)), draw.choice((POOL, POOL, None))))
            live += 1
        else:
            operations.append(("free", draw.randrange(1000)))
            live -= 1
    run_both(operations)


def test_a_block_freed_later_is_free_for_the_next_call_that_would_see_it() -> None:
    """C12: what a finalizer asks for in the middle of an allocation waits until that is done."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.free_later(first)
    assert allocator.malloc(4 * MIB) == first
    allocator.free_later(second)
    allocator.free_later(first)
    assert allocator.allocated_bytes() == 0
    assert allocator.empty_cache() and allocator.segments() == ()
