"""Result shapes and dtypes of the decoder's ops, computed on meta tensors: nothing here reads a value."""

import torch
from torch import Tensor


def boundary(
    x: Tensor,
    residual: Tensor,
    pre: Tensor,
    post: Tensor,
    res: Tensor,
    norm_weight: Tensor,
    mix_weight: Tensor,
    mix_scale: Tensor,
    mix_bias: Tensor,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
    alpha: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(T, hc, h) act, (T, h) act, (T, hc) f32, (T, hc, 1) f32, (T, hc, hc) f32."""
    rows, hc, hidden = residual.shape
    return (
        residual.new_empty(rows, hc, hidden),
        x.new_empty(rows, hidden),
        pre.new_empty(rows, hc, dtype=torch.float32),
        pre.new_empty(rows, hc, 1, dtype=torch.float32),
        pre.new_empty(rows, hc, hc, dtype=torch.float32),
    )


def merge(x: Tensor, residual: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """(T, hc, h) act."""
    return residual.new_empty(residual.shape)


def collapse(residual: Tensor, pre: Tensor, norm_weight: Tensor, rms_eps: float) -> Tensor:
    """(T, h) act."""
    return residual.new_empty(residual.shape[0], residual.shape[2])


def q_norm_kv_rope(
    qkv_a: Tensor, q_norm_weight: Tensor, positions: Tensor, cos_sin: Tensor, q_lora: int, rms_eps: float
) -> tuple[Tensor, Tensor]:
    """(T, q_lora) act, (T, d) act."""
    rows, width = qkv_a.shape
    return qkv_a.new_empty(rows, q_lora), qkv_a.new_empty(rows, width - q_lora)


def rope_(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Writes `x` in place."""


def write_kv_(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Writes `cache` in place."""


def attend_(
    out: Tensor,
    q: Tensor,
    window_cache: Tensor,
    shared_cache: Tensor | None,
    positions: Tensor,
    request_of_row: Tensor,
    window_start: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    topk: int,
    scale: float,
) -> None:
    """Writes `out` in place."""


def route(
    logits: Tensor, num_rows: Tensor, first_expert: int, num_local: int, top_k: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(T*k) i32, (T, k) i32, (num_local) i32, (T, k) f32."""
    rows = logits.shape[0]
    return (
        logits.new_empty(rows * top_k, dtype=torch.int32),
        logits.new_empty(rows, top_k, dtype=torch.int32),
        logits.new_empty(num_local, dtype=torch.int32),
        logits.new_empty(rows, top_k, dtype=torch.float32),
    )


def moe_gather(u: Tensor, pair_token: Tensor, offs: Tensor) -> Tensor:
    """(P, h) act."""
    return u.new_empty(pair_token.shape[0], u.shape[1])


def grouped_matmul(xs: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """(P, n) act."""
    return xs.new_empty(xs.shape[0], w.shape[2])


def swiglu(x: Tensor, limit: float, offs: Tensor | None) -> Tensor:
    """(P, I) act."""
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def moe_combine(ys: Tensor, pair_pos: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """(T, h) act."""
    return shared.new_empty(shared.shape)
