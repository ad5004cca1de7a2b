"""The building blocks of the caching allocator's model: size rules, blocks, free lists, pools and events."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

import attrs

MIN_BLOCK: Final = 512
SMALL_LIMIT: Final = 1 << 20
SMALL_SEGMENT: Final = 2 << 20
LARGE_SEGMENT: Final = 20 << 20
LARGE_SEGMENT_BELOW: Final = 10 << 20
SEGMENT_GRANULE: Final = 2 << 20

PoolId = int | None


@attrs.frozen
class Event:
    """One step of the allocator, worded as a `torch.cuda.memory` snapshot words it.

    `action` is segment_alloc, segment_free, alloc, free_requested or free_completed; `size` is in bytes: the
    segment's for the first two, the requested one (not rounded) for the others.
    """

    action: str
    address: int
    size: int
    stream: int
    pool: PoolId


@attrs.frozen
class Block:
    """A piece of a segment: `size` bytes, of which the caller asked for `requested` (0 if free)."""

    address: int
    size: int
    requested: int
    allocated: bool
    stream: int


@attrs.frozen
class Segment:
    """One reservation of `size` bytes from the device and the blocks that tile it, by ascending address."""

    address: int
    size: int
    stream: int
    pool: PoolId
    is_small: bool
    blocks: tuple[Block, ...]


def round_size(nbytes: int) -> int:
    """The block size in bytes that a request of `nbytes` gets: the next multiple of 512, at least 512."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(block_size: int) -> int:
    """The bytes reserved from the device when no free block holds `block_size` (a rounded size)."""
    if block_size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if block_size < LARGE_SEGMENT_BELOW:
        return LARGE_SEGMENT
    return -(-block_size // SEGMENT_GRANULE) * SEGMENT_GRANULE


@attrs.define(eq=False, repr=False)
class FreeBlocks:
    """The free small or large blocks of one pool: per stream, (size, address) in ascending order."""

    is_small: bool
    pool: "Pool"
    by_stream: dict[int, list[tuple[int, int]]] = attrs.Factory(dict)

    def add(self, block: "Node") -> None:
        """Enter a block that has just become free."""
        insort(self.by_stream.setdefault(block.stream, []), (block.size, block.address))

    def remove(self, block: "Node") -> None:
        """Take out a block of this list, before its size or address changes."""
        entries = self.by_stream[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def take_best(self, stream: int, size: int) -> int | None:
        """Remove the smallest block of the stream that holds `size`, lowest address first; its address."""
        entries = self.by_stream.get(stream, [])
        index = bisect_left(entries, (size, 0))
        return entries.pop(index)[1] if index < len(entries) else None

    def leaves(self, remaining: int) -> bool:
        """Whether `remaining` bytes beyond a request are worth a block of their own."""
        return remaining >= MIN_BLOCK if self.is_small else remaining > SMALL_LIMIT

    def addresses(self) -> list[int]:
        """The free blocks' addresses, by stream, then size, then address."""
        return [address for stream in sorted(self.by_stream) for _, address in self.by_stream[stream]]


@attrs.define(eq=False, repr=False)
class Pool:
    """One memory pool: its free blocks, its use count and its bytes."""

    id: PoolId
    use_count: int = 0
    reserved: int = 0
    allocated: int = 0
    small: FreeBlocks = attrs.field(init=False)
    large: FreeBlocks = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.small, self.large = FreeBlocks(True, self), FreeBlocks(False, self)


@attrs.define(eq=False, repr=False)
class Node:
    """A block, linked to its neighbours in the segment; the first block of a segment has its address."""

    address: int
    size: int
    stream: int
    home: FreeBlocks
    requested: int = 0
    allocated: bool = False
    prev: "Node | None" = None
    next: "Node | None" = None

    def chain(self) -> "Iterator[Node]":
        """This block and the ones above it in its segment."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.next

    def snapshot(self) -> Block:
        """The block as a value."""
        return Block(self.address, self.size, self.requested, self.allocated, self.stream)
