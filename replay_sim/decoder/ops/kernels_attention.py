"""The Triton kernel of attention over a row's own window and its entries of the shared KV."""

import triton
import triton.language as tl


@triton.jit
def key_position(index, num_window, first, stride, remainder, TOPK: tl.constexpr):
    """The position of a row's key `index`: window keys from `first` on, then shared key i at floor(i · (p + 1) / n).

    n = min(TOPK, p + 1). With p + 1 = stride · TOPK + remainder, or stride 1 and remainder 0 where n = p + 1, the
    divisor is a constant and no product leaves int32.
    """
    position = first + index
    if TOPK > 0:
        i = index - num_window
        position = tl.where(i < 0, position, i * stride + (i * remainder) // TOPK)
    return position


@triton.jit(do_not_specialize=["max_blocks", "scale_log2"])
def attend_kernel(
    out,
    q,
    window_cache,
    shared_cache,
    positions,
    request_of_row,
    window_start,
    block_table,
    max_blocks,
    scale_log2,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOPK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One row, all its heads: online softmax in float32 over blocks of KEYS keys in the row's own order.

    Scores are (keys, heads) and the result (dim, heads), so that a block of keys, read once, is the left operand of
    both products. `scale_log2` is the score scale times log2(e). TOPK 0: no shared cache. A row of request -1 writes
    nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_of_row + row)
    if request < 0:
        return
    position = tl.load(positions + row)
    num_window = tl.minimum(tl.maximum(position - tl.load(window_start + row) + 1, 0), WINDOW).to(tl.int32)
    end = position.to(tl.int32) + 1
    num_shared = tl.minimum(end, TOPK)
    stride = 1
    remainder = 0
    if TOPK > 0:
        stride = tl.where(end > TOPK, end // TOPK, 1)
        remainder = tl.where(end > TOPK, end % TOPK, 0)
    table = block_table + request.to(tl.int64) * max_blocks

    head = tl.arange(0, HEADS_PAD)
    dim = tl.arange(0, DIM_PAD)
    key = tl.arange(0, KEYS)
    row_mask = (dim < DIM)[:, None] & (head < HEADS)[None, :]
    row_at = (row * HEADS + head)[None, :] * DIM + dim[:, None]
    query = tl.load(q + row_at, mask=row_mask, other=0.0)
    highest = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    norm = tl.zeros([HEADS_PAD], tl.float32)
    total = tl.zeros([DIM_PAD, HEADS_PAD], tl.float32)
    num_keys = num_window + num_shared
    for start in range(0, num_keys, KEYS):
        index = start + key
        valid = index < num_keys
        at = key_position(index, num_window, end - num_window, stride, remainder, TOPK)
        block = tl.load(table + at // BLOCK_SIZE, mask=valid, other=0)
        slot = block * BLOCK_SIZE + at % BLOCK_SIZE
        cache = tl.where(index < num_window, window_cache, shared_cache)
        keys_at = (cache + slot.to(tl.int64) * DIM)[:, None] + dim[None, :]
        keys = tl.load(keys_at, mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
        scores = tl.dot(keys, query, input_precision="ieee") * scale_log2
        scores = tl.where(valid[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[None, :])
        norm = norm * shrink + tl.sum(weights, axis=0)
        total = total * shrink[None, :]
        total = tl.dot(tl.trans(keys), weights.to(keys.dtype), total, input_precision="ieee")
        highest = new_highest
    tl.store(out + row_at, (total / norm[None, :]).to(out.dtype.element_ty), mask=row_mask)
