"""The Triton kernels that normalise, rotate and cache what the attention projections give."""

import triton
import triton.language as tl


@triton.jit
def load_cos_sin(cos_sin, positions, row, max_position, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """cos and sin, (HALF_PAD) float32, of a row's position held inside the table."""
    position = tl.load(positions + row)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)
    pair = tl.arange(0, HALF_PAD)
    at = cos_sin + position * (2 * HALF) + pair
    cos = tl.load(at, mask=pair < HALF, other=0.0)
    sin = tl.load(at + HALF, mask=pair < HALF, other=0.0)
    return cos, sin


@triton.jit(do_not_specialize=["max_position", "rms_eps"])
def q_norm_kv_rope_kernel(
    qkv_a,
    q_norm_weight,
    positions,
    cos_sin,
    qn,
    kv,
    max_position,
    rms_eps,
    Q_LORA: tl.constexpr,
    Q_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One row: RMSNorm of its first Q_LORA values; the other DIM with the last 2 HALF of them rotated."""
    row = tl.program_id(0).to(tl.int64)
    source = qkv_a + row * (Q_LORA + DIM)
    cols = tl.arange(0, Q_PAD)
    q = tl.load(source + cols, mask=cols < Q_LORA, other=0.0).to(tl.float32)
    weight = tl.load(q_norm_weight + cols, mask=cols < Q_LORA, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(q * q, axis=0) / Q_LORA + rms_eps)
    tl.store(qn + row * Q_LORA + cols, (q * rstd * weight).to(qn.dtype.element_ty), mask=cols < Q_LORA)

    START: tl.constexpr = DIM - 2 * HALF
    source += Q_LORA
    kv += row * DIM
    plain = tl.arange(0, DIM_PAD)
    tl.store(kv + plain, tl.load(source + plain, mask=plain < START, other=0.0), mask=plain < START)
    cos, sin = load_cos_sin(cos_sin, positions, row, max_position, HALF, HALF_PAD)
    pair = tl.arange(0, HALF_PAD)
    a = tl.load(source + START + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    b = tl.load(source + START + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    tl.store(kv + START + pair, (a * cos - b * sin).to(kv.dtype.element_ty), mask=pair < HALF)
    tl.store(kv + START + HALF + pair, (b * cos + a * sin).to(kv.dtype.element_ty), mask=pair < HALF)


@triton.jit(do_not_specialize=["max_position"])
def rope_kernel(
    x,
    positions,
    cos_sin,
    max_position,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One row: rotate the last 2 HALF values of each head, in place."""
    row = tl.program_id(0).to(tl.int64)
    cos, sin = load_cos_sin(cos_sin, positions, row, max_position, HALF, HALF_PAD)
    head = tl.arange(0, HEADS_PAD)
    pair = tl.arange(0, HALF_PAD)
    mask = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    at = x + (row * HEADS + head)[:, None] * DIM + (DIM - 2 * HALF) + pair[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    rotated_a = a * cos[None, :] - b * sin[None, :]
    rotated_b = b * cos[None, :] + a * sin[None, :]
    tl.store(at, rotated_a.to(x.dtype.element_ty), mask=mask)
    tl.store(at + HALF, rotated_b.to(x.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(cache, kv, slot_mapping, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """One row: copy its latent to its slot of the cache; a slot below 0 writes nothing."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    cols = tl.arange(0, DIM_PAD)
    live = (cols < DIM) & (slot >= 0)
    tl.store(cache + slot * DIM + cols, tl.load(kv + row * DIM + cols, mask=live, other=0.0), mask=live)
