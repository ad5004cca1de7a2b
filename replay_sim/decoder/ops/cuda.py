"""The decoder's operations on a GPU: each allocates its outputs and launches its Triton kernels.

Launch shapes are fixed by the widths of the model alone, never by the number of rows, and nothing is tuned at run time:
a row's bits do not depend on the rows beside it, and no launch waits for the device.
"""

import math

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from replay_sim.decoder.ops.kernels_attention import attend_kernel
from replay_sim.decoder.ops.kernels_boundary import (
    boundary_finish_kernel,
    boundary_split_kernel,
    collapse_kernel,
    merge_kernel,
)
from replay_sim.decoder.ops.kernels_experts import (
    grouped_matmul_kernel,
    moe_combine_kernel,
    moe_gather_kernel,
    route_select_kernel,
    route_sort_kernel,
    swiglu_kernel,
)
from replay_sim.decoder.ops.kernels_rope import q_norm_kv_rope_kernel, rope_kernel, write_kv_kernel

_BOUNDARY_ROWS = 32
_BOUNDARY_COLS = 128
_MAX_PROGRAMS = 2048  # of kernels that loop over rows whose number is known on the device only


def _pad(size: int, least: int = 1) -> int:
    """The power of two at or above `size`, at least `least`."""
    return max(least, triton.next_power_of_2(size))


def _check_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError naming the first tensor that is not contiguous: kernels address rows by width."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {tuple(tensor.shape)} and stride {tensor.stride()}")


def boundary(
    x: Tensor, residual: Tensor, pre: Tensor, post: Tensor, res: Tensor, norm_weight: Tensor,
    mix_weight: Tensor, mix_scale: Tensor, mix_bias: Tensor, sinkhorn_iters: int, rms_eps: float,
    hc_eps: float, alpha: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Merge, collapse and mix (T, hc, h) streams in two launches: (residual, u, pre, post, res) of the boundary."""
    num_rows, hc, h = residual.shape
    _check_contiguous(x=x, residual=residual, pre=pre, post=post, res=res, mix_weight=mix_weight)
    mixes = mix_weight.shape[1]
    splits = triton.cdiv(h, _BOUNDARY_COLS)
    residual_out, u = torch.empty_like(residual), torch.empty_like(x)
    pre_out, post_out, res_out = torch.empty_like(pre), torch.empty_like(post), torch.empty_like(res)
    partial = torch.empty(num_rows, splits, mixes + 2, dtype=torch.float32, device=x.device)
    boundary_split_kernel[(triton.cdiv(num_rows, _BOUNDARY_ROWS), splits)](
        x, residual, pre, post, res, mix_weight, residual_out, u, partial, num_rows, H=h, HC=hc, MIXES=mixes,
        MIXES_PAD=_pad(mixes + 2, 64), ROWS=_BOUNDARY_ROWS, COLS=_BOUNDARY_COLS,
        BLOCK=16 if x.dtype == torch.float32 else 32, num_warps=4, num_stages=1,
    )  # fmt: skip
    boundary_finish_kernel[(num_rows,)](
        partial, norm_weight, mix_scale, mix_bias, u, pre_out, post_out, res_out, sinkhorn_iters, rms_eps,
        hc_eps, alpha, H=h, HC=hc, HC_PAD=_pad(hc), MIXES=mixes, SPLITS=splits, SPLITS_PAD=_pad(splits),
        BLOCK=min(_pad(h), 1024), num_warps=4,
    )  # fmt: skip
    return residual_out, u, pre_out, post_out, res_out


def merge(x: Tensor, residual: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """res · residual + post ⊗ x, (T, hc, h) in the activation dtype."""
    num_rows, hc, h = residual.shape
    _check_contiguous(x=x, residual=residual, post=post, res=res)
    out = torch.empty_like(residual)
    cols = min(_pad(h, 16), 256)
    grid = (triton.cdiv(num_rows, 8), triton.cdiv(h, cols))
    merge_kernel[grid](x, residual, post, res, out, num_rows, H=h, HC=hc, ROWS=8, COLS=cols, num_warps=4)
    return out


def collapse(residual: Tensor, pre: Tensor, norm_weight: Tensor, rms_eps: float) -> Tensor:
    """RMSNorm(Σⱼ preⱼ residualⱼ) · norm_weight, (T, h)."""
    num_rows, hc, h = residual.shape
    _check_contiguous(residual=residual, pre=pre)
    u = torch.empty(num_rows, h, dtype=residual.dtype, device=residual.device)
    block = min(_pad(h), 1024)
    collapse_kernel[(num_rows,)](residual, pre, norm_weight, u, rms_eps, H=h, HC=hc, BLOCK=block, num_warps=4)
    return u


def q_norm_kv_rope(
    qkv_a: Tensor, q_norm_weight: Tensor, positions: Tensor, cos_sin: Tensor, q_lora: int, rms_eps: float
) -> tuple[Tensor, Tensor]:
    """The normalised query latent (T, q_lora) and the rotated KV latent (T, d) of qkv_a (T, q_lora + d)."""
    num_rows, width = qkv_a.shape
    dim, half = width - q_lora, cos_sin.shape[1] // 2
    _check_contiguous(qkv_a=qkv_a, positions=positions, cos_sin=cos_sin)
    qn = torch.empty(num_rows, q_lora, dtype=qkv_a.dtype, device=qkv_a.device)
    kv = torch.empty(num_rows, dim, dtype=qkv_a.dtype, device=qkv_a.device)
    q_norm_kv_rope_kernel[(num_rows,)](
        qkv_a, q_norm_weight, positions, cos_sin, qn, kv, cos_sin.shape[0], rms_eps, Q_LORA=q_lora,
        Q_PAD=_pad(q_lora), DIM=dim, DIM_PAD=_pad(dim), HALF=half, HALF_PAD=_pad(half), num_warps=4,
    )  # fmt: skip
    return qn, kv


def rope_(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate the last rope_dim values of each head of x (T, H, d) in place."""
    num_rows, heads, dim = x.shape
    half = cos_sin.shape[1] // 2
    _check_contiguous(x=x, positions=positions, cos_sin=cos_sin)
    rope_kernel[(num_rows,)](
        x, positions, cos_sin, cos_sin.shape[0], HEADS=heads, HEADS_PAD=_pad(heads), DIM=dim, HALF=half,
        HALF_PAD=_pad(half), num_warps=1,
    )  # fmt: skip


def write_kv_(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Copy each row of kv (T, d) to its slot of cache (slots, d); a slot below 0 writes nothing (S8)."""
    num_rows, dim = kv.shape
    _check_contiguous(cache=cache, kv=kv, slot_mapping=slot_mapping)
    write_kv_kernel[(num_rows,)](cache, kv, slot_mapping, DIM=dim, DIM_PAD=_pad(dim), num_warps=1)


def attend_(
    out: Tensor, q: Tensor, window_cache: Tensor, shared_cache: Tensor | None, positions: Tensor,
    request_of_row: Tensor, window_start: Tensor, block_table: Tensor, block_size: int, window: int,
    topk: int, scale: float,
) -> None:  # fmt: skip
    """Attention of q (T, H, d) into out, over the row's window and its entries of the shared cache, if there is one.

    A row of request -1 writes nothing (S8).
    """
    num_rows, heads, dim = q.shape
    shared = window_cache if shared_cache is None else shared_cache
    _check_contiguous(out=out, q=q, window_cache=window_cache, shared_cache=shared, block_table=block_table)
    attend_kernel[(num_rows,)](
        out, q, window_cache, shared, positions, request_of_row, window_start, block_table,
        block_table.shape[1], scale * math.log2(math.e), HEADS=heads, HEADS_PAD=_pad(heads, 16), DIM=dim,
        DIM_PAD=_pad(dim, 16), BLOCK_SIZE=block_size, WINDOW=window,
        TOPK=0 if shared_cache is None else topk, KEYS=32, num_warps=8, num_stages=3,
    )  # fmt: skip


def route(
    logits: Tensor, num_rows: Tensor, first_expert: int, num_local: int, top_k: int, scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The pairs of this rank's experts: pair_token (T·k) int32, pair_pos (T, k) int32, offs, weights (T, k) float32."""
    num_tokens, experts = logits.shape
    _check_contiguous(logits=logits)
    device = logits.device
    expert_of_pair = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    pair_pos = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    pair_token = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    offs = torch.empty(num_local, dtype=torch.int32, device=device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    route_select_kernel[(triton.cdiv(num_tokens, 4),)](
        logits, num_rows, expert_of_pair, pair_pos, weights, num_tokens, scaling, E=experts,
        E_PAD=_pad(experts), TOP_K=top_k, TOP_K_PAD=_pad(top_k), ROWS=4, num_warps=4,
    )  # fmt: skip
    route_sort_kernel[(num_local,)](
        expert_of_pair, pair_token, pair_pos, offs, num_tokens * top_k, first_expert, TOP_K=top_k,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return pair_token, pair_pos, offs, weights


def moe_gather(u: Tensor, pair_token: Tensor, offs: Tensor) -> Tensor:
    """The rows of u (T, h) in the order of pair_token; rows at or beyond offs[-1] are left unwritten."""
    num_pairs, h = pair_token.shape[0], u.shape[1]
    _check_contiguous(u=u)
    xs = torch.empty(num_pairs, h, dtype=u.dtype, device=u.device)
    grid = (min(num_pairs, _MAX_PROGRAMS),)
    block = min(_pad(h), 2048)
    moe_gather_kernel[grid](u, pair_token, offs, xs, offs.shape[0], H=h, BLOCK=block, num_warps=4)
    return xs


def grouped_matmul(xs: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """xs (P, h) @ w[e] (h, n) for each local expert's rows, which end at offs[e]; rows beyond offs[-1] unspecified.

    The framework's grouped product where it has one: bfloat16, with rows of whole 16 bytes.
    """
    num_local, h, n = w.shape
    if xs.is_cuda and xs.dtype == torch.bfloat16 and h % 8 == 0 and n % 8 == 0:
        return F.grouped_mm(xs, w, offs=offs)
    _check_contiguous(xs=xs, w=w)
    out = torch.empty(xs.shape[0], n, dtype=xs.dtype, device=xs.device)
    grid = (num_local, triton.cdiv(n, 32))
    grouped_matmul_kernel[grid](xs, w, offs, out, H=h, N=n, ROWS=16, COLS=32, BLOCK=16, num_warps=4)
    return out


def swiglu(x: Tensor, limit: float, offs: Tensor | None) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) of x (P, 2 I) = [gate | up]; rows at or beyond offs[-1] unwritten."""
    num_rows, inter = x.shape[0], x.shape[1] // 2
    _check_contiguous(x=x)
    out = torch.empty(num_rows, inter, dtype=x.dtype, device=x.device)
    grid = (min(num_rows, _MAX_PROGRAMS),)
    swiglu_kernel[grid](
        x, x if offs is None else offs, out, num_rows, 0 if offs is None else offs.shape[0], limit,
        INTER=inter, HAS_OFFS=offs is not None, BLOCK=min(_pad(inter), 1024), num_warps=4,
    )  # fmt: skip
    return out


def moe_combine(ys: Tensor, pair_pos: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """The weighted sum over each token's pairs of their rows of ys (P, h), in float32, plus shared (T, h)."""
    num_rows, h = shared.shape
    _check_contiguous(ys=ys, pair_pos=pair_pos, weights=weights, shared=shared)
    out = torch.empty_like(shared)
    top_k = pair_pos.shape[1]
    block = min(_pad(h), 1024)
    moe_combine_kernel[(num_rows,)](ys, pair_pos, weights, shared, out, H=h, TOP_K=top_k, BLOCK=block, num_warps=4)
    return out
