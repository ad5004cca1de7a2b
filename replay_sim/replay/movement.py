"""Movement of rows: gather into static buffers, scatter back to the step's rows, an operation a tensor (B2, L6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from replay_sim.replay.row_tensors import RowTensors


def check_row_index(rows: torch.Tensor) -> None:
    """Raises ValueError unless `rows` is a one-dimensional int64 tensor (S2)."""
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows must be int64 of shape (r,), got {rows.dtype} of shape {tuple(rows.shape)}")


def gather_rows(rows: torch.Tensor, inputs: RowTensors) -> dict[str, torch.Tensor | None]:
    """New tensors with the given rows of every input; an absent input stays absent (L5).

    Raises ValueError for a row index that is not int64.
    """
    check_row_index(rows)
    return {name: None if value is None else value.index_select(0, rows) for name, value in inputs.items()}


def zero_rows(count: int, inputs: RowTensors) -> dict[str, torch.Tensor | None]:
    """New tensors like the inputs, of `count` rows of zeros: what runs where no row is kept (X2)."""
    return {
        name: None if value is None else value.new_zeros((count, *value.shape[1:])) for name, value in inputs.items()
    }


def gather_into(rows: torch.Tensor, inputs: RowTensors, buffers: Mapping[str, torch.Tensor], padded: int) -> None:
    """Fill rows [0, r) of every buffer with the inputs' `rows` and clear [r, padded) (B2).

    `buffers` hold at least `padded` rows; one whose input is absent is cleared as a whole. Raises ValueError for a row
    index that is not int64 or longer than `padded`.
    """
    check_row_index(rows)
    r = rows.shape[0]
    if r > padded:
        raise ValueError(f"{r} rows to gather into buffers of {padded} rows: dispatch takes a size that holds them")
    for name, buffer in buffers.items():
        value = inputs[name]
        if value is None:
            buffer[:padded].zero_()
            continue
        torch.index_select(value, 0, rows, out=buffer[:r])
        buffer[r:padded].zero_()


def scatter_into(rows: torch.Tensor, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Write output row i to row `rows[i]` of the target and zero everywhere else (L6)."""
    for output, target in zip(outputs, targets, strict=True):
        target.zero_()
        target.index_copy_(0, rows, output)
