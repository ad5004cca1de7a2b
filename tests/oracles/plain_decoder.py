"""The plain decoder: decoder.md in float64, a row at a time, with S4's mask for steps that trim."""

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from replay_sim.config.shapes import DecoderShape
from replay_sim.decoder.weights import BoundaryWeights, DecoderWeights, LayerWeights

Vector = npt.NDArray[np.float64]
ROPE_BASE = 10000.0


@attrs.frozen(kw_only=True)
class Rows:
    """One request's rows in one step: the tokens at positions computed, computed + 1, ...

    window_start: the lowest position whose window KV the request holds.
    """

    request_id: str
    token_ids: Sequence[int]
    computed: int = 0
    prefill: bool = True
    all_rows_read: bool = False
    window_start: int = 0

    @property
    def seq_len(self) -> int:
        """Tokens of the request once the step has run."""
        return self.computed + len(self.token_ids)


@attrs.frozen
class RowOutput:
    """What one row leaves: streams (hc, h), pre (hc) and aux states (h); all but early aux absent if it was trimmed."""

    early_aux: tuple[Vector, ...]
    streams: Vector | None = None
    pre: Vector | None = None
    late_aux: tuple[Vector, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the replay layers ran on the row."""
        return self.streams is not None


@attrs.frozen
class History:
    """One request's latents (d) by position: of each layer's window, and of the shared KV."""

    window: tuple[dict[int, Vector], ...]
    shared: dict[int, Vector]


@attrs.define
class State:
    """A row between two sublayers: x (h), residual (hc, h), pre (hc), post (hc), res (hc, hc)."""

    x: Vector
    residual: Vector
    pre: Vector
    post: Vector
    res: Vector

    def merged(self) -> Vector:
        """The streams once the last sublayer's output has joined them, (hc, h)."""
        return self.res @ self.residual + np.outer(self.post, self.x)


class PlainDecoder:
    """Runs whole histories of requests, step by step, and keeps every latent by request, layer and position."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights) -> None:
        self.shape = shape
        self.weights = _in_float64(weights)
        self.histories: dict[str, History] = {}

    def step(self, requests: Iterable[Rows], *, trimmed: bool) -> list[RowOutput]:
        """The outputs of all rows in batch order; `trimmed`: the replay layers ran on a replay batch (S1, S4)."""
        return [output for request in requests for output in self._run_request(request, trimmed)]

    def logits(self, output: RowOutput) -> Vector:
        """The head on one kept row, (vocab)."""
        u = self._rms_norm(output.pre @ output.streams) * self.weights.head_norm_weight
        return u @ self.weights.lm_head

    def _run_request(self, request: Rows, trimmed: bool) -> list[RowOutput]:
        """Each row in turn through all its layers; a row reads no later one, so this order is free."""
        window, length = self.shape.window, len(request.token_ids)
        history = self.histories.setdefault(
            request.request_id, History(tuple({} for _ in range(self.shape.num_layers)), {})
        )
        trims = trimmed and request.prefill and not request.all_rows_read and length > window
        first_kept = request.seq_len - window if trims else request.computed
        start_first = request.window_start
        start_rest = max(start_first, request.seq_len - window) if trims else start_first
        outputs = []
        for offset, token in enumerate(request.token_ids):
            position = request.computed + offset
            state = self._start(token)
            early = self._layers(range(self.shape.cut), state, position, history, start_first)
            aux = tuple(early[layer] for layer in self.shape.early_aux_layers)
            if position < first_kept:
                self._cut_layer_latents(state, position, history)
                outputs.append(RowOutput(aux))
                continue
            late = self._layers(range(self.shape.cut, self.shape.cut + 1), state, position, history, start_first)
            late |= self._layers(range(self.shape.cut + 1, self.shape.num_layers), state, position, history, start_rest)
            late_aux = tuple(late[layer] for layer in self.shape.late_aux_layers)
            outputs.append(RowOutput(aux, state.merged(), state.pre, late_aux))
        return outputs

    def _start(self, token: int) -> State:
        hc, hidden = self.shape.hc_mult, self.shape.hidden_size
        return State(
            x=self.weights.embed[token],
            residual=np.zeros((hc, hidden)),
            pre=np.full(hc, 1 / hc),
            post=np.ones(hc),
            res=np.eye(hc),
        )

    def _layers(
        self, layers: Iterable[int], state: State, position: int, history: History, window_start: int
    ) -> dict[int, Vector]:
        """Take the state through layers; the mean over streams after each of them, by layer."""
        means = {}
        for layer in layers:
            weights = self.weights.layers[layer]
            u = self._boundary(state, weights.attn_boundary)
            self._write(layer, u, position, history)
            state.x = self._attention(layer, u, position, history, window_start)
            state.x = self._experts(weights, self._boundary(state, weights.ffn_boundary))
            means[layer] = state.merged().mean(axis=0)
        return means

    def _cut_layer_latents(self, state: State, position: int, history: History) -> None:
        """A trimmed row's part in the replay layers: the latents of the cut layer, and no more."""
        boundary = self.weights.layers[self.shape.cut].attn_boundary
        self._write(self.shape.cut, self._boundary(state, boundary), position, history)

    def _boundary(self, state: State, weights: BoundaryWeights) -> Vector:
        """Merge, collapse with the pre of the boundary before, and mix; the sublayer's input u (h)."""
        hc, scale = self.shape.hc_mult, weights.mix_scale
        state.residual = state.merged()
        u = self._rms_norm(state.pre @ state.residual) * weights.norm_weight
        mixed = self._rms_norm(state.residual.reshape(-1)) @ weights.mix_weight
        pre, post, res = np.split(mixed, (hc, 2 * hc))
        bias_pre, bias_post, bias_res = np.split(weights.mix_bias, (hc, 2 * hc))
        state.pre = _sigmoid(pre * scale[0] + bias_pre) + self.shape.hc_eps
        state.post = 2.0 * _sigmoid(post * scale[1] + bias_post)
        state.res = np.exp(res * scale[2] + bias_res).reshape(hc, hc)
        for _ in range(self.shape.sinkhorn_iters):
            state.res = state.res / state.res.sum(axis=1, keepdims=True)
            state.res = state.res / state.res.sum(axis=0, keepdims=True)
        return u

    def _write(self, layer: int, u: Vector, position: int, history: History) -> None:
        """The row's window latent, and in the KV-source layer its shared latent too."""
        weights = self.weights.layers[layer]
        latent = (u @ weights.wqkv_a)[self.shape.q_lora_rank :]
        history.window[layer][position] = self._rotate(latent, position)
        if layer == self.shape.cut:
            history.shared[position] = self._rotate(u @ weights.wkv_shared, position)

    def _attention(self, layer: int, u: Vector, position: int, history: History, window_start: int) -> Vector:
        """Attend the layer's window, and from the cut on the shared entries; the next x (h)."""
        shape, weights = self.shape, self.weights.layers[layer]
        lowest = max(window_start, position - shape.window + 1)
        latents = [history.window[layer][seen] for seen in range(lowest, position + 1)]
        if layer >= shape.cut:
            count = min(shape.index_topk, position + 1)
            latents += [history.shared[index * (position + 1) // count] for index in range(count)]
        keys = np.array(latents)
        query = self._rms_norm((u @ weights.wqkv_a)[: shape.q_lora_rank]) * weights.q_norm_weight
        heads = (query @ weights.wq_b).reshape(shape.num_heads, shape.head_dim)
        attended = []
        for head in heads:
            scores = keys @ self._rotate(head, position) * shape.head_dim**-0.5
            chances = np.exp(scores - scores.max())
            attended.append(chances / chances.sum() @ keys)
        groups = np.array(attended).reshape(shape.o_groups, -1)
        return np.concatenate([groups[index] @ weights.wo_a[index] for index in range(shape.o_groups)]) @ weights.wo_b

    def _experts(self, weights: LayerWeights, u: Vector) -> Vector:
        """The shared expert and those of the chosen experts that this rank holds; the next x (h)."""
        shape = self.shape
        scores = np.sqrt(np.logaddexp(0.0, u @ weights.router))
        chosen = sorted(range(shape.num_experts), key=lambda expert: (-scores[expert], expert))
        chosen = chosen[: shape.num_experts_per_tok]
        total = scores[chosen].sum()
        result = self._swiglu(u @ weights.shared_w13) @ weights.shared_w2
        for expert in chosen:
            local = expert - shape.first_local_expert
            if 0 <= local < shape.num_local_experts:
                share = scores[expert] / total * shape.routed_scaling_factor
                result = result + share * (self._swiglu(u @ weights.w13[local]) @ weights.w2[local])
        return result

    def _swiglu(self, gate_up: Vector) -> Vector:
        gate, up = np.split(gate_up, 2)
        gate = np.minimum(gate, self.shape.swiglu_limit)
        up = np.clip(up, -self.shape.swiglu_limit, self.shape.swiglu_limit)
        return gate * _sigmoid(gate) * up

    def _rms_norm(self, vector: Vector) -> Vector:
        return vector / np.sqrt((vector * vector).mean() + self.shape.rms_eps)

    def _rotate(self, vector: Vector, position: int) -> Vector:
        """Rotary embedding on the last rope_dim entries, halves (a, b) -> (a cos - b sin, b cos + a sin)."""
        half = self.shape.rope_dim // 2
        angle = position * ROPE_BASE ** (-np.arange(half) / half)
        rest, a, b = np.split(vector, (len(vector) - 2 * half, len(vector) - half))
        return np.concatenate((rest, a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)))


def _sigmoid(values: Vector) -> Vector:
    return 1.0 / (1.0 + np.exp(-values))


def _in_float64(weights):
    """The same attrs tree with every tensor as a float64 array, converted once however often it is shared."""
    known: dict[int, object] = {}

    def convert(value):
        if id(value) not in known:
            if isinstance(value, torch.Tensor):
                known[id(value)] = value.detach().to("cpu", torch.float64).numpy()
            elif isinstance(value, tuple):
                known[id(value)] = tuple(convert(item) for item in value)
            elif attrs.has(type(value)):
                fields = (field.name for field in attrs.fields(type(value)))
                known[id(value)] = type(value)(**{name: convert(getattr(value, name)) for name in fields})
            else:
                known[id(value)] = value
        return known[id(value)]

    return convert(weights)
