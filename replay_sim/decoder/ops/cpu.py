"""The decoder's ops in plain PyTorch, for a CPU: the reference that the GPU kernels are held against.

No result of a row depends on what another row holds, so that NaN, infinities and 1e30 in pad rows stay there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ATTEND_CHUNK_ROWS = 64


def _rms_norm(values: Tensor, eps: float) -> Tensor:
    """float32 (..., n) divided by the root of its mean square over the last dimension."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


def merge(x: Tensor, residual: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """R' = post * x + res @ R, accumulated in float32, stored in the activation dtype."""
    merged = post * x.float().unsqueeze(1)
    for stream in range(residual.shape[1]):
        merged += res[:, :, stream, None] * residual[:, stream].float().unsqueeze(1)
    return merged.to(residual.dtype)


def collapse(residual: Tensor, pre: Tensor, norm_weight: Tensor, rms_eps: float) -> Tensor:
    """RMSNorm of the streams' sum weighted by `pre`, times `norm_weight`."""
    total = pre[:, 0, None] * residual[:, 0].float()
    for stream in range(1, residual.shape[1]):
        total += pre[:, stream, None] * residual[:, stream].float()
    return (_rms_norm(total, rms_eps) * norm_weight.float()).to(residual.dtype)


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
    """Merge, collapse with the incoming `pre`, and the next mixes, of the merged streams as stored."""
    rows, hc, _ = residual.shape
    merged = merge(x, residual, post, res)
    u = collapse(merged, pre, norm_weight, rms_eps)
    mix = _rms_norm(merged.flatten(1).float(), rms_eps) @ mix_weight
    to_pre, to_post, to_res = mix.split((hc, hc, hc * hc), dim=1)
    pre_bias, post_bias, res_bias = mix_bias.split((hc, hc, hc * hc))
    pre_out = torch.sigmoid(to_pre * mix_scale[0] + pre_bias) + hc_eps
    post_out = alpha * torch.sigmoid(to_post * mix_scale[1] + post_bias)
    res_out = torch.exp(to_res * mix_scale[2] + res_bias).view(rows, hc, hc)
    for _ in range(sinkhorn_iters):
        res_out = res_out / res_out.sum(2, keepdim=True)
        res_out = res_out / res_out.sum(1, keepdim=True)
    return merged, u, pre_out, post_out.unsqueeze(2), res_out.contiguous()


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates the last `cos_sin.shape[1]` entries of `x` (T, H, d) in place; positions are clamped."""
    rope_dim = cos_sin.shape[1]
    rows = cos_sin[positions.clamp(0, cos_sin.shape[0] - 1)].unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    tail = x[..., -rope_dim:]
    a, b = tail.float().chunk(2, dim=-1)
    tail.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def q_norm_kv_rope(
    qkv_a: Tensor, q_norm_weight: Tensor, positions: Tensor, cos_sin: Tensor, q_lora: int, rms_eps: float
) -> tuple[Tensor, Tensor]:
    """The normalised query latent, and the key-value latent rotated at its end."""
    qn = _rms_norm(qkv_a[:, :q_lora].float(), rms_eps) * q_norm_weight.float()
    kv = qkv_a[:, q_lora:].clone(memory_format=torch.contiguous_format)
    _rotate(kv.unsqueeze(1), positions, cos_sin)
    return qn.to(qkv_a.dtype), kv


def rope_(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates the end of every head of `x` (T, H, d) in place."""
    _rotate(x, positions, cos_sin)


def write_kv_(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Writes each row of `kv` to its slot; a negative slot writes nothing (S8)."""
    written = slot_mapping >= 0
    cache[slot_mapping[written]] = kv[written]


def _gather_keys(
    cache: Tensor, block_table: Tensor, requests: Tensor, positions: Tensor, valid: Tensor, block_size: int
) -> Tensor:
    """float32 (C, N, d): the latents of `requests` (C) at `positions` (C, N), zeros where not `valid`."""
    at = torch.where(valid, positions, 0)
    blocks = block_table[requests.unsqueeze(1), at // block_size].long()
    slots = torch.where(valid, blocks * block_size + at % block_size, 0)
    return cache[slots].float().masked_fill_(~valid.unsqueeze(2), 0.0)


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
    """Each row's attention over its window and its shared entries, a chunk of rows at a time to bound memory.

    Every row has `window` + `topk` places, unused ones masked: its result is the same beside any rows.
    """
    back = torch.arange(window - 1, -1, -1)
    entry = torch.arange(topk)
    for rows in (request_of_row >= 0).nonzero().squeeze(1).split(ATTEND_CHUNK_ROWS):
        p = positions[rows].unsqueeze(1)
        requests = request_of_row[rows].long()
        at = p - back
        valid = (at >= window_start[rows].unsqueeze(1)) & (at >= 0)
        keys = _gather_keys(window_cache, block_table, requests, at, valid, block_size)
        if shared_cache is not None:
            count = (p + 1).clamp(max=topk)
            chosen = entry < count
            shared = _gather_keys(shared_cache, block_table, requests, entry * (p + 1) // count, chosen, block_size)
            keys, valid = torch.cat((keys, shared), 1), torch.cat((valid, chosen), 1)
        logits = torch.bmm(q[rows].float(), keys.transpose(1, 2)) * scale
        weights = torch.softmax(logits.masked_fill_(~valid.unsqueeze(1), -torch.inf), dim=-1)
        out[rows] = torch.bmm(weights, keys).to(out.dtype)


def route(
    logits: Tensor, num_rows: Tensor, first_expert: int, num_local: int, top_k: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pairs of a row and a local expert in expert order, where each row finds its own, the weights."""
    rows = logits.shape[0]
    scores = F.softplus(logits.float()).sqrt()
    order = scores.sort(dim=1, descending=True, stable=True)
    best, experts = order.values[:, :top_k], order.indices[:, :top_k]
    weights = best / best.sum(1, keepdim=True) * scaling

    local = experts - first_expert
    real = torch.arange(rows).unsqueeze(1) < num_rows
    kept = (local >= 0) & (local < num_local) & real
    group = torch.where(kept, local, num_local).flatten()
    pairs = group.argsort(stable=True)
    pair_pos = torch.empty_like(pairs)
    pair_pos[pairs] = torch.arange(rows * top_k)
    pair_pos = torch.where(kept, pair_pos.view(rows, top_k), -1)
    offs = torch.bincount(group, minlength=num_local + 1)[:num_local].cumsum(0)
    return (pairs // top_k).int(), pair_pos.int(), offs.int(), weights


def moe_gather(u: Tensor, pair_token: Tensor, offs: Tensor) -> Tensor:
    """The row of each pair; zeros beyond the last pair."""
    pairs = int(offs[-1])
    xs = u.new_zeros(pair_token.shape[0], u.shape[1])
    xs[:pairs] = u[pair_token[:pairs].long()]
    return xs


def grouped_matmul(xs: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The rows of each expert times its matrix; zeros beyond the last pair."""
    ys = xs.new_zeros(xs.shape[0], w.shape[2])
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            ys[start:end] = xs[start:end] @ w[expert]
        start = end
    return ys


def swiglu(x: Tensor, limit: float, offs: Tensor | None) -> Tensor:
    """silu(min(gate, limit)) times up clamped to the limit; zeros beyond the last pair if offs is given."""
    rows = x.shape[0] if offs is None else int(offs[-1])
    gate, up = x[:rows].float().chunk(2, dim=1)
    result = x.new_zeros(x.shape[0], x.shape[1] // 2)
    result[:rows] = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return result


def moe_combine(ys: Tensor, pair_pos: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """The weighted sum of each row's pairs in order, then the shared expert's output."""
    total = torch.zeros(shared.shape, dtype=torch.float32)
    for place in range(pair_pos.shape[1]):
        pair = pair_pos[:, place, None].long()
        routed = ys[pair.squeeze(1).clamp(min=0)].float() * weights[:, place, None]
        total += torch.where(pair >= 0, routed, 0.0)
    return (total + shared.float()).to(shared.dtype)
