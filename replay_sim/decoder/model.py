"""The reference decoder, made to run split in three: first layers, KV write of the batch, replay layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from replay_sim.config.shapes import DecoderShape
from replay_sim.decoder import ops
from replay_sim.decoder.kv_cache import KVCache
from replay_sim.decoder.layer import DecoderLayer
from replay_sim.decoder.state import DecoderState
from replay_sim.decoder.weights import DecoderWeights
from replay_sim.replay.row_tensors import RowTensors


class Decoder:
    """The decoder of `shape` over its weights and KV cache, all on one device.

    One step is `embed_and_start`, `run_first_layers`, then either `run_replay_layers` on the whole batch, or
    `write_batch_kv` on it and `run_replay_layers` on the replay batch under that one's forward context, then
    `head`. All but the first and the last run under a forward context.
    """

    def __init__(self, shape: DecoderShape, weights: DecoderWeights, cache: KVCache) -> None:
        self.shape, self.weights, self.cache = shape, weights, cache
        self.layers = [
            DecoderLayer(shape, index, layer_weights, weights.cos_sin, cache)
            for index, layer_weights in enumerate(weights.layers)
        ]

    def embed_and_start(self, input_ids: Tensor, positions: Tensor) -> DecoderState:
        """The state before the first layer: ids (T) int32 or int64 of the vocabulary, positions (T)."""
        rows, hc, hidden = input_ids.shape[0], self.shape.hc_mult, self.shape.hidden_size
        x = F.embedding(input_ids, self.weights.embed)
        ones = torch.ones(rows, hc, 1, dtype=torch.float32, device=x.device)
        return DecoderState(
            hidden_states=x,
            positions=positions,
            input_ids=input_ids,
            pre_mix=ones.new_full((rows, hc), 1.0 / hc),
            post_mix=ones,
            res_mix=torch.eye(hc, device=x.device).repeat(rows, 1, 1),
            residual=x.new_zeros(rows, hc, hidden),
        )

    def run_first_layers(self, state: DecoderState) -> tuple[Tensor, ...]:
        """Advances `state` by the layers before the cut; returns early aux states, (T, h) act each (O3)."""
        return self._run(state, 0, self.shape.cut, self.shape.early_aux_layers)

    def write_batch_kv(self, inputs: RowTensors) -> None:
        """Writes the first replay layer's window and shared KV of every row of the seven `inputs` (L3)."""
        self.layers[self.shape.cut].write_batch_kv(DecoderState.of(inputs))

    def run_replay_layers(self, inputs: RowTensors) -> tuple[Tensor, ...]:
        """The layers from the cut on and the last merge, on any rows' seven `inputs` (L1).

        Returns hidden_states (T, hc, h) act, all streams merged, pre_mix (T, hc) float32, then the late aux
        states, (T, h) act each. Writes the first replay layer's KV unless the context says it is written.
        """
        state = DecoderState.of(inputs)
        late_aux = self._run(state, self.shape.cut, self.shape.num_layers, self.shape.late_aux_layers)
        return _merged(state), state.pre_mix, *late_aux

    def head(self, hidden_states: Tensor, pre_mix: Tensor, rows: Tensor) -> Tensor:
        """Logits (n, vocab) act of `rows` (n) int64 of the replay layers' outputs (T, hc, h) and (T, hc)."""
        streams, pre = hidden_states.index_select(0, rows), pre_mix.index_select(0, rows)
        u = ops.collapse(streams, pre, self.weights.head_norm_weight, self.shape.rms_eps)
        return torch.mm(u, self.weights.lm_head)

    def _run(self, state: DecoderState, first: int, end: int, aux_layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        aux = []
        for index in range(first, end):
            self.layers[index].run(state)
            if index in aux_layers:
                aux.append(_merged(state).mean(1))
        return tuple(aux)


def _merged(state: DecoderState) -> Tensor:
    return ops.merge(state.hidden_states, state.residual, state.post_mix, state.res_mix)
