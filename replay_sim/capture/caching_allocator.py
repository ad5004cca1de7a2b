"""The CUDA caching allocator's rules as a model that hands out addresses and owns no memory."""

import enum
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from replay_sim.capture.allocator_blocks import (
    SEGMENT_GRANULE,
    SMALL_LIMIT,
    Block,
    Event,
    FreeBlocks,
    Node,
    Pool,
    PoolId,
    Segment,
    round_size,
    segment_size,
)

FIRST_ADDRESS: Final = 1 << 40


class AllPools(enum.Enum):
    """The type of `ALL`, which asks for every pool where `None` asks for the default one."""

    ALL = "all"


ALL: Final = AllPools.ALL
PoolQuery = int | None | Literal[AllPools.ALL]


class OutOfMemoryError(MemoryError):
    """The device's capacity cannot hold the segment that a request needs; all numbers are bytes."""

    def __init__(self, requested: int, segment: int, reserved: int, allocated: int, capacity: int) -> None:
        """Keep the numbers and say them."""
        super().__init__(
            f"out of memory: {requested} bytes need a segment of {segment}, but {reserved} of "
            f"capacity_bytes={capacity} are reserved ({allocated} of them allocated)"
        )
        self.requested, self.segment, self.reserved = requested, segment, reserved
        self.allocated, self.capacity = allocated, capacity


class CachingAllocator:
    """PyTorch's CUDACachingAllocator with its default settings, for one device (C12, O1, O2).

    Addresses and sizes are ints in bytes. `pool=None` is the default pool; any other id is a private pool,
    and allocating from one means that a capture is under way. Not modelled: expandable segments,
    `record_stream` (free a block when it becomes reusable), the settings that change rounding, splitting or
    collection. It keeps no lock and must not be re-entered: a finalizer, which garbage collection may run in the middle
    of an allocation, calls `free_later`.
    """

    def __init__(
        self,
        place_segment: Callable[[int], int] | None = None,
        capacity_bytes: int | None = None,
        on_event: Callable[[Event], None] | None = None,
        free_segment: Callable[[int, int], None] | None = None,
    ) -> None:
        """Start empty.

        `place_segment(size)` gives a segment's address (default: ascending from 2^40, 2 MiB aligned) and
        `free_segment(address, size)` takes it back; `capacity_bytes` bounds the reserved bytes of all pools;
        `on_event` sees every `Event` in order. Raises ValueError for a negative capacity.
        """
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; allowed: at least 0, or None for no bound")
        self.capacity_bytes = capacity_bytes
        self.on_event = on_event
        self._place_segment = place_segment or self._place_next
        self._free_segment = free_segment
        self._next_address = FIRST_ADDRESS
        self._pools: dict[PoolId, Pool] = {None: Pool(None, use_count=1)}
        self._nodes: dict[int, Node] = {}
        self._segment_addresses: list[int] = []
        self._segment_sizes: dict[int, int] = {}
        self._dying: deque[int] = deque()

    def malloc(self, nbytes: int, stream: int = 0, pool: PoolId = None) -> int:
        """The address of a block for `nbytes`, best fit among the pool's free blocks of this stream (O1, O2).

        0 bytes give address 0. Without a block that fits, a segment is added; if it exceeds the capacity, the
        default pool first empties the cache and tries again, as no capture is under way. Raises
        OutOfMemoryError, and ValueError for a negative size or a pool that is not retained.
        """
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"malloc of {nbytes} bytes: the size must be at least 0")
            return 0
        owner = self._pools.get(pool)
        if owner is None or owner.use_count == 0:
            raise ValueError(f"malloc from pool {pool}, which nothing holds: call retain_pool({pool}) first")
        self.settle()
        size = round_size(nbytes)
        home = owner.small if size <= SMALL_LIMIT else owner.large
        address = home.take_best(stream, size)
        node = self._nodes[address] if address is not None else self._add_segment(home, nbytes, stream)
        if home.leaves(node.size - size):
            self._split(node, size)
        node.allocated, node.requested = True, nbytes
        owner.allocated += node.size
        if self.on_event is not None:
            self.on_event(Event("alloc", node.address, nbytes, stream, pool))
        return node.address

    def free(self, address: int) -> None:
        """Make the block at `address` reusable and merge it with free neighbours of its segment.

        Address 0 is ignored. Raises ValueError for an address that is not an allocated block's.
        """
        if address == 0:
            return
        node = self._nodes.get(address)
        if node is None or not node.allocated:
            raise ValueError(f"free of address {address}, where no allocated block starts")
        pool = node.home.pool
        if self.on_event is not None:
            self.on_event(Event("free_requested", address, node.requested, node.stream, pool.id))
            self.on_event(Event("free_completed", address, node.requested, node.stream, pool.id))
        pool.allocated -= node.size
        node.allocated, node.requested = False, 0
        node = self._merge(node)
        node.home.add(node)

    def free_later(self, address: int) -> None:
        """Free the block at `address` before the next call that would see it; from any thread and any finalizer."""
        self._dying.append(address)

    def settle(self) -> None:
        """Free what was to be freed later."""
        while self._dying:
            self.free(self._dying.popleft())

    def retain_pool(self, pool: int) -> None:
        """Count one more user (graph) of a private pool, which is created if new.

        Raises ValueError for the default pool, and for one that was released while it still has segments.
        """
        if pool is None:
            raise ValueError("retain_pool(None): the default pool has no use count")
        owner = self._pools.setdefault(pool, Pool(pool))
        if owner.use_count == 0 and owner.reserved > 0:
            raise ValueError(f"retain_pool({pool}): released with {owner.reserved} bytes not given back yet")
        owner.use_count += 1

    def release_pool(self, pool: int) -> None:
        """Count one user less; at none, `empty_cache` may give back the pool's free segments.

        Raises ValueError if nothing holds the pool.
        """
        owner = self._pools.get(pool)
        if pool is None or owner is None or owner.use_count == 0:
            raise ValueError(f"release_pool({pool}): nothing holds this pool")
        owner.use_count -= 1

    def empty_cache(self) -> list[int]:
        """Give back the wholly free segments of the default pool, then of released pools; their addresses.

        Within the default pool large ones go first, within another small ones; PyTorch's order of the released
        pools among each other is a hash table's, here it is the order in which they were first retained.
        """
        self.settle()
        freed = []
        for pool in self._pools.values():
            if pool.id is None:
                freed += self._release(pool.large) + self._release(pool.small)
            elif pool.use_count == 0:
                freed += self._release(pool.small) + self._release(pool.large)
        return freed

    def reserved_bytes(self, pool: PoolQuery = ALL) -> int:
        """The bytes of the segments of a pool (0 if unknown), or of all pools (O5)."""
        return sum(p.reserved for p in self._pools.values() if pool is ALL or p.id == pool)

    def allocated_bytes(self, pool: PoolQuery = ALL) -> int:
        """The bytes of the allocated blocks, rounding included, of a pool (0 if unknown) or of all pools."""
        self.settle()
        return sum(p.allocated for p in self._pools.values() if pool is ALL or p.id == pool)

    def segments(self, pool: PoolQuery = ALL) -> tuple[Segment, ...]:
        """The segments of a pool or of all pools, with their blocks, by ascending address."""
        self.settle()
        found = []
        for address in self._segment_addresses:
            head = self._nodes[address]
            if pool is ALL or head.home.pool.id == pool:
                blocks = tuple(node.snapshot() for node in head.chain())
                home = head.home
                size = self._segment_sizes[address]
                found.append(Segment(address, size, head.stream, home.pool.id, home.is_small, blocks))
        return tuple(found)

    def segment_range(self, address: int) -> tuple[int, int] | None:
        """The address and the bytes of the segment that holds `address`; None outside every segment."""
        index = bisect_right(self._segment_addresses, address) - 1
        if index < 0:
            return None
        start = self._segment_addresses[index]
        size = self._segment_sizes[start]
        return (start, size) if address < start + size else None

    def block_at(self, address: int) -> Block | None:
        """The block, free or allocated, that holds `address`; None outside every segment."""
        self.settle()
        found = self.segment_range(address)
        if found is None:
            return None
        chain = self._nodes[found[0]].chain()
        return next(node.snapshot() for node in chain if address < node.address + node.size)

    def _place_next(self, size: int) -> int:
        address = self._next_address
        self._next_address += -(-size // SEGMENT_GRANULE) * SEGMENT_GRANULE
        return address

    def _add_segment(self, home: FreeBlocks, nbytes: int, stream: int) -> Node:
        size = segment_size(round_size(nbytes))
        if not self._fits(size) and home.pool.id is None:
            self.empty_cache()
        if not self._fits(size):
            reserved, allocated = self.reserved_bytes(), self.allocated_bytes()
            raise OutOfMemoryError(nbytes, size, reserved, allocated, self.capacity_bytes or 0)
        address = self._place_segment(size)
        index = bisect_left(self._segment_addresses, address)
        following = self._segment_addresses[index : index + 1]
        if self.segment_range(address) or (following and following[0] < address + size):
            raise ValueError(f"place_segment({size}) gave {address}, which overlaps another segment")
        self._segment_addresses.insert(index, address)
        self._segment_sizes[address] = size
        home.pool.reserved += size
        node = self._nodes[address] = Node(address, size, stream, home)
        if self.on_event is not None:
            self.on_event(Event("segment_alloc", address, size, stream, home.pool.id))
        return node

    def _fits(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes() + size <= self.capacity_bytes

    def _split(self, node: Node, size: int) -> None:
        """Cut `node` down to `size` bytes; what lies above becomes a free block."""
        rest = Node(node.address + size, node.size - size, node.stream, node.home, prev=node, next=node.next)
        if node.next is not None:
            node.next.prev = rest
        node.next, node.size = rest, size
        self._nodes[rest.address] = rest
        node.home.add(rest)

    def _merge(self, node: Node) -> Node:
        """Join a block that is in no free list with its free neighbours; the joined block, still in none."""
        if node.prev is not None and not node.prev.allocated:
            node = node.prev
            node.home.remove(node)
            self._absorb_next(node)
        if node.next is not None and not node.next.allocated:
            node.home.remove(node.next)
            self._absorb_next(node)
        return node

    def _absorb_next(self, node: Node) -> None:
        absorbed = node.next
        assert absorbed is not None
        del self._nodes[absorbed.address]
        node.size += absorbed.size
        node.next = absorbed.next
        if node.next is not None:
            node.next.prev = node

    def _release(self, blocks: FreeBlocks) -> list[int]:
        """Give back the segments that are one free block; their addresses."""
        freed = []
        for address in blocks.addresses():
            node = self._nodes[address]
            if node.prev is None and node.next is None:
                blocks.remove(node)
                del self._nodes[address], self._segment_sizes[address]
                del self._segment_addresses[bisect_left(self._segment_addresses, address)]
                blocks.pool.reserved -= node.size
                freed.append(address)
                if self._free_segment is not None:
                    self._free_segment(address, node.size)
                if self.on_event is not None:
                    self.on_event(Event("segment_free", address, node.size, node.stream, blocks.pool.id))
        return freed
