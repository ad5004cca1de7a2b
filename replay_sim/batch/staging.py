"""Host-to-device staging: a step's small arrays go through pinned memory that is not reused before its copy ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

RING = 2


class Staging:
    """Copies numpy arrays into device buffers at fixed addresses.

    On a GPU the copies are asynchronous, from a ring of pinned buffers, each guarded by an event; on a CPU they are
    plain copies.
    """

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        if self._pinned:
            self._buffers = [torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
            self._copied = [torch.cuda.Event() for _ in range(RING)]
            self._turn = 0
            self._offset = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Holds a step's copies; waits first if those of the step RING steps ago are still under way.

        Their end is marked on the current stream, also after an error, so that no later step overtakes them.
        """
        if not self._pinned:
            yield
            return
        self._turn = (self._turn + 1) % RING
        self._offset = 0
        self._copied[self._turn].synchronize()
        try:
            yield
        finally:
            self._copied[self._turn].record()

    def copy(self, source: np.ndarray, target: torch.Tensor) -> None:
        """Copies `source` into `target`, a contiguous tensor of the same element count and dtype."""
        if not self._pinned:
            target.copy_(torch.tensor(source).view(target.shape))
            return
        nbytes = source.nbytes
        pinned = self._buffers[self._turn][self._offset : self._offset + nbytes]
        write_bytes(source, pinned)
        target.copy_(pinned.view(target.dtype).view(target.shape), non_blocking=True)
        self._offset += -(-nbytes // 16) * 16


def write_bytes(source: np.ndarray, buffer: torch.Tensor) -> None:
    """Writes the bytes of `source` into `buffer`, uint8 of as many, in host memory.

    By numpy, on this thread: torch copies more than 32,768 elements on a pool of threads, whose waking costs a step
    several milliseconds.
    """
    np.copyto(buffer.numpy(), np.ascontiguousarray(source).reshape(-1).view(np.uint8))
