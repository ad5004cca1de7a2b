"""Known faults of the kept rows, their windows, and the dtypes that index them."""

import attrs
import numpy as np
import pytest
import torch
from decoder.oracle_session import Ask, Session, decode
from decoder.serving import Serving, make_plan, make_runner, prefill
from faults.table import fault
from replay.fake_model import FakeModel

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.metadata import BatchMetadataBuffers, ReplayMetadataBuffers
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import select_rows
from replay_sim.config.shapes import TINY
from replay_sim.decoder import ops
from replay_sim.replay.context import use_forward_context
from replay_sim.replay.row_tensors import output_specs

NONE, PIECEWISE = CudagraphMode.NONE, CudagraphMode.PIECEWISE
W, BLOCK_SIZE, DIM = 128, 64, 16
PREFIXES = (W + 2, W + 62, 2 * W, 2 * W + 2, 3 * W + 66, 1930, 2046)
BLOCKS = 40


def metadata_of(requests: list[Request], device: torch.device) -> tuple[BatchMetadataBuffers, ReplayMetadataBuffers]:
    """The metadata of the batch and of its replay batch; request r has blocks 40 r to 40 r + 39, in falling order."""
    batch = Batch(requests)
    rows = batch.num_tokens
    sizes = {"max_rows": rows, "max_num_seqs": len(requests), "device": device}
    buffers = BatchMetadataBuffers(**sizes, max_blocks=BLOCKS, block_size=BLOCK_SIZE, window=W)
    tables = [np.arange(BLOCKS * (index + 1) - 1, BLOCKS * index - 1, -1, np.int32) for index in range(len(requests))]
    buffers.write(batch, tables, np.zeros(rows, np.int32), rows)
    replay = ReplayMetadataBuffers(**sizes)
    replay.write(batch, buffers, select_rows(batch, W).num_rows)
    return buffers, replay


@fault("G1", "masks and slots come from absolute positions through the block table, and are compared row by row")
@pytest.mark.parametrize("length", [5, W, W + 3])
def test_G1_windows_and_slots_are_exact_after_prefixes_of_no_multiple_of_the_window(backend, length: int) -> None:
    requests = [Request(length, prefix, Phase.PREFILL) for prefix in PREFIXES]
    batch, replay = metadata_of(requests, backend.device)
    cache = torch.zeros(len(requests) * BLOCKS * BLOCK_SIZE, DIM, device=backend.device)
    for index, request in enumerate(requests):
        for position in range(request.seq_len):
            slot = (BLOCKS * (index + 1) - 1 - position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
            cache[slot] = float(position)

    def mean_keys(metadata) -> list[float]:
        """The mean position of the keys that each row attends: scores are all zero."""
        q = torch.zeros(len(metadata.positions), 1, DIM, device=backend.device)
        out = torch.full_like(q, torch.nan)
        rows = (metadata.positions, metadata.request_of_row, metadata.window_start)
        ops.attend_(out, q, cache, None, *rows, metadata.block_table, BLOCK_SIZE, W, 1, 1.0)
        return out[:, 0, 0].tolist()

    kept = min(length, W)
    for metadata, rows, trimmed in (
        (batch.metadata(len(batch.positions)), length, False),
        (replay.metadata(kept * len(requests), batch, first_layer=True), kept, False),
        (replay.metadata(kept * len(requests), batch, first_layer=False), kept, length > W),
    ):
        expected, slots = [], []
        for index, request in enumerate(requests):
            for position in range(request.seq_len - rows, request.seq_len):
                lowest = max(position - W + 1, request.seq_len - W if trimmed else 0)
                expected.append((lowest + position) / 2)
                block = BLOCKS * (index + 1) - 1 - position // BLOCK_SIZE
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        assert metadata.slot_mapping.tolist() == slots
        assert mean_keys(metadata) == pytest.approx(expected, rel=1e-5)


@fault("G2", "prompt log-probabilities keep all rows of their request alone, eagerly and in graphs")
def test_G2_a_request_with_prompt_logprobs_keeps_300_rows_and_the_other_128() -> None:
    selected = select_rows(
        Batch([Request(300, 0, Phase.PREFILL, all_rows_read=True), Request(300, 0, Phase.PREFILL)]), W
    )
    assert selected.query_start_loc.tolist() == [0, 300, 428]
    assert selected.rows.tolist() == [*range(300), *range(472, 600)]


@fault("G2")
@pytest.mark.parametrize("captured", [True, False])
def test_G2_both_paths_run_the_kept_rows(backend, captured: bool) -> None:
    plan = make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(64,))
    runner = make_runner(backend, plan, captured=captured)
    output = Serving(runner).step([prefill("logprobs", 30, keeps=True), prefill("plain", 30)])
    assert output.record.mode is (PIECEWISE if captured else NONE)
    assert output.record.replay_rows == 38
    assert (output.pre_mix != 0).any(1).nonzero().squeeze(1).tolist() == [*range(30), *range(52, 60)]


@fault("G3", "dummy batches go through the code of a step, row index included")
def test_G3_the_dummy_batch_has_rows_made_by_the_code_of_a_step(backend, monkeypatch) -> None:
    runner = make_runner(backend, captured=False)
    made, build = [], runner.contexts.replay_batch

    def spy(*arguments):
        made.append(build(*arguments))
        return made[-1]

    monkeypatch.setattr(runner.contexts, "replay_batch", spy)
    runner.capture_replay_graphs()
    runner.capture_model_graphs()
    Serving(runner).step([prefill("p", 40)])
    assert len(made) == len(runner.plan.replay_sizes) + len(runner.plan.breaking_sizes) + 1
    assert all(batch.rows.dtype == torch.int64 and len(batch.rows) == batch.context.num_tokens for batch in made)
    assert len({batch.rows.data_ptr() for batch in made}) == 1


@fault("G5", "aux layers belong to the frozen shape that a runner is made of: none can be asked for after its capture")
def test_G5_aux_layers_are_chosen_before_the_capture_and_come_from_the_graph(backend) -> None:
    shape = attrs.evolve(TINY, late_aux_layers=(3, 5))
    runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,)), shape)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        runner.shape.late_aux_layers = (4,)
    outputs = len(output_specs(1, 1, torch.float32, 2))
    assert len(runner.replay_graphs.graphs[0].outputs) == len(runner.replay_layers.break_buffers.specs) == outputs
    output = Serving(runner).step([prefill("p", 40)])
    assert output.record.replay_mode is PIECEWISE and len(output.late_aux) == 2
    assert all(bool(state[-8:].any(1).all()) for state in output.late_aux)


@fault("G8", "rows are int64 everywhere and checked where they index")
def test_G8_rows_as_int32_are_refused_in_graphs_and_eagerly(place, backend) -> None:
    assert select_rows(Batch([Request(9, 0, Phase.PREFILL)]), 8).rows.dtype == np.int64
    model = FakeModel(backend.device)
    layers = model.layers(trim_threshold=12)
    layers.graphs = model.graphs(place, layers.inputs)
    layers.graphs.capture([4])
    for mode in (NONE, PIECEWISE):
        batch = model.replay_batch([1, 2, 5, 6], 4, mode)
        batch = attrs.evolve(batch, rows=batch.rows.int())
        context = model.context(10, 10, NONE, replay_batch=batch)
        with use_forward_context(context), pytest.raises(ValueError, match="rows must be int64 .* got torch.int32"):
            layers(model.inputs(10))


@fault("G10", "a hit is a count of computed tokens and a window start, stated by the request; S4 for every length")
@pytest.mark.parametrize("hit", [127, 128, 129])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_G10_the_window_start_after_a_hit_is_stated_for_each_length(hit: int, length: int) -> None:
    """There is no prefix cache in this design that would adopt a hit or not: the request says what it holds."""
    for start in {0, max(0, hit - W), hit}:
        selected = select_rows(Batch([Request(length, hit, Phase.PREFILL, window_start=start)]), W)
        expected = start if length <= W else max(start, hit + length - W)
        assert selected.window_starts.tolist() == [expected]
        assert selected.rows.tolist() == list(range(max(0, length - W), length))
    with pytest.raises(ValueError, match=f"window_start is {hit + 1}: it must be at most computed, which is {hit}"):
        Request(length, hit, Phase.PREFILL, window_start=hit + 1)


@fault("G10")
def test_G10_hits_around_the_window_and_chunks_that_end_inside_the_replayed_range_equal_the_plain_decoder(
    backend,
) -> None:
    """Hits of W - 1, W and W + 1 tokens; a prompt of 40 in chunks that end within its last W rows."""
    w = TINY.window
    plan = make_plan(model_sizes=(16, 32), full_sizes=(4,), replay_sizes=(8, 32), trim_threshold=16, max_num_seqs=8)
    session = Session(make_runner(backend, plan, num_blocks=60, max_blocks=20), 1e-4)
    for hit in (w - 1, w, w + 1):
        session.step(Ask(f"hit {hit}", hit))
        session.step(Ask(f"hit {hit}", 2 * w + 1, held=min(hit, w)))
        session.step(decode(f"hit {hit}", held=w))
    for end in (40 - w - 1, 40 - w, 40 - w + 1, 39):
        session.step(Ask(f"ends at {end}", end))
        session.step(Ask(f"ends at {end}", 40 - end, held=w))
    session.check_cache()
