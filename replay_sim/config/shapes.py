"""The decoder shapes that are planned for, run and measured."""

from collections.abc import Iterable

import attrs

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def _as_layers(layers: Iterable[int]) -> tuple[int, ...]:
    return tuple(layers)


@attrs.frozen(kw_only=True)
class DecoderShape:
    """Sizes of a decoder whose late layers share KV; all are counts but for the stated ones.

    Attributes:
        cut: the KV-source layer; it and all layers after it are the replay layers.
        window: sliding-window length of every layer.
        index_topk: most shared KV entries that a row attends to.
        num_local_experts, first_local_expert: the experts that this rank holds, of `num_experts`.
        num_weight_sets: distinct weight sets, which the layers take in turn.
        max_position: rows of the rotary table.
        dtype: the activation dtype, "bfloat16" or "float32".
        early_aux_layers, late_aux_layers: layers whose mean over streams is kept, below and from `cut`.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    name: str
    hidden_size: int
    hc_mult: int = 4
    num_layers: int
    cut: int
    window: int
    index_topk: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    num_experts: int
    num_local_experts: int
    first_local_expert: int = 0
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_eps: float = 1e-6
    rms_eps: float = 1e-6
    sinkhorn_iters: int = 20
    vocab_size: int
    num_weight_sets: int
    max_position: int
    dtype: str
    early_aux_layers: tuple[int, ...] = attrs.field(default=(), converter=_as_layers)
    late_aux_layers: tuple[int, ...] = attrs.field(default=(), converter=_as_layers)

    def __attrs_post_init__(self) -> None:
        experts_end = self.first_local_expert + self.num_local_experts
        checks = [
            (self.dtype in DTYPE_BYTES, f"dtype {self.dtype!r} must be one of {sorted(DTYPE_BYTES)}"),
            (
                0 <= self.cut < self.num_layers,
                f"cut {self.cut} must be from 0 to num_layers {self.num_layers} - 1",
            ),
            (self.window >= 1, f"window {self.window} must be at least 1"),
            (
                self.rope_dim >= 2 and self.rope_dim % 2 == 0,
                f"rope_dim {self.rope_dim} must be even and at least 2",
            ),
            (
                1 <= self.num_experts_per_tok <= self.num_experts,
                f"num_experts_per_tok {self.num_experts_per_tok} must be from 1 to num_experts {self.num_experts}",
            ),
            (
                self.rope_dim <= self.head_dim,
                f"rope_dim {self.rope_dim} must be at most head_dim {self.head_dim}",
            ),
            (
                self.num_heads % self.o_groups == 0,
                f"num_heads {self.num_heads} must be a multiple of o_groups {self.o_groups}",
            ),
            (
                0 <= self.first_local_expert and experts_end <= self.num_experts,
                f"first_local_expert {self.first_local_expert} + num_local_experts "
                f"{self.num_local_experts} must be at most num_experts {self.num_experts}",
            ),
            (
                all(0 <= layer < self.cut for layer in self.early_aux_layers),
                f"early_aux_layers {self.early_aux_layers} must lie below cut {self.cut}",
            ),
            (
                all(self.cut <= layer < self.num_layers for layer in self.late_aux_layers),
                f"late_aux_layers {self.late_aux_layers} must lie from cut {self.cut} to num_layers - 1",
            ),
        ]
        checks += [
            (getattr(self, name) >= 1, f"{name} {getattr(self, name)} must be at least 1")
            for name in ("num_local_experts", "index_topk", "hc_mult", "num_weight_sets", "max_position")
        ]
        checks += [
            (list(layers) == sorted(set(layers)), f"{name} {layers} must be ascending, each once")
            for name in ("early_aux_layers", "late_aux_layers")
            for layers in [getattr(self, name)]
        ]
        for holds, message in checks:
            if not holds:
                raise ValueError(f"{self.name}: {message}")

    @property
    def num_replay_layers(self) -> int:
        """Layers that run on the replay batch."""
        return self.num_layers - self.cut

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one activation element."""
        return DTYPE_BYTES[self.dtype]


TINY = DecoderShape(
    name="tiny",
    hidden_size=64,
    num_layers=6,
    cut=3,
    window=8,
    index_topk=16,
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=48,
    o_lora_rank=32,
    o_groups=2,
    num_experts=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_intermediate_size=16,
    vocab_size=256,
    num_weight_sets=6,
    max_position=16384,
    dtype="float32",
)
"""Small enough for tests on a CPU, with every part of the large one."""

FLASH_RANK = DecoderShape(
    name="flash-rank",
    hidden_size=5120,
    num_layers=40,
    cut=20,
    window=128,
    index_topk=512,
    num_heads=8,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=1,
    num_experts=384,
    num_local_experts=48,
    num_experts_per_tok=6,
    moe_intermediate_size=2304,
    shared_intermediate_size=288,
    rms_eps=1e-20,
    vocab_size=129280,
    num_weight_sets=4,
    max_position=262144,
    dtype="bfloat16",
    late_aux_layers=(37, 38, 39),
)
"""One rank's share of DeepSeek-V4.1-Flash under TP8 with 48 of 384 experts; aux as its drafter reads."""

SHAPES = {shape.name: shape for shape in (TINY, FLASH_RANK)}
