"""The Triton kernels of a boundary between sublayers: merge, collapse and mix, whole or one at a time."""

import triton
import triton.language as tl


@triton.jit
def load_streams(residual, row, cols, mask, H: tl.constexpr, HC: tl.constexpr):
    """The HC streams of a tile of rows and columns, each (rows, cols), as a tuple."""
    streams = ()
    for j in tl.static_range(HC):
        stream = tl.load(residual + (row * HC + j)[:, None] * H + cols[None, :], mask=mask, other=0.0)
        streams = streams + (stream,)  # type: ignore[assignment]
    return streams


@triton.jit
def merge_stream(streams, x, post, res, row, live, i: tl.constexpr, HC: tl.constexpr):
    """Stream i of the merge, res[i] · streams + post[i] · x, float32 (rows, cols)."""
    merged = tl.load(post + row * HC + i, mask=live, other=0.0)[:, None] * x
    for j in tl.static_range(HC):
        merged += tl.load(res + (row * HC + i) * HC + j, mask=live, other=0.0)[:, None] * streams[j].to(tl.float32)
    return merged


@triton.jit
def mix_product(total, weight, stream):
    """total + (stream @ weight)ᵀ; a bfloat16 stream meets the float32 weight as the sum of two bfloat16 parts."""
    weight = tl.trans(weight)
    stream = tl.trans(stream)
    if stream.dtype == tl.float32:
        total = tl.dot(weight, stream, total, input_precision="ieee")
    else:
        high = weight.to(stream.dtype)
        low = (weight - high.to(tl.float32)).to(stream.dtype)
        total = tl.dot(low, stream, tl.dot(high, stream, total))
    return total


@triton.jit(do_not_specialize=["num_rows"])
def boundary_split_kernel(
    x,
    residual,
    pre,
    post,
    res,
    mix_weight,
    residual_out,
    collapsed,
    partial,
    num_rows,
    H: tl.constexpr,
    HC: tl.constexpr,
    MIXES: tl.constexpr,
    MIXES_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge and collapse COLS columns of ROWS rows, and store what they add to the row's sums.

    `collapsed` (T, h) gets the streams' weighted sum before its norm. `partial` (T, splits, MIXES + 2) float32 gets the
    split's share of flat R' @ mix_weight, then the squares of the collapsed row and of flat R'.
    """
    row_index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row_index < num_rows
    row = row_index.to(tl.int64)
    split = tl.program_id(1)
    mix = tl.arange(0, MIXES_PAD)
    total = tl.zeros([MIXES_PAD, ROWS], tl.float32)
    collapsed_squares = tl.zeros([ROWS, BLOCK], tl.float32)
    flat_squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, COLS, BLOCK):
        cols = split * COLS + start + tl.arange(0, BLOCK)
        mask = live[:, None] & (cols < H)[None, :]
        weight_mask = (cols < H)[:, None] & (mix < MIXES)[None, :]
        streams = load_streams(residual, row, cols, mask, H, HC)
        x_tile = tl.load(x + row[:, None] * H + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(HC):
            merged = merge_stream(streams, x_tile, post, res, row, live, i, HC)
            stored = merged.to(residual_out.dtype.element_ty)
            tl.store(residual_out + (row * HC + i)[:, None] * H + cols[None, :], stored, mask=mask)
            merged = stored.to(tl.float32)
            value += tl.load(pre + row * HC + i, mask=live, other=0.0)[:, None] * merged
            flat_squares += merged * merged
            weight_at = mix_weight + (i * H + cols)[:, None] * MIXES + mix[None, :]
            total = mix_product(total, tl.load(weight_at, mask=weight_mask, other=0.0), stored)
        collapsed_squares += value * value
        tl.store(collapsed + row[:, None] * H + cols[None, :], value.to(collapsed.dtype.element_ty), mask=mask)
    total += tl.where((mix == MIXES)[:, None], tl.sum(collapsed_squares, axis=1)[None, :], 0.0)
    total += tl.where((mix == MIXES + 1)[:, None], tl.sum(flat_squares, axis=1)[None, :], 0.0)
    at = (row * tl.num_programs(1) + split)[None, :] * (MIXES + 2) + mix[:, None]
    tl.store(partial + at, total, mask=live[None, :] & (mix < MIXES + 2)[:, None])


@triton.jit
def sum_splits(partial, cols, MIXES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """The sums over one row's splits of columns `cols` of its partials, in one fixed order."""
    split = tl.arange(0, SPLITS_PAD)
    at = partial + split[:, None] * (MIXES + 2) + cols[None, :]
    return tl.sum(tl.load(at, mask=(split < SPLITS)[:, None], other=0.0), axis=0)


@triton.jit
def norm_rows_in_place(values, weight, row, rstd, H: tl.constexpr, BLOCK: tl.constexpr):
    """values[row] ← values[row] · rstd · weight."""
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < H
        value = tl.load(values + row * H + cols, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(values + row * H + cols, (value * rstd * scale).to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sinkhorn_iters", "rms_eps", "hc_eps", "alpha"])
def boundary_finish_kernel(
    partial,
    norm_weight,
    mix_scale,
    mix_bias,
    u,
    pre_out,
    post_out,
    res_out,
    sinkhorn_iters,
    rms_eps,
    hc_eps,
    alpha,
    H: tl.constexpr,
    HC: tl.constexpr,
    HC_PAD: tl.constexpr,
    MIXES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its mixes from the sums over the splits, and the norm of its collapsed values, in place in `u`."""
    row = tl.program_id(0).to(tl.int64)
    partial += row * SPLITS * (MIXES + 2)
    squares = sum_splits(partial, MIXES + tl.arange(0, 2), MIXES, SPLITS, SPLITS_PAD)
    second = tl.arange(0, 2) == 1
    collapsed_mean = tl.sum(tl.where(second, 0.0, squares), axis=0) / H
    flat_mean = tl.sum(tl.where(second, squares, 0.0), axis=0) / (HC * H)
    norm_rows_in_place(u, norm_weight, row, 1.0 / tl.sqrt(collapsed_mean + rms_eps), H, BLOCK)

    flat_rstd = 1.0 / tl.sqrt(flat_mean + rms_eps)
    stream = tl.arange(0, HC_PAD)
    live = stream < HC
    pre = sum_splits(partial, stream, MIXES, SPLITS, SPLITS_PAD) * flat_rstd
    pre = pre * tl.load(mix_scale) + tl.load(mix_bias + stream, mask=live, other=0.0)
    tl.store(pre_out + row * HC + stream, tl.sigmoid(pre) + hc_eps, mask=live)
    post = sum_splits(partial, HC + stream, MIXES, SPLITS, SPLITS_PAD) * flat_rstd
    post = post * tl.load(mix_scale + 1) + tl.load(mix_bias + HC + stream, mask=live, other=0.0)
    tl.store(post_out + row * HC + stream, tl.sigmoid(post) * alpha, mask=live)
    pair = tl.arange(0, HC_PAD * HC_PAD)
    to, of = pair // HC_PAD, pair % HC_PAD
    live_pair = (to < HC) & (of < HC)
    pair = tl.where(live_pair, to * HC + of, 0)
    res = sum_splits(partial, 2 * HC + pair, MIXES, SPLITS, SPLITS_PAD) * flat_rstd
    res = tl.exp(res * tl.load(mix_scale + 2) + tl.load(mix_bias + 2 * HC + pair))
    res = tl.where(live_pair, res, 0.0).reshape(HC_PAD, HC_PAD)
    for _ in range(sinkhorn_iters):
        res = res / tl.where(live, tl.sum(res, axis=1), 1.0)[:, None]
        res = res / tl.where(live, tl.sum(res, axis=0), 1.0)[None, :]
    at = res_out + row * HC * HC + stream[:, None] * HC + stream[None, :]
    tl.store(at, res, mask=live[:, None] & live[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    x,
    residual,
    post,
    res,
    out,
    num_rows,
    H: tl.constexpr,
    HC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The merge alone: out ← res · residual + post ⊗ x, a tile of ROWS rows by COLS columns."""
    row_index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row_index < num_rows
    row = row_index.to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = live[:, None] & (cols < H)[None, :]
    streams = load_streams(residual, row, cols, mask, H, HC)
    x_tile = tl.load(x + row[:, None] * H + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(HC):
        merged = merge_stream(streams, x_tile, post, res, row, live, i, HC)
        at = out + (row * HC + i)[:, None] * H + cols[None, :]
        tl.store(at, merged.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rms_eps"])
def collapse_kernel(
    residual,
    pre,
    norm_weight,
    u,
    rms_eps,
    H: tl.constexpr,
    HC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The collapse alone, one row: u ← RMSNorm(Σⱼ preⱼ residualⱼ) · norm_weight."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < H
        value = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(HC):
            stream = tl.load(residual + (row * HC + j) * H + cols, mask=mask, other=0.0)
            value += tl.load(pre + row * HC + j) * stream.to(tl.float32)
        squares += value * value
        tl.store(u + row * H + cols, value.to(u.dtype.element_ty), mask=mask)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / H + rms_eps)
    norm_rows_in_place(u, norm_weight, row, rstd, H, BLOCK)
