"""What the decoder's operations allocate on a GPU beside their results: declared here, because shapes cannot tell.

An operation's CUDA implementation that allocates more than its results, or its results in another order, has its row
in `ALLOCATIONS`: arguments to the sequence of what it allocates, a result by its index, scratch by name and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replay_sim.capture.shape_recorder import Scratch

aten = torch.ops.aten
_ops = torch.ops.replay_sim

BOUNDARY_COLS = 128
FLOAT32_BYTES = INT32_BYTES = 4
POINTER_BYTES = 8
TMA_DESCRIPTOR_BYTES = 128
NUM_SMS = 132

CUBLAS_WORKSPACE = Scratch("cuBLAS workspace", 32 << 20, kept=True)
"""PyTorch's own, one a stream, of its default size for compute capability 9.0."""


def _product(*_: Any) -> tuple[int | Scratch, ...]:
    return 0, CUBLAS_WORKSPACE


def _boundary(x: Tensor, residual: Tensor, *_: Any) -> tuple[int | Scratch, ...]:
    """Sums over each block of columns: the mixes, the square of the collapsed input and that of the streams."""
    rows, streams, hidden = residual.shape
    sums = 2 * streams + streams * streams + 2
    return 0, 1, 2, 3, 4, Scratch("partial sums", rows * -(-hidden // BOUNDARY_COLS) * sums * FLOAT32_BYTES)


def _route(
    logits: Tensor, num_rows: Tensor, first_expert: int, num_local: int, top_k: int, scaling: float
) -> tuple[int | Scratch, ...]:
    """The expert of each pair, before they are sorted."""
    return Scratch("expert of each pair", logits.shape[0] * top_k * INT32_BYTES), 1, 0, 2, 3


def _grouped_matmul(xs: Tensor, w: Tensor, offs: Tensor) -> tuple[int | Scratch, ...]:
    """PyTorch's grouped product of bfloat16: pointers, strides and sizes of each group, then CUTLASS's descriptors.

    The descriptors are two of the inputs and three of the output for each multiprocessor.
    """
    groups, inner, width = w.shape
    if xs.dtype != torch.bfloat16 or inner % 8 or width % 8:
        return (0,)
    aligned = -(-groups // 2) * 2
    arguments = aligned * 3 * POINTER_BYTES + groups * 3 * INT32_BYTES + 3 * groups * POINTER_BYTES
    descriptors = 5 * TMA_DESCRIPTOR_BYTES * NUM_SMS
    return 0, Scratch("grouped product's arguments", arguments), Scratch("grouped product's workspace", descriptors)


ALLOCATIONS: dict[Any, Callable[..., tuple[int | Scratch, ...]]] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    _ops.boundary.default: _boundary,
    _ops.route.default: _route,
    _ops.grouped_matmul.default: _grouped_matmul,
}


def allocation_order(operation: Any, args: tuple) -> tuple[int | Scratch, ...] | None:
    """What `operation` allocates on a GPU for these arguments, in order; None for its results alone."""
    declared = ALLOCATIONS.get(operation)
    return declared(*args) if declared is not None else None
