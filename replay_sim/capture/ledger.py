"""The ledger of the host backend's arena: which allocation each byte belongs to while graphs replay."""

from __future__ import annotations

import mmap
import weakref

import attrs
import numpy as np
import torch

from replay_sim.capture.arena import MAP_NORESERVE, Arena
from replay_sim.capture.source_line import SourceLine, calling_line

OWNER_BYTES = 4


@attrs.frozen
class Allocation:
    """One block's life in a capture: what it holds, which operation made it in which graph, and where in the code."""

    serial: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: str
    graph: str
    source: SourceLine | None
    address: int
    nbytes: int

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source is not None else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"the {kind} tensor of shape {self.shape} that {self.operation} makes in {self.graph}{where}"


class Ledger:
    """Allocations by serial number, and the serial number that owns each byte of the arena; 0 for none yet.

    A replay hands each block to the allocations of its graph in the order of the capture. A tensor is known by its
    storage, so that views of it are too.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._allocations: list[Allocation] = []
        self._claims: dict[int, int] = {}
        self._clock = 0
        self._by_storage: dict[int, int] = {}
        self._kept: set[int] = set()
        owners = mmap.mmap(
            -1, arena.virtual_bytes * OWNER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        )
        self._owners = torch.from_numpy(np.frombuffer(owners, dtype=np.int32))

    def enter(self, owner: np.ndarray, tensor: torch.Tensor, operation: str, graph: str) -> Allocation:
        """A new allocation for `tensor`, whose memory lives as long as `owner`."""
        storage = tensor.untyped_storage()
        serial = len(self._allocations) + 1
        made = Allocation(
            serial=serial,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            operation=operation,
            graph=graph,
            source=calling_line(),
            address=self._arena.address_of(storage.data_ptr()),
            nbytes=storage.nbytes(),
        )
        self._allocations.append(made)
        self._kept.add(serial)
        self._tag(owner, storage, serial)
        weakref.finalize(owner, self._kept.discard, serial).atexit = False
        return made

    def alias(self, owner: np.ndarray, tensor: torch.Tensor, of: torch.Tensor) -> None:
        """Makes `tensor`, over the same memory as `of`, known as the same allocation, as long as `owner` lives."""
        serial = self._by_storage.get(of.untyped_storage()._cdata)
        if serial is not None:
            self._tag(owner, tensor.untyped_storage(), serial)

    def _tag(self, owner: np.ndarray, storage: torch.UntypedStorage, serial: int) -> None:
        self._by_storage[storage._cdata] = serial
        weakref.finalize(owner, self._by_storage.pop, storage._cdata, None).atexit = False

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation that the tensor was captured as; None for memory outside of captures."""
        serial = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if serial is None else self._allocations[serial - 1]

    def claim(self, allocation: Allocation) -> None:
        """A replay has reached the allocation: its block is its own again."""
        self._clock += 1
        self._claims[allocation.serial] = self._clock
        self._owners[allocation.address : allocation.address + allocation.nbytes] = allocation.serial

    def last_claim(self, allocation: Allocation) -> int:
        """When a replay last reached the allocation, by a clock of claims; 0 if nothing has written it."""
        return self._claims.get(allocation.serial, 0)

    def write(self, tensor: torch.Tensor, allocation: Allocation) -> None:
        """Every element of `tensor` is written: its bytes are its allocation's."""
        if allocation.serial not in self._claims:
            self._clock += 1
            self._claims[allocation.serial] = self._clock
        self._bytes_of(tensor).fill_(allocation.serial)

    def intruder(self, tensor: torch.Tensor, allocation: Allocation) -> Allocation | None:
        """The allocation that owns some byte of `tensor` in its allocation's place; itself for a byte of nobody's."""
        owners = self._bytes_of(tensor)
        strange = owners != allocation.serial
        if not bool(strange.any()):
            return None
        serial = int(owners[strange][0])
        return self._allocations[serial - 1] if serial else allocation

    def kept(self) -> tuple[Allocation, ...]:
        """Allocations that are still alive, in order; after a capture, those that something outside of it holds."""
        return tuple(self._allocations[serial - 1] for serial in sorted(self._kept))

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The owners of exactly the tensor's bytes, as a view of one dimension more."""
        size = tensor.dtype.itemsize
        start = self._arena.address_of(tensor.data_ptr())
        strides = (*(stride * size for stride in tensor.stride()), 1)
        return self._owners.as_strided((*tensor.shape, size), strides, start)
