"""Decoder shapes: what is published, and sizes that cannot go together."""

import json
from pathlib import Path

import attrs
import pytest

from replay_sim.config import FLASH_RANK, SHAPES, TINY

TENSOR_PARALLEL = 8


def test_flash_rank_is_one_rank_of_the_published_shape(shared: Path) -> None:
    model = json.loads((shared / "data/model_shapes.json").read_text())["models"]["DeepSeek-V4.1-Flash"]
    same = {
        "hidden_size": "hidden_size",
        "hc_mult": "hc_mult",
        "num_layers": "num_hidden_layers",
        "window": "sliding_window",
        "index_topk": "index_topk",
        "head_dim": "head_dim",
        "rope_dim": "qk_rope_head_dim",
        "q_lora_rank": "q_lora_rank",
        "o_lora_rank": "o_lora_rank",
        "num_experts": "n_routed_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
        "routed_scaling_factor": "routed_scaling_factor",
        "swiglu_limit": "swiglu_limit",
        "hc_eps": "hc_eps",
        "rms_eps": "rms_norm_eps",
        "sinkhorn_iters": "hc_sinkhorn_iters",
        "vocab_size": "vocab_size",
    }
    for ours, theirs in same.items():
        assert getattr(FLASH_RANK, ours) == model[theirs], ours
    assert FLASH_RANK.cut == max(model["kv_source_layer_ids"])
    assert FLASH_RANK.num_replay_layers == model["replay"]["vllm_0_33_0"]["num_replay_layers"]
    assert FLASH_RANK.late_aux_layers == tuple(model["dspark"]["target_layer_ids"])
    assert FLASH_RANK.num_heads * TENSOR_PARALLEL == model["num_attention_heads"]
    assert FLASH_RANK.o_groups * TENSOR_PARALLEL == model["o_groups"]
    assert FLASH_RANK.shared_intermediate_size * TENSOR_PARALLEL == model["moe_intermediate_size"]


def test_shapes_are_found_by_name() -> None:
    assert SHAPES == {"tiny": TINY, "flash-rank": FLASH_RANK}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"cut": 6},
        {"cut": -1},
        {"window": 0},
        {"rope_dim": 7},
        {"rope_dim": 64},
        {"o_groups": 3},
        {"num_local_experts": 9},
        {"first_local_expert": 1},
        {"early_aux_layers": (3,)},
        {"late_aux_layers": (2,)},
        {"late_aux_layers": (6,)},
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=f"tiny: .*{next(iter(change)).split('_')[0]}"):
        attrs.evolve(TINY, **change)
