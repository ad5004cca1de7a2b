"""Real memory under the addresses of the caching allocator's model."""

import mmap
import sys
from bisect import insort

import numpy as np

from replay_sim.capture.allocator_blocks import SEGMENT_GRANULE
from replay_sim.capture.caching_allocator import CachingAllocator

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
POISON = 0xFF
"""What memory of a capture holds until its first replay: a NaN in every float type."""


class Arena:
    """One private anonymous mapping and the allocator whose segments lie in it (C12).

    Addresses are offsets into the mapping, in bytes, the same in every process; 0 is no address. Untouched
    pages cost nothing, and the pages of a segment that is given back are dropped.
    """

    def __init__(self, virtual_bytes: int = 64 << 30, capacity_bytes: int | None = None) -> None:
        """Map `virtual_bytes` of address space (a multiple of 2 MiB, at least 4 MiB).

        `capacity_bytes` bounds what the allocator reserves, as a device's memory does. Raises ValueError for
        a size that is not such a multiple, and MemoryError if the system refuses the mapping.
        """
        if virtual_bytes < 2 * SEGMENT_GRANULE or virtual_bytes % SEGMENT_GRANULE:
            raise ValueError(f"virtual_bytes is {virtual_bytes}; allowed: multiples of 2 MiB, at least 4 MiB")
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._mapping = mmap.mmap(-1, virtual_bytes, flags=flags)
        except OSError as error:
            raise MemoryError(f"cannot map virtual_bytes={virtual_bytes}: {error}") from error
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._start = int(self._bytes.ctypes.data)
        self._unused = [(SEGMENT_GRANULE, virtual_bytes - SEGMENT_GRANULE)]
        self.virtual_bytes = virtual_bytes
        self.allocator = CachingAllocator(
            place_segment=self.place_segment, capacity_bytes=capacity_bytes, free_segment=self.reclaim_segment
        )

    def place_segment(self, size: int) -> int:
        """The lowest 2 MiB aligned address with `size` unused bytes, for the allocator.

        Raises MemoryError, with the numbers, when no unused range is long enough.
        """
        span = -(-size // SEGMENT_GRANULE) * SEGMENT_GRANULE
        for index, (address, unused) in enumerate(self._unused):
            if unused >= span:
                left = [(address + span, unused - span)] if unused > span else []
                self._unused[index : index + 1] = left
                return address
        longest = max((unused for _, unused in self._unused), default=0)
        raise MemoryError(
            f"arena full: a segment of {size} bytes does not fit virtual_bytes={self.virtual_bytes}, "
            f"whose longest unused range is {longest} bytes; give the arena more virtual_bytes"
        )

    def reclaim_segment(self, address: int, size: int) -> None:
        """Take a segment's range back, for the allocator, and drop its pages."""
        span = -(-size // SEGMENT_GRANULE) * SEGMENT_GRANULE
        self._mapping.madvise(mmap.MADV_DONTNEED, address, span)
        insort(self._unused, (address, span))
        joined: list[tuple[int, int]] = []
        for start, unused in self._unused:
            if joined and sum(joined[-1]) == start:
                start, unused = joined[-1][0], joined.pop()[1] + unused
            joined.append((start, unused))
        self._unused = joined

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The memory at `address` as a new writable uint8 array of shape (nbytes,), which keeps the mapping.

        Raises ValueError for a range that is not within one segment of the allocator.
        """
        segment = self.allocator.segment_range(address)
        if nbytes < 0 or segment is None or address + nbytes > sum(segment):
            raise ValueError(f"{nbytes} bytes at address {address} are not within one segment of the arena")
        return self._bytes[address : address + nbytes]

    def pointer(self, address: int) -> int:
        """The process's pointer to the byte at `address`."""
        return self._start + address

    def contains(self, pointer: int) -> bool:
        """Whether a pointer of this process lies in the mapping."""
        return 0 <= pointer - self._start < self.virtual_bytes

    def address_of(self, pointer: int) -> int:
        """The address that a pointer of this process stands for, wherever it points."""
        return pointer - self._start

    def view_at(self, pointer: int, nbytes: int) -> np.ndarray:
        """`view` of the address that a pointer of this process stands for."""
        return self.view(pointer - self._start, nbytes)
