"""The reference decoder on a CPU, whole and split in three, without any replay."""

import attrs
import pytest
import torch
from decoder.steps import NUM_SLOTS, Step, make_step
from torch import Tensor

from replay_sim.capture import capture
from replay_sim.capture.host import HostBackend
from replay_sim.config.shapes import TINY, DecoderShape
from replay_sim.decoder import ops
from replay_sim.decoder.kv_cache import KVCache
from replay_sim.decoder.model import Decoder
from replay_sim.decoder.weights import make_weights
from replay_sim.replay.context import use_forward_context

# A prompt longer than the window, one shorter, and a decode of one token at position 21.
SPANS = [(0, 19), (0, 5), (21, 22)]
ROWS, PADDED = 25, 32
POISON = [torch.nan, torch.inf, 1e30]

SHAPES = {
    "float32": TINY,
    "bfloat16": attrs.evolve(TINY, dtype="bfloat16"),
    "one_group_few_experts": attrs.evolve(TINY, o_groups=1, num_local_experts=3, first_local_expert=2),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def make_decoder(shape: DecoderShape) -> Decoder:
    return Decoder(shape, make_weights(shape, "cpu", seed=1), KVCache(shape, NUM_SLOTS, "cpu"))


def run_whole(decoder: Decoder, step: Step) -> tuple[Tensor, ...]:
    with use_forward_context(step.context):
        state = decoder.embed_and_start(step.input_ids, step.positions)
        decoder.run_first_layers(state)
        return decoder.run_replay_layers(state.row_tensors())


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: int) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one[:rows], other[:rows])


@every_shape
def test_a_forward_is_finite_and_deterministic(shape: DecoderShape) -> None:
    step = make_step(shape, SPANS, PADDED)
    outputs = run_whole(make_decoder(shape), step)
    hidden, pre = outputs
    assert hidden.shape == (PADDED, shape.hc_mult, shape.hidden_size)
    assert hidden.dtype == getattr(torch, shape.dtype)
    assert pre.shape == (PADDED, shape.hc_mult) and pre.dtype == torch.float32
    assert bool(hidden[:ROWS].isfinite().all()) and bool(pre[:ROWS].isfinite().all())
    assert 0.5 < float(hidden[:ROWS].float().std()) < 20
    assert_same_bits(run_whole(make_decoder(shape), step), outputs, ROWS)


@every_shape
def test_inference_mode_changes_no_bit(shape: DecoderShape) -> None:
    step = make_step(shape, SPANS, PADDED)
    expected = run_whole(make_decoder(shape), step)
    with torch.inference_mode():
        assert_same_bits(run_whole(make_decoder(shape), step), expected, ROWS)


@every_shape
def test_the_head_gives_logits_of_the_rows_asked_for(shape: DecoderShape) -> None:
    decoder, step = make_decoder(shape), make_step(shape, SPANS, PADDED)
    hidden, pre = run_whole(decoder, step)
    rows = torch.tensor([18, 23, 24])
    logits = decoder.head(hidden, pre, rows)
    assert logits.shape == (3, shape.vocab_size) and bool(logits.isfinite().all())
    u = ops.collapse(hidden[rows], pre[rows], decoder.weights.head_norm_weight, shape.rms_eps)
    assert torch.equal(logits, u @ decoder.weights.lm_head)


@every_shape
def test_writing_the_first_layers_kv_before_the_replay_layers_changes_no_bit(shape: DecoderShape) -> None:
    """L3."""
    whole, split = make_decoder(shape), make_decoder(shape)
    expected = run_whole(whole, make_step(shape, SPANS, PADDED))
    step = make_step(shape, SPANS, PADDED, kv_written=True)
    with use_forward_context(step.context):
        state = split.embed_and_start(step.input_ids, step.positions)
        split.run_first_layers(state)
        split.write_batch_kv(state.row_tensors())
        assert torch.equal(split.cache.window[shape.cut], whole.cache.window[shape.cut])
        assert torch.equal(split.cache.shared, whole.cache.shared)
        assert_same_bits(split.run_replay_layers(state.row_tensors()), expected, ROWS)


def test_the_first_replay_layer_writes_no_kv_that_is_written() -> None:
    """L3: the kept rows' KV lies in the cache already, of every row."""
    decoder, step = make_decoder(TINY), make_step(TINY, SPANS, PADDED, kv_written=True)
    run_whole(decoder, step)
    written = [bool(cache.any()) for cache in decoder.cache.window]
    assert written == [index != TINY.cut for index in range(TINY.num_layers)]
    assert not decoder.cache.shared.any()


@every_shape
def test_only_the_rows_slots_are_written(shape: DecoderShape) -> None:
    """S8."""
    decoder, step = make_decoder(shape), make_step(shape, SPANS, PADDED)
    run_whole(decoder, step)
    slots = step.context.metadata["window"].slot_mapping[:ROWS]
    for cache in (*decoder.cache.window, decoder.cache.shared):
        assert cache.any(1).nonzero().squeeze(1).tolist() == sorted(slots.tolist())


@every_shape
@pytest.mark.parametrize("poison", POISON)
def test_poisoned_pads_change_no_bit_of_a_real_row(shape: DecoderShape, poison: float) -> None:
    """G5, S8."""
    step = make_step(shape, SPANS, PADDED)
    expected = run_whole(make_decoder(shape), step)
    decoder = make_decoder(shape)
    with use_forward_context(step.context):
        state = decoder.embed_and_start(step.input_ids, step.positions)
        for tensor in state.row_tensors().values():
            assert tensor is not None
            tensor[ROWS:] = poison if tensor.is_floating_point() else 2**30
        decoder.run_first_layers(state)
        actual = decoder.run_replay_layers(state.row_tensors())
    assert_same_bits(actual, expected, ROWS)


def test_padding_changes_nothing_but_rounding() -> None:
    exact = run_whole(make_decoder(TINY), make_step(TINY, SPANS, ROWS))
    padded = run_whole(make_decoder(TINY), make_step(TINY, SPANS, PADDED))
    for one, other in zip(padded, exact, strict=True):
        torch.testing.assert_close(one[:ROWS], other, rtol=1e-4, atol=1e-4)


def test_a_prompt_in_chunks_equals_the_prompt_in_one_step() -> None:
    """S7, without trimming: later chunks read the window and shared KV of the earlier ones."""
    once = run_whole(make_decoder(TINY), make_step(TINY, [(0, 24)], 24))
    decoder = make_decoder(TINY)
    chunks = [run_whole(decoder, make_step(TINY, [span], 16)) for span in ((0, 10), (10, 11), (11, 24))]
    for index, whole in enumerate(once):
        parts = [chunk[index][:size] for chunk, size in zip(chunks, (10, 1, 13), strict=True)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


def test_requests_beside_each_other_do_not_mix() -> None:
    together = run_whole(make_decoder(TINY), make_step(TINY, [(0, 12), (0, 9)], 21))
    alone = run_whole(make_decoder(TINY), make_step(TINY, [(0, 12)], 12))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one[:12], other, rtol=1e-4, atol=1e-4)


def test_replay_layers_leave_their_inputs_as_they_are() -> None:
    decoder, step = make_decoder(TINY), make_step(TINY, SPANS, PADDED)
    with use_forward_context(step.context):
        inputs = decoder.embed_and_start(step.input_ids, step.positions).row_tensors()
        before = {name: tensor.clone() for name, tensor in inputs.items() if tensor is not None}
        decoder.write_batch_kv(inputs)
        decoder.run_replay_layers(inputs)
    for name, tensor in before.items():
        assert inputs[name] is not None and torch.equal(inputs[name], tensor)


def test_aux_states_are_the_mean_of_the_merged_streams_after_their_layers() -> None:
    """O3: early aux states come from the layers before the cut, late ones from the replay layers."""
    shape = attrs.evolve(TINY, early_aux_layers=(0, 2), late_aux_layers=(3, TINY.num_layers - 1))
    decoder, step = make_decoder(shape), make_step(shape, SPANS, PADDED)
    with use_forward_context(step.context):
        state = decoder.embed_and_start(step.input_ids, step.positions)
        early = decoder.run_first_layers(state)
        merged = ops.merge(state.hidden_states, state.residual, state.post_mix, state.res_mix)
        hidden, _, *late = decoder.run_replay_layers(state.row_tensors())
    assert [aux.shape for aux in (*early, *late)] == [(PADDED, shape.hidden_size)] * 4
    assert torch.equal(early[-1][:ROWS], merged.mean(1)[:ROWS])
    assert torch.equal(late[-1][:ROWS], hidden.mean(1)[:ROWS])


@every_shape
def test_a_captured_forward_has_one_break_a_layer_and_replays_bit_for_bit(shape: DecoderShape) -> None:
    """C1, C12: dense work is captured, attention and KV writes run live."""
    step = make_step(shape, SPANS, PADDED)
    expected = run_whole(make_decoder(shape), step)
    decoder, backend = make_decoder(shape), HostBackend()
    with use_forward_context(step.context):
        pool, stream = backend.make_pool(), backend.make_stream()
        graph = capture(lambda: run_whole(decoder, step), backend=backend, pool=pool, stream=stream)
        assert graph.num_breaks == shape.num_layers
        assert_same_bits(graph.replay(), expected, ROWS)


def test_writing_the_batch_kv_is_one_break() -> None:
    """L3: the boundary and projections are captured, the write is live."""
    step = make_step(TINY, SPANS, PADDED)
    whole, decoder, backend = make_decoder(TINY), make_decoder(TINY), HostBackend()
    with use_forward_context(step.context):
        inputs = decoder.embed_and_start(step.input_ids, step.positions).row_tensors()
        whole.write_batch_kv(inputs)
        graph = capture(
            lambda: decoder.write_batch_kv(inputs),
            backend=backend,
            pool=backend.make_pool(),
            stream=backend.make_stream(),
        )
        graph.replay()
    assert graph.num_breaks == 1
    assert torch.equal(decoder.cache.shared, whole.cache.shared)
    assert torch.equal(decoder.cache.window[TINY.cut], whole.cache.window[TINY.cut])


def test_an_unknown_input_is_named() -> None:
    decoder, step = make_decoder(TINY), make_step(TINY, SPANS, PADDED)
    inputs = decoder.embed_and_start(step.input_ids, step.positions).row_tensors()
    with pytest.raises(TypeError, match="deferred"):
        decoder.run_replay_layers({**inputs, "deferred": inputs["residual"]})
