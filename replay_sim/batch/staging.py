"""Host-to-device staging: a step's small arrays, written in pinned memory laid out as on the device, in few copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

RING = 2
ALIGNMENT = 256
"""Bytes; that of an allocation of its own, which kernels are compiled for."""

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
HostArrays = dict[str, np.ndarray]


class Staging:
    """Device tensors of fixed shapes in one block of memory, and twins of them on the host, zeroed when made.

    `fields` are shapes and dtypes by name, in the order of their addresses; `tensors` are those on the device. On a GPU
    the copies are asynchronous, from a ring of pinned blocks, each guarded by an event; on a CPU the twins are the
    tensors themselves.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._offsets[name] = size
            size += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._device = device
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._block, fields)
        self._pinned = device.type == "cuda"
        self._blocks = [self._block]
        self._turn = 0
        if self._pinned:
            self._blocks = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
            self._copied = [torch.cuda.Event() for _ in range(RING)]
        self._twins: list[HostArrays] = [
            {name: view.numpy() for name, view in self._views(block, fields).items()} for block in self._blocks
        ]

    def _views(self, block: torch.Tensor, fields: Fields) -> dict[str, torch.Tensor]:
        views = {}
        for name, (shape, dtype) in fields.items():
            begin = self._offsets[name]
            views[name] = block[begin : begin + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
        return views

    @contextmanager
    def step(self) -> Iterator[HostArrays]:
        """A step's twins, to be written and then copied; waits first for the copies of the step RING steps ago.

        Their end is marked on the current stream, also after an error, so that no later step overtakes them.
        """
        if not self._pinned:
            yield self._twins[0]
            return
        self._turn = (self._turn + 1) % RING
        self._copied[self._turn].synchronize()
        try:
            yield self._twins[self._turn]
        finally:
            self._copied[self._turn].record()

    def copy_each(self, names: Sequence[str], entries: int) -> None:
        """Copy the first `entries` of each field, neighbours of one shape and dtype, in one call."""
        twin = self._twins[self._turn][names[0]]
        self._copy(self._offsets[names[0]], entries * twin.strides[0], len(names), -(-twin.nbytes // ALIGNMENT))

    def copy_all(self, first: str, last: str, entries: int) -> None:
        """Copy all fields from `first` on until `entries` of `last`, in one call."""
        begin = self._offsets[first]
        width = self._offsets[last] - begin + entries * self._twins[self._turn][last].strides[0]
        self._copy(begin, width, 1, -(-width // ALIGNMENT))

    def _copy(self, begin: int, width: int, height: int, pitch: int) -> None:
        """Copy `height` lines of `width` bytes, `pitch` units of ALIGNMENT apart, by CUDA's own call.

        PyTorch has no asynchronous copy of several lines, and needs several times as long for one.
        """
        if not self._pinned or not width:
            return
        from cuda.bindings import runtime

        source, target = self._blocks[self._turn].data_ptr() + begin, self._block.data_ptr() + begin
        pitch *= ALIGNMENT
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        stream = torch.cuda.current_stream(self._device).cuda_stream
        (status,) = runtime.cudaMemcpy2DAsync(target, pitch, source, pitch, width, height, kind, stream)
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"a step's metadata could not be copied to {self._device}: {status}")
