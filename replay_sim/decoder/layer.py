"""One decoder layer: boundary, attention, boundary, experts; its attention and KV writes are eager breaks."""

import torch
from torch import Tensor

from replay_sim.batch.metadata import AttentionMetadata
from replay_sim.capture import eager_break
from replay_sim.config.shapes import DecoderShape
from replay_sim.decoder import ops
from replay_sim.decoder.kv_cache import KVCache
from replay_sim.decoder.state import DecoderState
from replay_sim.decoder.weights import BoundaryWeights, LayerWeights
from replay_sim.replay.context import get_forward_context

WINDOW_KEY = "window"
FIRST_REPLAY_WINDOW_KEY = "first_replay_window"
REPLAY_WINDOW_KEY = "replay_window"


def metadata_key(shape: DecoderShape, index: int) -> str:
    """The key of layer `index`'s window metadata: before the cut, at the cut, after the cut (S4, L1)."""
    if index < shape.cut:
        return WINDOW_KEY
    return FIRST_REPLAY_WINDOW_KEY if index == shape.cut else REPLAY_WINDOW_KEY


class DecoderLayer:
    """Layer `index` over its weights and the whole decoder's KV cache.

    The layer at the cut is the KV source: it writes the shared cache, which it and the layers after it read.
    """

    def __init__(self, shape: DecoderShape, index: int, weights: LayerWeights, cos_sin: Tensor, cache: KVCache) -> None:
        self.shape = shape
        self.weights = weights
        self.cos_sin = cos_sin
        self.metadata_key = metadata_key(shape, index)
        self.is_kv_source = index == shape.cut
        self.window_cache = cache.window[index]
        self.shared_cache = cache.shared if index >= shape.cut else None

    def run(self, state: DecoderState) -> None:
        """Advances `state` by this layer, under the current forward context."""
        u = self._boundary(state, self.weights.attn_boundary)
        state.hidden_states = self._attention(u, state.positions)
        u = self._boundary(state, self.weights.ffn_boundary)
        state.hidden_states = self._experts(u)

    def write_batch_kv(self, state: DecoderState) -> None:
        """Writes this KV-source layer's window and shared latents of every row; `state` stays as is (L3)."""
        u = self._mix(state, self.weights.attn_boundary)[1]
        kv = self._query_and_latent(u, state.positions)[1]
        kv_write_break(kv, self._shared_latent(u, state.positions), self)

    def _mix(self, state: DecoderState, weights: BoundaryWeights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return ops.boundary(
            state.hidden_states,
            state.residual,
            state.pre_mix,
            state.post_mix,
            state.res_mix,
            weights.norm_weight,
            weights.mix_weight,
            weights.mix_scale,
            weights.mix_bias,
            self.shape.sinkhorn_iters,
            self.shape.rms_eps,
            self.shape.hc_eps,
        )

    def _boundary(self, state: DecoderState, weights: BoundaryWeights) -> Tensor:
        state.residual, u, state.pre_mix, state.post_mix, state.res_mix = self._mix(state, weights)
        return u

    def _query_and_latent(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised query latent (T, q_lora) and the window latent (T, d)."""
        weights, shape = self.weights, self.shape
        qkv_a = torch.mm(u, weights.wqkv_a)
        return ops.q_norm_kv_rope(
            qkv_a, weights.q_norm_weight, positions, self.cos_sin, shape.q_lora_rank, shape.rms_eps
        )

    def _shared_latent(self, u: Tensor, positions: Tensor) -> Tensor:
        """The latent (T, d) of the shared cache."""
        assert self.weights.wkv_shared is not None
        latent = torch.mm(u, self.weights.wkv_shared)
        ops.rope_(latent.unsqueeze(1), positions, self.cos_sin)
        return latent

    def _attend(self, u: Tensor, positions: Tensor) -> Tensor:
        """The heads' outputs (T, H, d), after this layer's KV is written unless it was before (L3)."""
        latent, kv = self._query_and_latent(u, positions)
        q = torch.mm(latent, self.weights.wq_b).view(-1, self.shape.num_heads, self.shape.head_dim)
        ops.rope_(q, positions, self.cos_sin)
        writes_shared = self.is_kv_source and not get_forward_context().first_layer_kv_written
        shared = self._shared_latent(u, positions) if writes_shared else None
        out = torch.empty_like(q)
        attention_break(q, kv, shared, out, self)
        return out

    def _attention(self, u: Tensor, positions: Tensor) -> Tensor:
        rows, groups = u.shape[0], self.shape.o_groups
        by_group = self._attend(u, positions).view(rows, groups, -1).transpose(0, 1)
        low = torch.bmm(by_group, self.weights.wo_a).transpose(0, 1).reshape(rows, groups * self.shape.o_lora_rank)
        return torch.mm(low, self.weights.wo_b)

    def _experts(self, u: Tensor) -> Tensor:
        """The shared expert, and the routed experts that this rank holds; pads are routed nowhere."""
        weights, shape = self.weights, self.shape
        pair_token, pair_pos, offs, pair_weights = ops.route(
            torch.mm(u, weights.router),
            get_forward_context().num_rows,
            shape.first_local_expert,
            shape.num_local_experts,
            shape.num_experts_per_tok,
            shape.routed_scaling_factor,
        )
        inner = ops.swiglu(
            ops.grouped_matmul(ops.moe_gather(u, pair_token, offs), weights.w13, offs),
            shape.swiglu_limit,
            offs,
        )
        routed = ops.grouped_matmul(inner, weights.w2, offs)
        inner = ops.swiglu(torch.mm(u, weights.shared_w13), shape.swiglu_limit, None)
        return ops.moe_combine(routed, pair_pos, pair_weights, torch.mm(inner, weights.shared_w2))

    def write_kv(self, kv: Tensor, shared: Tensor | None, metadata: AttentionMetadata) -> None:
        """Writes the window latents and, if given, the shared latents through the slot mapping (S8)."""
        ops.write_kv_(self.window_cache, kv, metadata.slot_mapping)
        if shared is not None:
            assert self.shared_cache is not None
            ops.write_kv_(self.shared_cache, shared, metadata.slot_mapping)


@eager_break
def kv_write_break(kv: Tensor, shared: Tensor, layer: DecoderLayer) -> None:
    """Writes the KV-source layer's latents (T, d) of the whole batch."""
    layer.write_kv(kv, shared, get_forward_context().metadata[layer.metadata_key])


@eager_break
def attention_break(q: Tensor, kv: Tensor, shared: Tensor | None, out: Tensor, layer: DecoderLayer) -> None:
    """Writes `layer`'s KV, unless the first replay layer's was before, and attends: q (T, H, d) into `out`.

    `shared` (T, d) is given by the KV-source layer where it runs on the whole batch. Pad rows of `out` keep
    what they held (S8).
    """
    context = get_forward_context()
    metadata = context.metadata[layer.metadata_key]
    if not (layer.is_kv_source and context.first_layer_kv_written):
        layer.write_kv(kv, shared, metadata)
    shape = layer.shape
    ops.attend_(
        out,
        q,
        layer.window_cache,
        layer.shared_cache,
        metadata.positions,
        metadata.request_of_row,
        metadata.window_start,
        metadata.block_table,
        metadata.block_size,
        shape.window,
        shape.index_topk,
        shape.head_dim**-0.5,
    )
