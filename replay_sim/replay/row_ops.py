"""The operations that move rows, `torch.ops.replay_sim.*`: one launch each on a GPU, plain on a CPU (B2, L6)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from replay_sim.replay.row_tensors import RowTensors

ALIGNMENT = 16
"""Bytes; the kernels read rows in accesses of so many."""

_library = torch.library.Library("replay_sim", "FRAGMENT")
_library.define("store_addresses_(Tensor(a!) table, Tensor?[] inputs) -> ()")
_library.define("gather_rows_(Tensor(a!)[] buffers, Tensor addresses, Tensor rows, Tensor num_rows, int padded) -> ()")
_library.define(
    "scatter_rows_(Tensor(a!)[] targets, Tensor(b!) written, Tensor[] outputs, Tensor rows, Tensor num_rows,"
    " Tensor output_row_of) -> ()"
)
_ops = torch.ops.replay_sim


def check_inputs(inputs: RowTensors) -> None:
    """Raises ValueError naming an input whose rows kernels cannot read: not contiguous or not aligned to 16 bytes."""
    for name, value in inputs.items():
        if value is not None:
            _check_rows(name, value)


def store_addresses(table: torch.Tensor, inputs: RowTensors) -> None:
    """Write where each input's rows begin into `table` int64 (inputs,), 0 for an absent one.

    Captured in a model graph it costs its replays no time of the host, and every replay stores that graph's own
    addresses. Raises ValueError naming an input that is not contiguous or not aligned to 16 bytes, and for a table of
    another length or dtype.
    """
    _check_is("table", table, torch.int64, (len(inputs),))
    check_inputs(inputs)
    _ops.store_addresses_.default(table, list(inputs.values()))


def gather_by_address(
    buffers: Sequence[torch.Tensor], addresses: torch.Tensor, rows: torch.Tensor, num_rows: torch.Tensor, padded: int
) -> None:
    """Fill rows [0, num_rows) of every buffer with the input rows at `addresses`, and clear [num_rows, padded) (B2).

    `addresses` int64 (inputs,) from `store_addresses`, in the buffers' order; whose tensors must still be there.
    `rows` int64 (at least padded,) and `num_rows` int32 (1,) are read on the device, so that one captured call serves
    every batch. The buffer of an absent input is cleared. Raises ValueError for buffers shorter than `padded`, not
    contiguous or not aligned to 16 bytes, and addresses or an index of other shapes or dtypes.
    """
    _check_is("addresses", addresses, torch.int64, (len(buffers),))
    _check_is("rows", rows, torch.int64, rows.shape[:1])
    _check_is("num_rows", num_rows, torch.int32, (1,))
    for index, buffer in enumerate(buffers):
        _check_rows(f"buffer {index}", buffer)
    shortest = min((buffer.shape[0] for buffer in buffers), default=0)
    if padded > min(shortest, rows.shape[0]):
        raise ValueError(f"padded is {padded}: the buffers have {shortest} rows, the index {rows.shape[0]}")
    _ops.gather_rows_.default(list(buffers), addresses, rows, num_rows, padded)


def scatter_rows(
    targets: Sequence[torch.Tensor],
    written: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    output_row_of: torch.Tensor,
) -> None:
    """Put output row i < num_rows at row `rows[i]` of every target, zero elsewhere (L6), touching no other row.

    `written` uint8 (targets, target rows) says which rows may hold something; only these are cleared, so that the bytes
    moved follow the kept rows. `rows` int64 (at least output rows,) and `num_rows` int32 (1,) are read on the device,
    as is `output_row_of` int32 (at least target rows,), the inverse of `rows`, -1 for a row without an output. Raises
    ValueError for outputs and targets of other shapes or dtypes, of different numbers of rows, not contiguous or not
    aligned to 16 bytes, and flags, an index or a map of other shapes or dtypes.
    """
    if len(outputs) != len(targets) or not targets:
        raise ValueError(f"{len(outputs)} outputs for {len(targets)} targets: one for each, at least one")
    _check_is("rows", rows, torch.int64, rows.shape[:1])
    _check_is("num_rows", num_rows, torch.int32, (1,))
    _check_is("output_row_of", output_row_of, torch.int32, output_row_of.shape[:1])
    _check_is("written", written, torch.uint8, (len(targets), targets[0].shape[0]))
    for index, (target, output) in enumerate(zip(targets, outputs, strict=True)):
        if (target.shape[1:], target.dtype) != (output.shape[1:], output.dtype):
            raise ValueError(
                f"output {index} is {output.dtype} of shape {tuple(output.shape)}: its target takes {target.dtype} "
                f"rows of shape {tuple(target.shape[1:])}"
            )
        for kind, value, first in (("target", target, targets[0]), ("output", output, outputs[0])):
            _check_rows(f"{kind} {index}", value)
            if value.shape[0] != first.shape[0]:
                raise ValueError(f"{kind} {index} has {value.shape[0]} rows, {kind} 0 has {first.shape[0]}")
    if output_row_of.shape[0] < targets[0].shape[0]:
        raise ValueError(f"output_row_of has {output_row_of.shape[0]} rows, the targets {targets[0].shape[0]}")
    if rows.shape[0] < outputs[0].shape[0]:
        raise ValueError(f"rows has {rows.shape[0]} entries for outputs of {outputs[0].shape[0]} rows")
    _ops.scatter_rows_.default(list(targets), written, list(outputs), rows, num_rows, output_row_of)


def _check_is(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The kernels read what they are given as contiguous, of this dtype and shape (G8 of the known faults)."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: it must be "
            f"contiguous {dtype} of shape {tuple(shape)}"
        )


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """The kernels read and write rows as contiguous memory in words of ALIGNMENT bytes."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: its rows must be contiguous memory")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} lies at {tensor.data_ptr():#x}: its rows are read in {ALIGNMENT} aligned bytes")


def _store_addresses_plainly(table: torch.Tensor, inputs: Sequence[torch.Tensor | None]) -> None:
    table.copy_(torch.tensor([0 if value is None else value.data_ptr() for value in inputs]))


def _gather_plainly(
    buffers: Sequence[torch.Tensor], addresses: torch.Tensor, rows: torch.Tensor, num_rows: torch.Tensor, padded: int
) -> None:
    r = int(num_rows)
    index = rows[:r]
    for buffer, address in zip(buffers, addresses.tolist(), strict=True):
        buffer[:padded].zero_()
        if address and r:
            shape = (int(index.max()) + 1, *buffer.shape[1:])
            torch.index_select(_rows_at(address, shape, buffer.dtype), 0, index, out=buffer[:r])


def _rows_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The host memory at `address` as a tensor that owns nothing."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype).view(shape)


def _scatter_plainly(
    targets: Sequence[torch.Tensor],
    written: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    output_row_of: torch.Tensor,
) -> None:
    """What is interrupted leaves no row that holds something without its flag: the next scatter clears it."""
    max_rows = targets[0].shape[0]
    kept = output_row_of[:max_rows] >= 0
    stale = written.bool() & ~kept
    written |= kept
    index = rows[: int(num_rows)]
    fits = index < max_rows
    for cleared, target, output in zip(stale, targets, outputs, strict=True):
        target[cleared] = 0
        target[index[fits]] = output[: index.shape[0]][fits]
    written.copy_(kept.expand_as(written))


def _writes_in_place(*_: object) -> None:
    """The shape rule of all three: they return nothing."""


for _name, _plain in (
    ("store_addresses_", _store_addresses_plainly),
    ("gather_rows_", _gather_plainly),
    ("scatter_rows_", _scatter_plainly),
):
    _library.impl(_name, _plain, "CPU")
    _library.impl(_name, _writes_in_place, "Meta")
if torch.cuda.is_available():
    from replay_sim.replay import row_kernels

    for _name in ("store_addresses_", "gather_rows_", "scatter_rows_"):
        _library.impl(_name, getattr(row_kernels, _name), "CUDA")
