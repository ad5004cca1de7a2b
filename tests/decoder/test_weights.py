"""The decoder's weights and caches: shapes, seeds, and the cycle of weight sets."""

import math

import attrs
import pytest
import torch
from torch import Tensor

from replay_sim.config.shapes import TINY
from replay_sim.decoder.kv_cache import KVCache
from replay_sim.decoder.weights import BoundaryWeights, make_weights, rope_table

SHAPE = attrs.evolve(TINY, num_weight_sets=2, num_local_experts=3, first_local_expert=4)
HIDDEN, HC, MIXES = 64, 4, 24


def test_weights_have_the_shapes_of_the_decoder() -> None:
    weights = make_weights(SHAPE, "cpu", seed=0)
    layer = weights.layers[0]
    shapes = {
        field.name: tuple(getattr(layer, field.name).shape)
        for field in attrs.fields(type(layer))
        if isinstance(getattr(layer, field.name), Tensor)
    }
    assert shapes == {
        "wqkv_a": (HIDDEN, 48 + 32),
        "q_norm_weight": (48,),
        "wq_b": (48, 4 * 32),
        "wo_a": (2, 2 * 32, 32),
        "wo_b": (2 * 32, HIDDEN),
        "router": (HIDDEN, 8),
        "w13": (3, HIDDEN, 2 * 32),
        "w2": (3, 32, HIDDEN),
        "shared_w13": (HIDDEN, 2 * 16),
        "shared_w2": (16, HIDDEN),
    }
    assert weights.embed.shape == (256, HIDDEN) and weights.lm_head.shape == (HIDDEN, 256)
    assert weights.cos_sin.shape == (SHAPE.max_position, 8)


def test_boundary_mixes_are_float32_in_any_activation_dtype() -> None:
    weights = make_weights(attrs.evolve(SHAPE, dtype="bfloat16"), "cpu", seed=0)
    for layer in weights.layers:
        for boundary in (layer.attn_boundary, layer.ffn_boundary):
            assert isinstance(boundary, BoundaryWeights)
            assert boundary.norm_weight.dtype == torch.bfloat16
            assert boundary.mix_weight.shape == (HC * HIDDEN, MIXES)
            assert boundary.mix_scale.shape == (3,) and boundary.mix_bias.shape == (MIXES,)
            parts = (boundary.mix_weight, boundary.mix_scale, boundary.mix_bias)
            assert {part.dtype for part in parts} == {torch.float32}
    assert weights.layers[0].w13.dtype == torch.bfloat16


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, same, other = (make_weights(SHAPE, "cpu", seed) for seed in (5, 5, 6))
    assert torch.equal(one.layers[1].w13, same.layers[1].w13) and torch.equal(one.lm_head, same.lm_head)
    assert not torch.equal(one.layers[1].w13, other.layers[1].w13)


def test_layers_take_the_weight_sets_in_turn_and_the_cut_alone_has_shared_kv() -> None:
    layers = make_weights(SHAPE, "cpu", seed=0).layers
    assert [layer.wq_b is layers[index % 2].wq_b for index, layer in enumerate(layers)] == [True] * 6
    assert layers[0].wq_b is not layers[1].wq_b
    assert [layer.wkv_shared is not None for layer in layers] == [index == SHAPE.cut for index in range(6)]


def test_the_rotary_table_holds_cosines_then_sines() -> None:
    table = rope_table(5000, 8, "cpu")
    assert table.dtype == torch.float32
    for position in (0, 1, 4999):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            assert float(table[position, i]) == pytest.approx(math.cos(angle), abs=1e-7)
            assert float(table[position, 4 + i]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_each_layer_has_a_window_cache_and_all_share_one() -> None:
    cache = KVCache(attrs.evolve(SHAPE, dtype="bfloat16"), 48, "cpu")
    tensors = [*cache.window, cache.shared]
    assert len(tensors) == SHAPE.num_layers + 1
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.shape == (48, 32) and tensor.dtype == torch.bfloat16 for tensor in tensors)


def test_a_cache_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots 0"):
        KVCache(SHAPE, 0, "cpu")
