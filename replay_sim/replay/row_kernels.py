"""The Triton kernels that move rows: all inputs gathered in one launch, all outputs scattered in one pass (B2, L6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from replay_sim.replay.row_layout import RowLayout, next_power_of_two

CLEARED_ROWS = 4
"""Rows of one program that clears, far apart, so that neighbouring rows are cleared by programs side by side."""
CLEARED_WORDS = 1024
"""Columns that it clears at a time."""
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
    TILES: tl.constexpr,
):
    """Each program moves one tile of one input: rows below num_rows are copied, those from there to padded cleared.

    The programs of input i follow those of the inputs before it. An input at address 0 is absent: all is cleared.
    """
    program = tl.program_id(0)
    real = tl.load(num_rows)
    for i in tl.static_range(COUNT):
        programs = tl.cdiv(padded, ROWS[i]) * TILES[i]
        if (program >= 0) & (program < programs):
            address = tl.load(addresses + i)
            at = (program // TILES[i]) * ROWS[i] + tl.arange(0, ROWS[i])
            row = tl.load(rows + at, mask=at < padded, other=0)  # a pad's is -1, and not read from
            column = (program % TILES[i]) * COLUMNS[i] + tl.arange(0, COLUMNS[i])
            inside = (column < WORDS[i])[None, :]
            read = ((at < real) & (address != 0))[:, None] & inside
            source = as_words(address, BYTES[i]) + row[:, None] * WORDS[i] + column[None, :]
            target = as_words(buffers[i].to(tl.int64), BYTES[i]) + at.to(tl.int64)[:, None] * WORDS[i] + column[None, :]
            tl.store(target, tl.load(source, mask=read, other=0), mask=(at < padded)[:, None] & inside)
        program -= programs


@triton.jit
def clear_rows(target, row, stale, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in the rows that are stale."""
    for start in range(0, WORDS, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = target + row.to(tl.int64)[:, None] * WORDS + column[None, :]
        tl.store(at, 0, mask=stale[:, None] & (column < WORDS)[None, :])


@triton.jit(do_not_specialize=["max_rows", "padded"])
def scatter_rows_kernel(
    targets,
    outputs,
    rows,
    num_rows,
    output_row_of,
    written,
    max_rows,
    padded,
    COUNT: tl.constexpr,
    BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    CLEARED_ROWS: tl.constexpr,
    CLEARED_COLUMNS: tl.constexpr,
):
    """The first programs clear what an earlier step wrote and this one does not; each later one copies one tile.

    Program p of those that clear target i looks at rows p, p + programs, p + 2 programs, ..., and ends after two loads
    where none is stale: one whose flag says that it holds something, and that has no place in the outputs. A row with a
    place is written by the programs that copy alone, as is its flag, so that no two programs write the same.
    """
    program = tl.program_id(0)
    clearing = tl.cdiv(max_rows, CLEARED_ROWS)
    if program < clearing * COUNT:
        row = program % clearing + tl.arange(0, CLEARED_ROWS) * clearing
        inside = row < max_rows
        flag = written + (program // clearing) * max_rows + row
        holds = tl.load(flag, mask=inside, other=0) != 0
        stale = holds & (tl.load(output_row_of + row, mask=inside, other=0) < 0)
        if tl.max(stale.to(tl.int32), axis=0) > 0:
            for i in tl.static_range(COUNT):
                if program // clearing == i:
                    clear_rows(as_words(targets[i].to(tl.int64), BYTES[i]), row, stale, WORDS[i], CLEARED_COLUMNS[i])
            tl.debug_barrier()  # each warp reads the flags for itself: none may store them before all have
            tl.store(flag, 0, mask=stale)
    else:
        program -= clearing * COUNT
        real = tl.load(num_rows)
        for i in tl.static_range(COUNT):
            programs = tl.cdiv(padded, ROWS[i]) * TILES[i]
            if (program >= 0) & (program < programs):
                at = (program // TILES[i]) * ROWS[i] + tl.arange(0, ROWS[i])
                row = tl.load(rows + at, mask=at < padded, other=0)
                moves = (at < real) & (row < max_rows)
                column = (program % TILES[i]) * COLUMNS[i] + tl.arange(0, COLUMNS[i])
                inside = (column < WORDS[i])[None, :]
                source = as_words(outputs[i].to(tl.int64), BYTES[i]) + at.to(tl.int64)[:, None] * WORDS[i]
                words = tl.load(source + column[None, :], mask=(at < padded)[:, None] & inside, other=0)
                target = as_words(targets[i].to(tl.int64), BYTES[i]) + row[:, None] * WORDS[i] + column[None, :]
                tl.store(target, words, mask=moves[:, None] & inside)
                if program % TILES[i] == 0:
                    tl.store(written + i * max_rows + row, 1, mask=moves)
            program -= programs


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
    gather_rows_kernel[(sum(layout.programs(padded) for layout in layouts),)](
        tuple(buffers), addresses, rows, num_rows, padded, **_tiles(layouts), num_warps=NUM_WARPS
    )


def scatter_rows_(
    targets: Sequence[torch.Tensor],
    written: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    output_row_of: torch.Tensor,
) -> None:
    """Put output row i < num_rows at row `rows[i]` of the targets, and clear rows that an earlier step wrote (L6).

    `targets` and `outputs` are contiguous, of the same row shapes; `written` uint8 (targets, target rows) are the flags
    of BreakBuffers, `rows` int64 (at least output rows,), `num_rows` int32 (1,), `output_row_of` int32 (at least target
    rows,) the inverse of `rows`, -1 for a row that was trimmed. One launch, whose grid depends on the sizes alone.
    """
    layouts = _layouts(targets)
    max_rows, padded = targets[0].shape[0], outputs[0].shape[0]
    clearing = triton.cdiv(max_rows, CLEARED_ROWS) * len(layouts)
    scatter_rows_kernel[(clearing + sum(layout.programs(padded) for layout in layouts),)](
        tuple(targets),
        tuple(outputs),
        rows,
        num_rows,
        output_row_of,
        written,
        max_rows,
        padded,
        **_tiles(layouts),
        CLEARED_ROWS=CLEARED_ROWS,
        CLEARED_COLUMNS=tuple(min(next_power_of_two(layout.words), CLEARED_WORDS) for layout in layouts),
        num_warps=NUM_WARPS,
    )


def _tiles(layouts: Sequence[RowLayout]) -> dict[str, int | tuple[int, ...]]:
    """What both kernels are compiled for."""
    return {
        "COUNT": len(layouts),
        "BYTES": tuple(layout.word_bytes for layout in layouts),
        "WORDS": tuple(layout.words for layout in layouts),
        "ROWS": tuple(layout.rows for layout in layouts),
        "COLUMNS": tuple(layout.columns for layout in layouts),
        "TILES": tuple(layout.tiles for layout in layouts),
    }
