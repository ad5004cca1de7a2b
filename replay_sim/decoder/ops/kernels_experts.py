"""The Triton kernels of the expert sublayer: routing, the pairs' order, and what moves rows in and out of it."""

import triton
import triton.language as tl


@triton.jit
def sqrt_softplus(x):
    """sqrt(log(1 + exp(x))) in float32, exact to rounding for very negative x as well."""
    small = tl.exp(-tl.abs(x))
    above_one = 1.0 + small
    log1p = tl.where(above_one == 1.0, small, tl.log(above_one) * (small / (above_one - 1.0)))
    return tl.sqrt(tl.where(x > 0.0, x, 0.0) + log1p)


@triton.jit(do_not_specialize=["num_tokens", "scaling"])
def route_select_kernel(
    logits,
    num_rows,
    expert_of_pair,
    pair_pos,
    weights,
    num_tokens,
    scaling,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens: their TOP_K experts of the highest scores, the lower expert first among equals, and the weights.

    A token at or after num_rows gets expert E, which no rank has, and weights 0. A NaN ranks below every score.
    Every pair_pos starts as -1.
    """
    row_index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = row_index.to(tl.int64)
    inside = row_index < num_tokens
    live = row_index < tl.load(num_rows)
    expert = tl.arange(0, E_PAD)[None, :]
    at = logits + row[:, None] * E + expert
    scores = sqrt_softplus(tl.load(at, mask=inside[:, None] & (expert < E), other=0.0).to(tl.float32))
    rank = tl.where(expert < E, tl.where(scores == scores, scores, -1.0), -2.0)
    choice = tl.arange(0, TOP_K_PAD)[None, :]
    chosen = tl.full([ROWS, TOP_K_PAD], E, tl.int32)
    chosen_scores = tl.zeros([ROWS, TOP_K_PAD], tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(rank, axis=1)[:, None]
        lowest = tl.min(tl.where(rank == best, expert, E_PAD), axis=1)[:, None]
        score = tl.sum(tl.where(expert == lowest, scores, 0.0), axis=1)[:, None]
        chosen = tl.where(choice == j, lowest, chosen)
        chosen_scores = tl.where(choice == j, score, chosen_scores)
        rank = tl.where(expert == lowest, -3.0, rank)
    total = tl.sum(chosen_scores, axis=1)[:, None]
    at = row[:, None] * TOP_K + choice
    mask = inside[:, None] & (choice < TOP_K)
    tl.store(expert_of_pair + at, tl.where(live[:, None], chosen, E), mask=mask)
    tl.store(weights + at, tl.where(live[:, None], chosen_scores / total * scaling, 0.0), mask=mask)
    tl.store(pair_pos + at, tl.full([ROWS, TOP_K_PAD], -1, tl.int32), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def route_sort_kernel(
    expert_of_pair,
    pair_token,
    pair_pos,
    offs,
    num_pairs,
    first_expert,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One local expert: count the pairs of the local experts before it, then number its own in token order."""
    local = tl.program_id(0)
    mine = first_expert + local
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        expert = tl.load(expert_of_pair + start + lane, mask=start + lane < num_pairs, other=-1)
        before += ((expert >= first_expert) & (expert < mine)).to(tl.int32)
    position = tl.sum(before, axis=0)
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        expert = tl.load(expert_of_pair + pair, mask=pair < num_pairs, other=-1)
        is_mine = expert == mine
        ones = is_mine.to(tl.int32)
        at = position + tl.cumsum(ones, axis=0) - 1
        tl.store(pair_token + at, pair // TOP_K, mask=is_mine)
        tl.store(pair_pos + pair, at, mask=is_mine)
        position += tl.sum(ones, axis=0)
    tl.store(offs + local, position)


@triton.jit(do_not_specialize=["num_local"])
def moe_gather_kernel(u, pair_token, offs, xs, num_local, H: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs program_id, program_id + programs, ... below offs[-1]: xs[pair] ← u[pair_token[pair]]."""
    num_pairs = tl.load(offs + num_local - 1)
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        token = tl.load(pair_token + pair).to(tl.int64)
        row = tl.cast(pair, tl.int64)
        for start in range(0, H, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            value = tl.load(u + token * H + cols, mask=cols < H, other=0.0)
            tl.store(xs + row * H + cols, value, mask=cols < H)


@triton.jit(do_not_specialize=["num_rows", "num_local", "limit"])
def swiglu_kernel(
    x,
    offs,
    out,
    num_rows,
    num_local,
    limit,
    INTER: tl.constexpr,
    HAS_OFFS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows program_id, program_id + programs, ... below offs[-1], or num_rows: silu(min(gate)) · clamp(up)."""
    end = num_rows
    if HAS_OFFS:
        end = tl.load(offs + num_local - 1)
    for index in range(tl.program_id(0), end, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        for start in range(0, INTER, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            at = x + row * (2 * INTER) + cols
            gate = tl.load(at, mask=cols < INTER, other=0.0).to(tl.float32)
            up = tl.load(at + INTER, mask=cols < INTER, other=0.0).to(tl.float32)
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            value = gate * tl.sigmoid(gate) * up
            tl.store(out + row * INTER + cols, value.to(out.dtype.element_ty), mask=cols < INTER)


@triton.jit
def moe_combine_kernel(
    ys,
    pair_pos,
    weights,
    shared,
    out,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: the weighted sum of its pairs' rows of ys, in order and in float32, plus its row of `shared`."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(TOP_K):
            at = tl.load(pair_pos + row * TOP_K + j)
            weight = tl.where(at >= 0, tl.load(weights + row * TOP_K + j), 0.0)
            y = tl.load(ys + at.to(tl.int64) * H + cols, mask=(cols < H) & (at >= 0), other=0.0)
            total += weight * y.to(tl.float32)
        total += tl.load(shared + row * H + cols, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(out + row * H + cols, total.to(out.dtype.element_ty), mask=cols < H)


@triton.jit
def grouped_matmul_kernel(
    xs,
    w,
    offs,
    out,
    H: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One local expert and COLS columns: out ← xs @ w[expert] over the expert's rows, in blocks of ROWS."""
    expert = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    for start in range(begin, end, ROWS):
        index = start + tl.arange(0, ROWS)
        row = index.to(tl.int64)
        total = tl.zeros([ROWS, COLS], tl.float32)
        for inner in range(0, H, BLOCK):
            k = inner + tl.arange(0, BLOCK)
            x_mask = (index < end)[:, None] & (k < H)[None, :]
            x_tile = tl.load(xs + row[:, None] * H + k[None, :], mask=x_mask, other=0.0)
            w_at = w + (expert * H + k)[:, None] * N + cols[None, :]
            w_tile = tl.load(w_at, mask=(k < H)[:, None] & (cols < N)[None, :], other=0.0)
            total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
        at = out + row[:, None] * N + cols[None, :]
        mask = (index < end)[:, None] & (cols < N)[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)
