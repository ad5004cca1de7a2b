"""The decoder's ops, `torch.ops.replay_sim.*`: one dispatched call each, PyTorch on a CPU, Triton on a GPU.

T is the number of rows, pads included; act is the activation dtype. All are for inference and deterministic.
"""

import torch
from torch import Tensor

from replay_sim.decoder.ops import cpu, library, meta

library.register("Meta", meta)
library.register("CPU", cpu)
if torch.cuda.is_available():
    from replay_sim.decoder.ops import cuda

    library.register("CUDA", cuda)

_ops = getattr(torch.ops, library.NAMESPACE)


def _check_rows(rows: int, **tensors: Tensor) -> None:
    """A kernel takes its row count from one tensor: ValueError names another that is not as long."""
    for name, tensor in tensors.items():
        if tensor.shape[0] != rows:
            raise ValueError(f"{name} has {tensor.shape[0]} rows beside {rows}: pad both to the same number of rows")


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
    """What stands before each sublayer: merges its predecessor's output, collapses the streams, mixes anew.

    x (T, h) act, residual (T, hc, h) act, pre (T, hc), post (T, hc, 1), res (T, hc, hc) f32;
    norm_weight (h) act, mix_weight (hc*h, 2*hc + hc*hc) f32, mix_scale (3), mix_bias (2*hc + hc*hc) f32.
    Returns the merged streams (T, hc, h) act, the sublayer's input (T, h) act, the next pre, post and res.
    """
    return _ops.boundary.default(
        x,
        residual,
        pre,
        post,
        res,
        norm_weight,
        mix_weight,
        mix_scale,
        mix_bias,
        sinkhorn_iters,
        rms_eps,
        hc_eps,
        alpha,
    )


def merge(x: Tensor, residual: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """The streams (T, hc, h) act after a sublayer's output: res @ residual + post * x."""
    return _ops.merge.default(x, residual, post, res)


def collapse(residual: Tensor, pre: Tensor, norm_weight: Tensor, rms_eps: float) -> Tensor:
    """RMSNorm of the streams' sum weighted by `pre` (T, hc) f32, times norm_weight (h) act: (T, h) act."""
    return _ops.collapse.default(residual, pre, norm_weight, rms_eps)


def q_norm_kv_rope(
    qkv_a: Tensor, q_norm_weight: Tensor, positions: Tensor, cos_sin: Tensor, q_lora: int, rms_eps: float
) -> tuple[Tensor, Tensor]:
    """The normalised query latent (T, q_lora) and the latent (T, d) with rope, of qkv_a (T, q_lora + d) act.

    positions (T) i64, clamped to the table cos_sin (max_position, rope) f32.
    """
    return _ops.q_norm_kv_rope.default(qkv_a, q_norm_weight, positions, cos_sin, q_lora, rms_eps)


def rope_(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates the last rope entries of each head of x (T, H, d) act in place, halves paired.

    positions (T) i64, clamped to the table cos_sin (max_position, rope) f32, whose row is [cos | sin].
    """
    _ops.rope_.default(x, positions, cos_sin)


def write_kv_(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Writes kv (T, d) act into cache (slots, d) act at slot_mapping (T) i64; not where negative (S8).

    Raises ValueError unless both have as many rows.
    """
    _check_rows(kv.shape[0], slot_mapping=slot_mapping)
    _ops.write_kv_.default(cache, kv, slot_mapping)


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
    """Attention of q (T, H, d) act, written to out (T, H, d) act; a row of request -1 writes nothing (S8).

    A row at position p attends its window cache's entries from its window_start, at most `window` of them,
    to p, and with a shared cache its n = min(topk, p + 1) entries at positions floor(i * (p + 1) / n): one
    softmax over all, float32 accumulation, the latent being key and value of all heads. positions and
    window_start (T) i64, request_of_row (T) i32, block_table (S, max_blocks) i32 of block_size positions.
    Raises ValueError unless all have as many rows.
    """
    _check_rows(q.shape[0], out=out, positions=positions, request_of_row=request_of_row, window_start=window_start)
    _ops.attend_.default(
        out,
        q,
        window_cache,
        shared_cache,
        positions,
        request_of_row,
        window_start,
        block_table,
        block_size,
        window,
        topk,
        scale,
    )


def route(
    logits: Tensor, num_rows: Tensor, first_expert: int, num_local: int, top_k: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Routes the first num_rows (1,) i32 rows of logits (T, E) act or f32 to the experts of this rank.

    The top_k experts by sqrt(softplus(logit)), ties to the lower id; weights sum to `scaling`.
    Returns pair_token (T*top_k) i32, the pairs' rows in order of (expert, row), unspecified beyond offs[-1];
    pair_pos (T, top_k) i32, a pair's place in that order, or -1 for a pad or another rank's expert;
    offs (num_local) i32, each expert's cumulative end; weights (T, top_k) f32.
    """
    return _ops.route.default(logits, num_rows, first_expert, num_local, top_k, scaling)


def moe_gather(u: Tensor, pair_token: Tensor, offs: Tensor) -> Tensor:
    """The rows of u (T, h) act at pair_token (P) i32: (P, h) act, unspecified beyond offs[-1]."""
    return _ops.moe_gather.default(u, pair_token, offs)


def grouped_matmul(xs: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """xs (P, h) act, grouped by offs (E) i32, times w (E, h, n) act: (P, n), unspecified beyond offs[-1]."""
    return _ops.grouped_matmul.default(xs, w, offs)


def swiglu(x: Tensor, limit: float, offs: Tensor | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of x (P, 2I) act = [gate | up]: (P, I) act.

    With offs, rows beyond offs[-1] are unspecified.
    """
    return _ops.swiglu.default(x, limit, offs)


def moe_combine(ys: Tensor, pair_pos: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """Each row's pairs of ys (P, h) act times weights (T, k) f32, summed in order, plus shared (T, h) act.

    Accumulated in float32. Pairs whose pair_pos (T, k) i32 is -1 add nothing. Returns (T, h) act.
    """
    return _ops.moe_combine.default(ys, pair_pos, weights, shared)
