"""Known faults of planning: sizes that requests cannot fill, that were never captured, or that memory cannot hold."""

import attrs
import pytest
from decoder.serving import decode, make_plan, make_runner, prefill
from faults.helpers import SMOOTH, run_beside_eager
from faults.table import fault
from replay.fake_model import nothing_is_captured

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, dispatch_step
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.decoder.dummy_batch import dummy_decode
from replay_sim.plan import make_plan as plan_of

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL


def config(**settings) -> ServingConfig:
    return ServingConfig(**{"window": 8, "max_num_batched_tokens": 320, "decoder_replay_trim_threshold": 32} | settings)


def prefills(*lengths: int) -> Batch:
    return Batch(Request(length, 0, Phase.PREFILL) for length in lengths)


@fault("A1", "the plan ends at max_num_seqs x window rows (56 becomes 50); buffers are as long as the largest size")
def test_A1_a_batch_of_50_runs_at_50_rows_and_not_at_56(backend) -> None:
    plan = plan_of(
        config(
            window=1,
            max_num_seqs=50,
            decoder_replay_cudagraph_capture_sizes=[8, 56],
            cudagraph_capture_sizes=[160],
            cudagraph_mode="PIECEWISE",
        )
    )
    assert plan.replay_sizes == (8, 50) and any("56 becomes 50" in note for note in plan.notes)
    shape = attrs.evolve(SMOOTH, window=1)
    (record,) = run_beside_eager(backend, plan, [[prefill(f"p{index}", 3) for index in range(50)]], shape)
    assert (record.replay_rows, record.padded_rows, record.reason) == (50, 50, ReplayReason.GRAPH)


@fault("A2", "the maximum is always a size")
def test_A2_six_decodes_of_seven_tokens_take_the_graph_of_42(backend) -> None:
    settings = config(max_num_seqs=6, num_speculative_tokens=6, max_cudagraph_capture_size=42)
    plan = plan_of(settings)
    assert plan.model_sizes[-1] == plan.full_sizes[-1] == plan.replay_sizes[-1] == 42
    plan = attrs.evolve(plan, model_sizes=(), replay_sizes=())
    (record,) = run_beside_eager(backend, plan, [[decode(f"d{index}", 7) for index in range(6)]])
    assert (record.mode, record.padded_tokens) == (FULL, 42)


@fault("A3", "the bound is the last size, also off the step")
def test_A3_batches_of_9_to_12_rows_have_a_graph() -> None:
    plan = plan_of(config(window=4, max_num_seqs=3, max_cudagraph_capture_size=16))
    assert plan.replay_sizes == (4, 8, 12)
    for last in (1, 2, 3, 4):
        record = dispatch_step(
            prefills(5, 4, last), plan, model_sizes=(), full_sizes=(), replay_sizes=plan.replay_sizes
        )
        assert (record.replay_rows, record.padded_rows, record.replay_mode) == (8 + last, 12, PIECEWISE)


@fault("A5", "the runner refuses the plan before any capture, naming size, slots and setting")
def test_A5_a_size_of_64_over_a_cache_of_48_slots_is_refused_before_any_capture(backend) -> None:
    plan = make_plan(model_sizes=(), full_sizes=(), replay_sizes=(64,))
    message = "replay_sizes: 64 is not allowed; the KV cache has 48 slots: .*decoder_replay_cudagraph_capture_sizes"
    with nothing_is_captured(backend), pytest.raises(ValueError, match=message):
        make_runner(backend, plan, num_blocks=6)


@fault("A5")
def test_A5_a_size_whose_dummy_requests_no_block_table_holds_is_refused_before_any_capture(backend) -> None:
    """Its kind: the cache is large enough, and one request's table is not."""
    plan = make_plan(model_sizes=(256,), full_sizes=(), replay_sizes=(), max_num_seqs=2)
    message = (
        "model_sizes: 256 .* request of 128 tokens, .* holds 120 slots: raise max_blocks, or set cudagraph_capture"
    )
    with nothing_is_captured(backend), pytest.raises(ValueError, match=message):
        make_runner(backend, plan, max_blocks=15)
    make_runner(backend, plan, max_blocks=16, captured=False)


@fault("A6", "FULL sizes are rounded up to multiples of a decode's tokens; their dummy batches are uniform decodes")
def test_A6_sizes_8_and_16_become_9_and_18_of_uniform_decodes(backend) -> None:
    settings = config(num_speculative_tokens=2, cudagraph_capture_sizes=[8, 16], max_num_seqs=16)
    plan = plan_of(settings)
    assert plan.full_sizes == (9, 18)
    for size in plan.full_sizes:
        assert dummy_decode(size, 3, 16).uniform_decode_len == 3
    with pytest.raises(ValueError, match="8 must be a multiple of query length 3"):
        dummy_decode(8, 3, 16)
    (record,) = run_beside_eager(backend, plan, [[decode(f"d{index}", 3) for index in range(4)]])
    assert (record.mode, record.padded_tokens) == (FULL, 18)


@fault("A7", "dispatch asks what was captured; the rest runs eagerly, with the reason in the record")
def test_A7_twelve_tokens_where_4_and_8_are_captured_run_eagerly(backend) -> None:
    plan = make_plan(query_len_decode=4, model_sizes=(4, 8), full_sizes=(4, 8), trim_threshold=None)
    (record,) = run_beside_eager(backend, plan, [[decode(f"d{index}", 4) for index in range(3)]])
    assert (record.mode, record.padded_tokens, record.model_reason) == (NONE, 12, ModelReason.TOO_MANY_TOKENS)


@fault("A7")
def test_A7_a_planned_size_that_was_never_captured_is_not_dispatched_to() -> None:
    plan = make_plan(model_sizes=(4, 8, 12), full_sizes=(4, 8, 12), replay_sizes=(4, 8, 12), query_len_decode=4)
    captured = {"model_sizes": (4, 8), "full_sizes": (4, 8), "replay_sizes": (4, 8)}
    decodes = Batch([Request(4, 9, Phase.DECODE)] * 3)
    record = dispatch_step(decodes, plan, **captured)
    assert (record.mode, record.model_reason) == (NONE, ModelReason.NOT_CAPTURED)
    record = dispatch_step(prefills(30, 4), plan, **captured)
    assert (record.replay_mode, record.replay_rows, record.reason) == (NONE, 12, ReplayReason.NOT_CAPTURED)


@fault("A9", "sizes above the bound become the bound, said aloud")
def test_A9_sizes_16_and_32_of_24_requests_become_16_and_24() -> None:
    plan = plan_of(config(window=1, max_num_seqs=24, decoder_replay_cudagraph_capture_sizes=[16, 32]))
    assert plan.replay_sizes == (16, 24)
    assert any("32 becomes 24" in note and "max_num_seqs 24" in note for note in plan.notes)


@fault("A10", "the plan is empty with a reason, and steps run eagerly")
def test_A10_a_plan_whose_only_size_drops_out_serves_eagerly(backend) -> None:
    plan = plan_of(
        config(max_num_seqs=8, decoder_replay_cudagraph_capture_sizes=[128], cudagraph_capture_sizes=[16, 64])
    )
    assert plan.replay_sizes == ()
    assert any("no replay graphs: decoder_replay_cudagraph_capture_sizes 128" in note for note in plan.notes)
    (record,) = run_beside_eager(backend, plan, [[prefill("p", 40), decode("d")]])
    assert (record.mode, record.replay_mode, record.reason) == (PIECEWISE, NONE, ReplayReason.NO_SIZES)


@fault("A11", "the config holds a sorted copy; captures go from the largest, whatever the order of the list")
def test_A11_sizes_in_any_order_are_a_sorted_copy_and_captured_largest_first(backend) -> None:
    sizes = [512, 8, 64, 8]
    settings = config(
        max_num_batched_tokens=512,
        max_num_seqs=64,
        decoder_replay_cudagraph_capture_sizes=sizes,
        cudagraph_capture_sizes=[16],
    )
    plan = plan_of(settings)
    assert plan.replay_sizes == (8, 64, 512) and sizes == [512, 8, 64, 8]
    runner, order = make_runner(backend, plan, captured=False, num_blocks=600), []
    runner.capture_replay_graphs(lambda sizes, _: order.extend(sizes) or list(sizes))
    assert order == [512, 64, 8] and runner.replay_graphs.sizes == (8, 64, 512)


@fault("A12", "the default bound counts the tokens of a decode request")
def test_A12_the_default_bound_of_32_requests_of_4_tokens_holds_all_of_them() -> None:
    settings = ServingConfig(max_num_seqs=32, num_speculative_tokens=3)
    assert settings.capture_size_limit == 2 * 32 * 4
    assert plan_of(settings).full_sizes[-1] == 32 * 4


@fault("A14", "dummy batches have min(rows, max_num_seqs) requests")
def test_A14_512_rows_are_captured_on_16_requests(backend) -> None:
    plan = make_plan(model_sizes=(), full_sizes=(), replay_sizes=(512,), max_num_seqs=16, max_num_batched_tokens=512)
    owners = make_runner(backend, plan, captured=False).prepare_replay(512).context.metadata["replay_window"]
    assert owners.request_of_row.bincount().tolist() == [32] * 16
