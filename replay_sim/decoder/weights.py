"""The decoder's weights: seeded, random, scaled so that activations stay of the embedding's order in all layers."""

import attrs
import torch
from torch import Tensor

from replay_sim.config.shapes import DecoderShape

ROPE_BASE = 10000.0
MIX_SCALE = 0.5
EMBED_STD = 5.0
"""Above a sublayer's output, which is of order one: rows stay unlike through all layers, so that the router spreads
them over the experts."""


@attrs.frozen
class BoundaryWeights:
    """norm_weight (h) act; mix_weight (hc*h, 2*hc + hc*hc), mix_scale (3), mix_bias (2*hc + hc*hc) f32."""

    norm_weight: Tensor
    mix_weight: Tensor
    mix_scale: Tensor
    mix_bias: Tensor


@attrs.frozen
class LayerWeights:
    """One layer's weights, act; H heads of d, G output groups, E experts of intermediate size I, Is shared.

    `wkv_shared` (h, d) is the KV-source layer's alone, None in the others.
    """

    attn_boundary: BoundaryWeights
    wqkv_a: Tensor  # (h, q_lora + d)
    q_norm_weight: Tensor  # (q_lora)
    wq_b: Tensor  # (q_lora, H*d)
    wo_a: Tensor  # (G, H/G*d, o_lora)
    wo_b: Tensor  # (G*o_lora, h)
    ffn_boundary: BoundaryWeights
    router: Tensor  # (h, E)
    w13: Tensor  # (E_local, h, 2I)
    w2: Tensor  # (E_local, I, h)
    shared_w13: Tensor  # (h, 2Is)
    shared_w2: Tensor  # (Is, h)
    wkv_shared: Tensor | None = None


@attrs.frozen
class DecoderWeights:
    """embed (vocab, h), head_norm_weight (h), lm_head (h, vocab) act; cos_sin (max_position, rope) float32.

    `layers` holds one LayerWeights a layer.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    head_norm_weight: Tensor
    lm_head: Tensor
    cos_sin: Tensor


class _Source:
    """Draws tensors from one seeded generator on the device."""

    def __init__(self, shape: DecoderShape, device: torch.device | str, seed: int) -> None:
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, std: float, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(size, generator=self.generator, device=self.device, dtype=dtype or self.dtype)
        return drawn.mul_(std)

    def matrix(self, *size: int) -> Tensor:
        """A (..., n, m) product's weight that keeps the size of its input's entries."""
        return self.normal(*size, std=size[-2] ** -0.5)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, std=0.1).add_(1.0)

    def boundary(self, hc: int, hidden: int) -> BoundaryWeights:
        mixes = 2 * hc + hc * hc
        f32 = torch.float32
        return BoundaryWeights(
            norm_weight=self.norm(hidden),
            mix_weight=self.normal(hc * hidden, mixes, std=(hc * hidden) ** -0.5, dtype=f32),
            mix_scale=torch.full((3,), MIX_SCALE, dtype=f32, device=self.device),
            mix_bias=self.normal(mixes, std=MIX_SCALE, dtype=f32),
        )


def _layer_weights(shape: DecoderShape, source: _Source) -> LayerWeights:
    hidden, heads, groups = shape.hidden_size, shape.num_heads, shape.o_groups
    experts, inter, shared = (
        shape.num_local_experts,
        shape.moe_intermediate_size,
        shape.shared_intermediate_size,
    )
    return LayerWeights(
        attn_boundary=source.boundary(shape.hc_mult, hidden),
        wqkv_a=source.matrix(hidden, shape.q_lora_rank + shape.head_dim),
        q_norm_weight=source.norm(shape.q_lora_rank),
        wq_b=source.matrix(shape.q_lora_rank, heads * shape.head_dim),
        wo_a=source.matrix(groups, heads // groups * shape.head_dim, shape.o_lora_rank),
        wo_b=source.matrix(groups * shape.o_lora_rank, hidden),
        ffn_boundary=source.boundary(shape.hc_mult, hidden),
        router=source.matrix(hidden, shape.num_experts),
        w13=source.matrix(experts, hidden, 2 * inter),
        w2=source.matrix(experts, inter, hidden),
        shared_w13=source.matrix(hidden, 2 * shared),
        shared_w2=source.matrix(shared, hidden),
    )


def rope_table(max_position: int, rope_dim: int, device: torch.device | str) -> Tensor:
    """cos_sin (max_position, rope_dim) float32, made in float64.

    A row is [cos | sin] of position * 10000^(-2i / rope_dim), i below rope_dim / 2.
    """
    frequency = ROPE_BASE ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64, device=device) / rope_dim)
    angle = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def make_weights(shape: DecoderShape, device: torch.device | str, seed: int) -> DecoderWeights:
    """Random weights of `shape` on `device`: the same for the same seed on the same kind of device.

    Layers share `num_weight_sets` sets in a cycle; the KV-source layer has a `wkv_shared` of its own besides.
    """
    source = _Source(shape, device, seed)
    sets = [_layer_weights(shape, source) for _ in range(min(shape.num_weight_sets, shape.num_layers))]
    layers = [sets[index % len(sets)] for index in range(shape.num_layers)]
    wkv_shared = source.matrix(shape.hidden_size, shape.head_dim)
    layers[shape.cut] = attrs.evolve(layers[shape.cut], wkv_shared=wkv_shared)
    return DecoderWeights(
        embed=source.normal(shape.vocab_size, shape.hidden_size, std=EMBED_STD),
        layers=tuple(layers),
        head_norm_weight=source.norm(shape.hidden_size),
        lm_head=source.matrix(shape.hidden_size, shape.vocab_size),
        cos_sin=rope_table(shape.max_position, shape.rope_dim, device),
    )
