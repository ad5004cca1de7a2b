"""The Triton kernels that move rows: all inputs gathered in one launch, all outputs scattered in one pass (B2, L6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from replay_sim.replay.row_layout import RowLayout, next_power_of_two

SCATTER_ROWS = 16
"""Rows of one scatter program, far apart, so that neighbouring kept rows go to programs that run side by side."""
NUM_WARPS = 4


@triton.jit
def as_words(address, BYTES: tl.constexpr):
    """A pointer to words of BYTES bytes at an address, which is a multiple of 16."""
    if BYTES == 8:
        words = address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        words = address.to(tl.pointer_type(tl.int32))
    else:
        words = address.to(tl.pointer_type(tl.int16))
    return tl.multiple_of(words, 16)


@triton.jit
def store_addresses_kernel(table, addresses, COUNT: tl.constexpr):
    """One program writes COUNT addresses, which a capture keeps as they are at the launch."""
    for i in tl.static_range(COUNT):
        tl.store(table + i, addresses[i].to(tl.int64))


@triton.jit(do_not_specialize=["padded"])
def gather_rows_kernel(
    buffers,
    addresses,
    rows,
    num_rows,
    padded,
    COUNT: tl.constexpr,
    BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Each program moves one tile of one input: rows below num_rows are copied, those from there to padded cleared.

    The programs of input i follow those of the inputs before it. An input at address 0 is absent: all is cleared.
    """
    program = tl.program_id(0)
    real = tl.load(num_rows)
    for i in tl.static_range(COUNT):
        blocks = tl.cdiv(padded, ROWS[i])
        if (program >= 0) & (program < blocks * CHUNKS[i]):
            address = tl.load(addresses + i)
            at = (program // CHUNKS[i]) * ROWS[i] + tl.arange(0, ROWS[i])
            row = tl.load(rows + at, mask=at < real, other=0)
            column = (program % CHUNKS[i]) * COLUMNS[i] + tl.arange(0, COLUMNS[i])
            inside = (column < WORDS[i])[None, :]
            read = ((at < real) & (address != 0))[:, None] & inside
            source = as_words(address, BYTES[i]) + row[:, None] * WORDS[i] + column[None, :]
            target = as_words(buffers[i].to(tl.int64), BYTES[i]) + at.to(tl.int64)[:, None] * WORDS[i] + column[None, :]
            tl.store(target, tl.load(source, mask=read, other=0), mask=(at < padded)[:, None] & inside)
        program -= blocks * CHUNKS[i]


@triton.jit
def move_tile(target, output, row, place, begin, end, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows narrow enough to be moved at once: copied where place >= 0, cleared where it is -1."""
    column = begin + tl.arange(0, COLUMNS)
    inside = (column < end)[None, :]
    source = output + tl.maximum(place, 0).to(tl.int64)[:, None] * WORDS + column[None, :]
    words = tl.load(source, mask=(place >= 0)[:, None] & inside, other=0)
    tl.store(target + row.to(tl.int64)[:, None] * WORDS + column[None, :], words, mask=(place >= -1)[:, None] & inside)


@triton.jit
def move_rows(
    target, output, first, stride, place, begin, end, WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Wide rows one after the other; `place` is read from registers, as the flags may be stored meanwhile."""
    lane = tl.arange(0, ROWS)
    column = begin + tl.arange(0, COLUMNS)
    inside = column < end
    for i in range(ROWS):
        source = tl.sum(tl.where(lane == i, place, 0), axis=0)
        if source >= -1:
            from_row = output + tl.maximum(source, 0).to(tl.int64) * WORDS
            words = tl.load(from_row + column, mask=inside & (source >= 0), other=0)
            to_row = target + (first + i * stride).to(tl.int64) * WORDS
            tl.store(to_row + column, words, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def scatter_rows_kernel(
    targets,
    outputs,
    output_row_of,
    written,
    num_rows,
    COUNT: tl.constexpr,
    BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    FIRST_CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (p, c) moves column chunk c of rows p, p + programs, p + 2 programs, ...

    A row with a place in the outputs is copied; one without is cleared if its flag says that it holds something.
    Nothing but these programs writes a row's chunk and its flag, so flag 0 means that the chunk is zero. Most programs
    of a step find nothing to do and end after two loads.
    """
    first = tl.program_id(0)
    chunk = tl.program_id(1)
    stride = tl.num_programs(0)
    row = first + tl.arange(0, ROWS) * stride
    inside = row < num_rows
    source = tl.load(output_row_of + row, mask=inside, other=-1)
    flag = written + chunk * num_rows + row
    holds = tl.load(flag, mask=inside, other=0) != 0
    kept = source >= 0
    place = tl.where(kept, source, tl.where(holds, -1, -2))
    if tl.max(place, axis=0) >= -1:
        for i in tl.static_range(COUNT):
            if (chunk >= FIRST_CHUNK[i]) & (chunk < FIRST_CHUNK[i] + CHUNKS[i]):
                target = as_words(targets[i].to(tl.int64), BYTES[i])
                output = as_words(outputs[i].to(tl.int64), BYTES[i])
                begin = (chunk - FIRST_CHUNK[i]) * CHUNK_WORDS[i]
                end = tl.minimum(begin + CHUNK_WORDS[i], WORDS[i])
                if COLUMNS[i] * ROWS <= 2048:
                    move_tile(target, output, row, place, begin, end, WORDS[i], COLUMNS[i])
                else:
                    move_rows(target, output, first, stride, place, begin, end, WORDS[i], COLUMNS[i], ROWS)
        tl.debug_barrier()  # each warp reads the flags for itself: none may store them before all have
        tl.store(flag, kept.to(tl.uint8), mask=inside & (kept != holds))


def _layouts(tensors: Sequence[torch.Tensor]) -> list[RowLayout]:
    return [RowLayout.of(tensor.stride(0) * tensor.element_size()) for tensor in tensors]


def store_addresses_(table: torch.Tensor, inputs: Sequence[torch.Tensor | None]) -> None:
    """Write the inputs' device addresses into `table` int64 (inputs,), 0 for one that is absent; one launch."""
    addresses = tuple(0 if value is None else value.data_ptr() for value in inputs)
    store_addresses_kernel[(1,)](table, addresses, COUNT=len(addresses), num_warps=1)


def gather_rows_(
    buffers: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    padded: int,
) -> None:
    """Fill rows [0, num_rows) of every buffer with the rows at its input's address and clear [num_rows, padded).

    `buffers` are contiguous, `addresses` int64 (inputs,), `rows` int64 (at least padded,), `num_rows` int32 (1,) on
    the device. One launch, whose grid depends on `padded` alone (B2).
    """
    layouts = _layouts(buffers)
    programs = sum(-(-padded // layout.gather_rows) * layout.gather_chunks for layout in layouts)
    gather_rows_kernel[(programs,)](
        tuple(buffers),
        addresses,
        rows,
        num_rows,
        padded,
        COUNT=len(layouts),
        BYTES=tuple(layout.word_bytes for layout in layouts),
        WORDS=tuple(layout.words for layout in layouts),
        ROWS=tuple(layout.gather_rows for layout in layouts),
        COLUMNS=tuple(layout.gather_columns for layout in layouts),
        CHUNKS=tuple(layout.gather_chunks for layout in layouts),
        num_warps=NUM_WARPS,
    )


def scatter_rows_(
    targets: Sequence[torch.Tensor],
    written: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    output_row_of: torch.Tensor,
) -> None:
    """Put output row `output_row_of[t]` at row t of the targets, and clear rows that an earlier step wrote (L6).

    `targets` and `outputs` are contiguous, of the same row shapes; `written` uint8 (chunks, target rows) are the flags
    of BreakBuffers, `output_row_of` int32 (at least target rows,) with -1 for a row that was trimmed. One launch.
    """
    layouts = _layouts(targets)
    chunks = [layout.chunks for layout in layouts]
    num_rows = targets[0].shape[0]
    scatter_rows_kernel[(triton.cdiv(num_rows, SCATTER_ROWS), sum(chunks))](
        tuple(targets),
        tuple(outputs),
        output_row_of,
        written,
        num_rows,
        COUNT=len(layouts),
        BYTES=tuple(layout.word_bytes for layout in layouts),
        WORDS=tuple(layout.words for layout in layouts),
        FIRST_CHUNK=tuple(sum(chunks[:index]) for index in range(len(chunks))),
        CHUNKS=tuple(chunks),
        CHUNK_WORDS=tuple(layout.chunk_words for layout in layouts),
        COLUMNS=tuple(next_power_of_two(layout.chunk_words) for layout in layouts),
        ROWS=SCATTER_ROWS,
        num_warps=NUM_WARPS,
    )
