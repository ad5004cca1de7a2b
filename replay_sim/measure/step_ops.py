"""The operations that a step launches: bytes, arithmetic and kernels of each, counted from shapes (issue 4)."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import attrs

from replay_sim.config.shapes import DecoderShape

Kind = Literal["streams", "rows", "dense", "experts", "wide_experts", "attention", "routing", "movement"]
KINDS: tuple[Kind, ...] = (
    "streams",
    "rows",
    "dense",
    "experts",
    "wide_experts",
    "attention",
    "routing",
    "movement",
)
"""Kinds of operation that a rate and a floor are common to; a grouped product takes wide tiles from some rows on."""

NARROW_ROWS = 128
"""Rows of an expert, if all pairs were local, up to which torch's grouped product takes its narrow tiles."""

FLOAT_BYTES = INT_BYTES = 4
LONG_BYTES = 8


@attrs.frozen(kw_only=True)
class Op:
    """One operation, launched `count` times in a part of a step, each time as `kernels` kernels.

    `nbytes` are every operand read once and every result written once; of weights and caches what the rows really use.
    `flops` are multiplications and additions. `rows`, `inner`, `width` are those of a product (rows, inner) x (inner,
    width), `groups` how many of them it is; for attention `inner` is the keys that all rows read together.
    `weight_bytes` are those of the weights of all experts, of which `nbytes` holds what evenly routed rows use.
    """

    name: str
    kind: Kind
    nbytes: float
    flops: float = 0.0
    count: int = 1
    kernels: int = 1
    rows: float = 0.0
    inner: float = 0.0
    width: int = 0
    groups: int = 1
    weight_bytes: float = 0.0


@attrs.frozen(kw_only=True)
class Rows:
    """The rows that layers run on: `padded` with pads, `real` without.

    `window_keys` and `shared_keys` are the cache entries that all real rows read of their window and of the shared KV;
    `window_entries` and `shared_entries` how many different ones at most.
    """

    padded: int
    real: int
    window_keys: float
    shared_keys: float
    window_entries: float
    shared_entries: float


def keys_read(first: float, length: float, most: int) -> float:
    """The sum of min(position + 1, most) over `length` positions from `first` on."""
    growing = max(0.0, min(length, most - first))
    return growing * first + growing * (growing + 1) / 2 + (length - growing) * most


def active_experts(shape: DecoderShape, rows: int) -> float:
    """Expected local experts that `rows` rows use, each picking its experts evenly."""
    missed: float = (1 - shape.num_experts_per_tok / shape.num_experts) ** rows
    return shape.num_local_experts * (1 - missed)


def local_pairs(shape: DecoderShape, rows: int) -> float:
    """Expected pairs of a row and a local expert."""
    return rows * shape.num_experts_per_tok * shape.num_local_experts / shape.num_experts


def product(shape: DecoderShape, name: str, rows: int, inner: int, width: int, groups: int = 1) -> Op:
    """A dense product (rows, inner) x (inner, width), `groups` of them side by side."""
    elements = groups * (rows * inner + inner * width + rows * width)
    flops = 2.0 * groups * rows * inner * width
    return Op(
        name=name,
        kind="dense",
        nbytes=elements * shape.dtype_bytes,
        flops=flops,
        rows=rows,
        inner=inner,
        width=width,
        groups=groups,
    )


@lru_cache(maxsize=4096)
def layer_ops(shape: DecoderShape, rows: Rows, count: int, *, shared: bool, writes_kv: bool = True) -> tuple[Op, ...]:
    """The operations of `count` equal layers, launched one by one.

    `shared`: the layer attends the shared KV. Without `writes_kv` its latents were written before (L3).
    """
    ops = [
        boundary(shape, "attention boundary", rows.padded),
        *_projections(shape, rows.padded),
        *([write_kv(shape, rows)] if writes_kv else []),
        attention(shape, rows, shared=shared),
        *_attention_output(shape, rows.padded),
        boundary(shape, "expert boundary", rows.padded),
        *_experts(shape, rows),
    ]
    return tuple(attrs.evolve(op, count=count) for op in ops)


def boundary(shape: DecoderShape, name: str, rows: int) -> Op:
    """Merge, collapse and mix of the streams, in two kernels."""
    hc, hidden = shape.hc_mult, shape.hidden_size
    mixes = 2 * hc + hc * hc
    row_bytes = (2 * hc + 2) * hidden * shape.dtype_bytes + 2 * mixes * FLOAT_BYTES
    weights = (hc * hidden * mixes + mixes + 3) * FLOAT_BYTES + hidden * shape.dtype_bytes
    flops = 2.0 * rows * hidden * (hc * (hc + 1) + hc + hc * mixes)
    return Op(name=name, kind="streams", nbytes=rows * row_bytes + weights, flops=flops, kernels=2)


def merge(shape: DecoderShape, rows: int, count: int = 1) -> Op:
    """The streams merged with the last sublayer's output."""
    hc, hidden = shape.hc_mult, shape.hidden_size
    mixes = (hc + hc * hc) * FLOAT_BYTES
    nbytes = rows * ((2 * hc + 1) * hidden * shape.dtype_bytes + mixes)
    return Op(name="merge", kind="streams", nbytes=nbytes, flops=2.0 * rows * hc * (hc + 1) * hidden, count=count)


def mean(shape: DecoderShape, rows: int, count: int) -> Op:
    """The mean over streams that late and early aux states are."""
    nbytes = rows * (shape.hc_mult + 1) * shape.hidden_size * shape.dtype_bytes
    return Op(name="aux mean", kind="rows", nbytes=nbytes, count=count)


def write_kv(shape: DecoderShape, rows: Rows, count: int = 1) -> Op:
    """Latents copied to their slots of a cache."""
    nbytes = 2 * rows.real * shape.head_dim * shape.dtype_bytes + rows.padded * LONG_BYTES
    return Op(name="KV write", kind="rows", nbytes=nbytes, count=count)


def query_latent(shape: DecoderShape, rows: int) -> list[Op]:
    """The projection to query latent and KV latent, and what normalises and rotates them."""
    width = shape.q_lora_rank + shape.head_dim
    nbytes = rows * (2 * width * shape.dtype_bytes + LONG_BYTES + shape.rope_dim * FLOAT_BYTES)
    return [
        product(shape, "wqkv_a", rows, shape.hidden_size, width),
        Op(name="query norm and rope", kind="rows", nbytes=nbytes),
    ]


def shared_latent(shape: DecoderShape, rows: int) -> list[Op]:
    """The projection to the shared KV's latent and its rotation."""
    return [
        product(shape, "wkv_shared", rows, shape.hidden_size, shape.head_dim),
        _rope(shape, "shared rope", rows, 1),
    ]


def attention(shape: DecoderShape, rows: Rows, *, shared: bool) -> Op:
    """Attention of all heads over the rows' windows and, if `shared`, their entries of the shared KV."""
    keys = rows.window_keys + (rows.shared_keys if shared else 0.0)
    entries = rows.window_entries + (rows.shared_entries if shared else 0.0)
    act, width = shape.dtype_bytes, shape.num_heads * shape.head_dim
    metadata = rows.padded * (2 * LONG_BYTES + INT_BYTES)
    nbytes = 2 * rows.real * width * act + entries * shape.head_dim * act + metadata
    return Op(
        name="shared attention" if shared else "window attention",
        kind="attention",
        nbytes=nbytes,
        flops=4.0 * keys * width,
        rows=rows.real,
        inner=keys,
        width=width,
    )


def _rope(shape: DecoderShape, name: str, rows: int, heads: int) -> Op:
    row_bytes = 2 * heads * shape.rope_dim * shape.dtype_bytes + LONG_BYTES + shape.rope_dim * FLOAT_BYTES
    return Op(name=name, kind="rows", nbytes=rows * row_bytes)


def _projections(shape: DecoderShape, rows: int) -> list[Op]:
    return [
        *query_latent(shape, rows),
        product(shape, "wq_b", rows, shape.q_lora_rank, shape.num_heads * shape.head_dim),
        _rope(shape, "query rope", rows, shape.num_heads),
    ]


def _attention_output(shape: DecoderShape, rows: int) -> list[Op]:
    groups, low = shape.o_groups, shape.o_groups * shape.o_lora_rank
    inner = shape.num_heads // groups * shape.head_dim
    ops = [product(shape, "wo_a", rows, inner, shape.o_lora_rank, groups)]
    if groups > 1:
        ops.append(Op(name="group transpose", kind="rows", nbytes=2 * rows * low * shape.dtype_bytes))
    return [*ops, product(shape, "wo_b", rows, low, shape.hidden_size)]


def _experts(shape: DecoderShape, rows: Rows) -> list[Op]:
    hidden, inter, shared, act = (
        shape.hidden_size,
        shape.moe_intermediate_size,
        shape.shared_intermediate_size,
        shape.dtype_bytes,
    )
    pairs, top_k = local_pairs(shape, rows.real), shape.num_experts_per_tok
    route_bytes = rows.padded * (shape.num_experts * act + top_k * (2 * FLOAT_BYTES + 3 * INT_BYTES))
    combine_bytes = (pairs + 2 * rows.padded) * hidden * act + rows.padded * top_k * (FLOAT_BYTES + INT_BYTES)
    return [
        product(shape, "router", rows.padded, hidden, shape.num_experts),
        Op(name="route", kind="routing", nbytes=route_bytes, kernels=2, rows=rows.padded),
        Op(name="expert gather", kind="rows", nbytes=(rows.real + pairs) * hidden * act),
        grouped(shape, "w13", rows, hidden, 2 * inter),
        Op(name="expert swiglu", kind="rows", nbytes=3 * pairs * inter * act),
        grouped(shape, "w2", rows, inter, hidden),
        product(shape, "shared_w13", rows.padded, hidden, 2 * shared),
        Op(name="shared swiglu", kind="rows", nbytes=3 * rows.padded * shared * act),
        product(shape, "shared_w2", rows.padded, shared, hidden),
        Op(name="combine", kind="rows", nbytes=combine_bytes),
    ]


def grouped(shape: DecoderShape, name: str, rows: Rows, inner: int, width: int) -> Op:
    """A grouped product over the rows' local pairs: it reads the weights of the experts that they use.

    Its tiles are chosen from what the host knows, the space for the pairs of all rows, pads and other ranks' included.
    """
    pairs = local_pairs(shape, rows.real)
    elements = pairs * (inner + width) + active_experts(shape, rows.real) * inner * width
    space = rows.padded * shape.num_experts_per_tok // shape.num_local_experts
    return Op(
        name=name,
        kind="experts" if space <= NARROW_ROWS else "wide_experts",
        nbytes=elements * shape.dtype_bytes,
        flops=2.0 * pairs * inner * width,
        kernels=2,
        rows=rows.real,
        inner=inner,
        width=width,
        groups=shape.num_local_experts,
        weight_bytes=shape.num_local_experts * inner * width * shape.dtype_bytes,
    )
