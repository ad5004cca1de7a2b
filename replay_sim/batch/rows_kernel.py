"""The replay batch's metadata and index map made on the device in one launch (S9)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def kept_length(query_start_loc, keeps_all, request, mask, window):
    """Kept rows of requests: all, or at most the last `window` (S1); 0 where masked off."""
    begin = tl.load(query_start_loc + request, mask=mask, other=0)
    length = tl.load(query_start_loc + request + 1, mask=mask, other=0) - begin
    keeps = tl.load(keeps_all + request, mask=mask, other=0) != 0
    return tl.where(keeps, length, tl.minimum(length, window))


@triton.jit
def rows_before(query_start_loc, keeps_all, end, window, BLOCK: tl.constexpr):
    """The kept rows of the first `end` requests."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, end, BLOCK):
        request = start + tl.arange(0, BLOCK)
        total += kept_length(query_start_loc, keeps_all, request, request < end, window)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_reqs", "max_num_seqs", "window", "padded", "max_tokens"])
def replay_metadata_kernel(
    query_start_loc,
    computed,
    window_start,
    keeps_all,
    slot_mapping,
    rows,
    positions,
    slots,
    request_of_row,
    window_start_first,
    window_start_rest,
    output_row_of,
    replay_query_start_loc,
    num_rows,
    num_reqs,
    max_num_seqs,
    window,
    padded,
    max_tokens,
    BLOCK: tl.constexpr,
):
    """Program r < num_reqs writes request r's kept rows and where each of its rows lands in the outputs.

    Each later one clears the pads among BLOCK rows, and the map of as many rows beyond the batch's tokens.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first_row = rows_before(query_start_loc, keeps_all, tl.minimum(program, num_reqs), window, BLOCK)
    if program < num_reqs:
        begin = tl.load(query_start_loc + program)
        length = tl.load(query_start_loc + program + 1) - begin
        kept = kept_length(query_start_loc, keeps_all, program, True, window)
        done = tl.load(computed + program)
        start = tl.load(window_start + program)
        trimmed_start = tl.where(kept < length, tl.maximum(start, done + length - window), start)
        tl.store(replay_query_start_loc + program, first_row)
        for block in range(0, kept, BLOCK):
            at = first_row + block + lane
            mask = (block + lane < kept) & (at < padded)
            offset = length - kept + block + lane
            source = (begin + offset).to(tl.int64)
            position = done + offset
            lowest = position - window + 1
            tl.store(rows + at, source, mask=mask)
            tl.store(positions + at, position, mask=mask)
            tl.store(slots + at, tl.load(slot_mapping + source, mask=mask, other=-1), mask=mask)
            tl.store(request_of_row + at, tl.zeros([BLOCK], tl.int32) + program, mask=mask)
            tl.store(window_start_first + at, tl.maximum(start, lowest), mask=mask)
            tl.store(window_start_rest + at, tl.maximum(trimmed_start, lowest), mask=mask)
        for block in range(0, length, BLOCK):
            offset = block + lane
            lands = first_row + offset - (length - kept)
            lands = tl.where((offset >= length - kept) & (lands < padded), lands, -1)
            inside = (offset < length) & (begin + offset < max_tokens)
            tl.store(output_row_of + begin + offset, lands, mask=inside)
    else:
        if program == num_reqs:
            tl.store(num_rows, first_row)
            for start in range(num_reqs, max_num_seqs + 1, BLOCK):
                ends = tl.zeros([BLOCK], tl.int32) + first_row
                tl.store(replay_query_start_loc + start + lane, ends, mask=start + lane <= max_num_seqs)
        at = (program - num_reqs) * BLOCK + lane
        mask = (at >= first_row) & (at < padded)
        nothing = tl.zeros([BLOCK], tl.int64)
        tl.store(rows + at, nothing - 1, mask=mask)
        tl.store(positions + at, nothing, mask=mask)
        tl.store(slots + at, nothing - 1, mask=mask)
        tl.store(request_of_row + at, tl.full([BLOCK], -1, tl.int32), mask=mask)
        tl.store(window_start_first + at, nothing, mask=mask)
        tl.store(window_start_rest + at, nothing, mask=mask)
        row = (program - num_reqs) * BLOCK + lane
        beyond = (row >= tl.load(query_start_loc + num_reqs)) & (row < max_tokens)
        tl.store(output_row_of + row, tl.full([BLOCK], -1, tl.int32), mask=beyond)


def replay_metadata_(
    query_start_loc: Tensor, computed: Tensor, window_start: Tensor, keeps_all: Tensor, slot_mapping: Tensor,
    rows: Tensor, positions: Tensor, slots: Tensor, request_of_row: Tensor, window_start_first: Tensor,
    window_start_rest: Tensor, output_row_of: Tensor, replay_query_start_loc: Tensor, num_rows: Tensor,
    num_reqs: int, window: int, padded: int,
) -> None:  # fmt: skip
    """The operation of metadata_op on a GPU: one launch, whose grid depends on num_reqs, padded and the map alone."""
    max_tokens = output_row_of.shape[0]
    blocks = triton.cdiv(max(padded, max_tokens, 1), _BLOCK)
    replay_metadata_kernel[(num_reqs + blocks,)](
        query_start_loc, computed, window_start, keeps_all, slot_mapping, rows, positions, slots, request_of_row,
        window_start_first, window_start_rest, output_row_of, replay_query_start_loc, num_rows, num_reqs,
        replay_query_start_loc.shape[0] - 1, window, padded, max_tokens, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
