"""Known faults of pad rows: they write nothing, belong to nobody, are routed nowhere, and hold nothing of before."""

import re
from collections.abc import Iterable

import attrs
import numpy as np
import pytest
import torch
from decoder.serving import BLOCK_SIZE, NUM_BLOCKS, Serving, decode, make_plan, make_runner, prefill
from faults.helpers import outputs_of, run_beside_eager
from faults.table import fault

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, dispatch_step
from replay_sim.batch.metadata import PAD_REQUEST, PAD_SLOT, BatchMetadataBuffers, ReplayMetadataBuffers
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.config.shapes import TINY
from replay_sim.decoder import ops
from replay_sim.plan import make_plan as plan_of
from replay_sim.plan import plan_cost
from replay_sim.replay import graphs, one_launch
from replay_sim.replay.movement import gather_into
from replay_sim.replay.row_ops import gather_by_address

FULL, PIECEWISE = CudagraphMode.FULL, CudagraphMode.PIECEWISE
MARK = 3.0
EXTREME = 2**31 - 1


@pytest.fixture
def pad_poison(backend, monkeypatch) -> torch.Tensor:
    """What the pads hold behind the gather of a graph, if it is not 0: () float32, read on the device at each run."""
    poison = torch.zeros((), device=backend.device)

    def fill(buffers: Iterable[torch.Tensor], count: torch.Tensor | int, padded: int) -> None:
        pads = (torch.arange(padded, device=backend.device) >= count) & (poison != 0)
        for buffer in buffers:
            rows = buffer[:padded]
            value = poison if buffer.is_floating_point() else torch.full_like(poison, EXTREME, dtype=buffer.dtype)
            rows.copy_(torch.where(pads.view(-1, *[1] * (rows.dim() - 1)), value, rows))

    def gather_into_and_fill(rows, inputs, buffers, padded) -> None:
        gather_into(rows, inputs, buffers, padded)
        fill(buffers.values(), len(rows), padded)

    def gather_by_address_and_fill(buffers, addresses, rows, num_rows, padded) -> None:
        gather_by_address(buffers, addresses, rows, num_rows, padded)
        fill(buffers, num_rows, padded)

    monkeypatch.setattr(graphs, "gather_into", gather_into_and_fill)
    monkeypatch.setattr(one_launch, "gather_by_address", gather_by_address_and_fill)
    return poison


def caches_of(runner) -> list[torch.Tensor]:
    return [*runner.decoder.cache.window, runner.decoder.cache.shared]


def mark_caches(runner) -> None:
    for cache in caches_of(runner):
        cache.fill_(MARK)


def written_blocks(runner) -> set[int]:
    """The blocks that any cache was written in since it was marked."""
    rows = [(cache != MARK).any(1).nonzero().squeeze(1) // runner.block_size for cache in caches_of(runner)]
    return set(torch.cat(rows).tolist())


def metadata_buffers(device: torch.device, max_rows: int = 32, max_num_seqs: int = 8):
    sizes = {"max_rows": max_rows, "max_num_seqs": max_num_seqs, "device": device}
    batch = BatchMetadataBuffers(**sizes, max_blocks=8, block_size=4, window=TINY.window)
    return batch, ReplayMetadataBuffers(**sizes)


def write(buffers, requests: list[Request], padded: int, padded_rows: int | None = None) -> None:
    batch = Batch(requests)
    counts = [-(-request.seq_len // 4) for request in requests]
    tables = [np.arange(10 * index, 10 * index + count, dtype=np.int32) for index, count in enumerate(counts)]
    buffers[0].write(batch, tables, np.arange(batch.num_tokens, dtype=np.int32), padded)
    if padded_rows is not None:
        buffers[1].write(batch, buffers[0], padded_rows)


@fault("B1", "a slot below 0 writes nothing, in the CPU op and in the kernel")
@pytest.mark.parametrize("threshold", [None, 32], ids=["whole batch", "replay batch"])
def test_B1_64_pads_leave_the_last_slot_as_it_was(backend, threshold: int | None) -> None:
    plan = make_plan(model_sizes=(128,), full_sizes=(), replay_sizes=(16,), trim_threshold=threshold)
    runner = make_runner(backend, plan)
    serving = Serving(runner, free=list(range(NUM_BLOCKS))[::-1])
    serving.tables["parked"] = [NUM_BLOCKS - 1]
    mark_caches(runner)
    record = serving.step([prefill("p", 64)]).record
    assert (record.num_tokens, record.padded_tokens) == (64, 128)
    assert written_blocks(runner) == set(range(64 // BLOCK_SIZE))


@fault("B2", "the ops refuse tensors of different row counts by name; metadata is padded to the graph's size")
def test_B2_a_slot_list_of_5_beside_8_rows_is_refused(backend) -> None:
    device = backend.device
    cache, kv = torch.zeros(16, 4, device=device), torch.ones(8, 4, device=device)
    slots = torch.tensor([3, 4, 5, 6, 7], device=device)
    with pytest.raises(ValueError, match="slot_mapping has 5 rows beside 8: pad both"):
        ops.write_kv_(cache, kv, slots)
    assert not bool(cache.any())
    ops.write_kv_(cache, kv, torch.cat((slots, slots.new_full((3,), PAD_SLOT))))
    assert cache.any(1).nonzero().squeeze(1).tolist() == slots.tolist()


@fault("B2")
@pytest.mark.parametrize("short", ["out", "positions", "request_of_row", "window_start"])
def test_B2_attention_refuses_a_list_that_is_shorter_than_its_rows(backend, short: str) -> None:
    """Its kind: every tensor that a kernel reads by row."""
    device = backend.device
    q = torch.zeros(8, 1, 16, device=device)
    by_row = {
        "out": torch.zeros_like(q),
        "positions": torch.zeros(8, dtype=torch.int64, device=device),
        "request_of_row": torch.zeros(8, dtype=torch.int32, device=device),
        "window_start": torch.zeros(8, dtype=torch.int64, device=device),
    }
    by_row[short] = by_row[short][:5]
    cache, table = torch.zeros(16, 16, device=device), torch.zeros(1, 4, dtype=torch.int32, device=device)
    out, *rest = by_row.values()
    with pytest.raises(ValueError, match=f"{short} has 5 rows beside 8"):
        ops.attend_(out, q, cache, None, *rest, table, 4, 8, 4, 1.0)


@fault("B3", "one constant, below 0, that every op and kernel skips; slot 0 is a slot like any other")
def test_B3_pads_hold_the_one_sentinel_and_block_0_is_never_written_by_them(backend) -> None:
    assert PAD_SLOT == PAD_REQUEST == -1
    buffers = metadata_buffers(backend.device)
    write(buffers, [Request(5, 0, Phase.PREFILL), Request(11, 3, Phase.PREFILL)], 24, 20)
    for slots, owners, real in (
        (buffers[0].slot_mapping[:24], buffers[0].request_of_row[:24], 16),
        (buffers[1].slot_mapping[:20], buffers[1].request_of_row[:20], 13),
    ):
        assert set(slots[real:].tolist()) == {PAD_SLOT} and set(owners[real:].tolist()) == {PAD_REQUEST}
        assert bool((slots[:real] >= 0).all()) and bool((owners[:real] >= 0).all())
    runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,)))
    serving = Serving(runner, free=list(range(1, NUM_BLOCKS)))
    mark_caches(runner)
    serving.step([prefill("p", 33)])
    assert 0 not in written_blocks(runner)


@fault("B5", "gathers clear pads, and no result of a row depends on another row; compared bit for bit, not by NaN")
def test_B5_finite_poison_in_the_pads_changes_no_bit_of_a_real_row(backend, form, pad_poison) -> None:
    """Left in the buffers before a step, and put into the pads behind the gather, which for one launch is captured."""
    runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(32,)), replay_form=form)
    asked = [prefill("p", 30), prefill("q", 9), decode("r")]
    output = Serving(runner).step(asked)
    assert (output.record.replay_rows, output.record.padded_rows) == (17, 32)
    expected = [value.clone() for value in outputs_of(output)]
    buffers = runner.replay_layers.inputs.tensors.values()
    for poison in (1e30, torch.inf, torch.nan):
        for in_the_pads in (0.0, poison):
            for buffer in buffers:
                buffer.fill_(poison if buffer.is_floating_point() else EXTREME)
            pad_poison.fill_(in_the_pads)
            actual = outputs_of(Serving(runner).step(asked))
            assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
            for buffer in buffers:
                held = (in_the_pads if buffer.is_floating_point() else EXTREME) if in_the_pads else 0
                torch.testing.assert_close(buffer[17:], torch.full_like(buffer[17:], held), equal_nan=True)


@fault(
    "B6", "the router reads the count of real rows on the device: pads get pair -1, and NaN chooses each expert once"
)
@pytest.mark.parametrize("real", [0, 3, 8])
def test_B6_nan_pads_are_routed_nowhere_and_index_nothing(backend, real: int) -> None:
    rows, experts, top_k = 8, 8, 2
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(0)).to(backend.device)
    logits[real:] = torch.nan
    logits[:1] = torch.nan  # a real row too
    count = torch.tensor([real], dtype=torch.int32, device=backend.device)
    pair_token, pair_pos, offs, _ = (value.tolist() for value in ops.route(logits, count, 0, experts, top_k, 1.0))
    assert all(set(places) == {-1} for places in pair_pos[real:])
    assert offs[-1] == real * top_k
    assert sorted(place for places in pair_pos[:real] for place in places) == list(range(real * top_k))
    chosen = [[next(e for e in range(experts) if place < offs[e]) for place in places] for places in pair_pos[:real]]
    assert all(len(set(row)) == top_k for row in chosen)
    assert all(pair_token[place] == row for row in range(real) for place in pair_pos[row])


@fault("B8", "every write resets the tails: offsets repeat the last, lengths, flags and block tables are zero")
def test_B8_three_decodes_after_five_prefills_leave_nothing_of_them(backend) -> None:
    buffers = metadata_buffers(backend.device)
    write(buffers, [Request(5, 20, Phase.PREFILL, all_rows_read=True, window_start=13)] * 5, 25, 25)
    write(buffers, [Request(1, 6, Phase.DECODE, window_start=2)] * 3, 5, 5)
    batch, replay = buffers
    assert batch.query_start_loc.tolist() == replay.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert batch.computed.tolist() == [6] * 3 + [0] * 5
    assert batch.request_window_start.tolist() == [2] * 3 + [0] * 5
    assert batch.keeps_all.tolist() == [1] * 3 + [0] * 5
    assert not bool(batch.block_table[3:].any()) and not bool(batch.block_table[:3, 2:].any())
    assert batch.request_of_row[:5].tolist() == replay.request_of_row[:5].tolist() == [0, 1, 2, -1, -1]
    assert batch.num_rows.tolist() == replay.num_rows.tolist() == [3]


@fault("B10", "a pad row's request is -1; state is kept by request")
def test_B10_pads_advance_no_requests_recurrent_state(backend) -> None:
    buffers = metadata_buffers(backend.device)
    write(buffers, [Request(5, 0, Phase.PREFILL), Request(6, 0, Phase.PREFILL)], 16, 16)
    for owners in (buffers[0].request_of_row[:16], buffers[1].request_of_row[:16]):
        assert owners.tolist() == [0] * 5 + [1] * 6 + [PAD_REQUEST] * 5
        state = torch.zeros(2 + 1, device=backend.device)  # the last is of no request: -1 counts from the end
        state.index_put_((owners.long(),), torch.ones(16, device=backend.device), accumulate=True)
        assert state.tolist() == [5, 6, 5]


@fault("B10")
def test_B10_the_state_that_steps_keep_is_that_of_steps_without_pads(backend, form) -> None:
    """What this design keeps from step to step is KV: of two prompts and four steps on, each in a padded graph."""
    plan = make_plan(model_sizes=(16, 64), full_sizes=(), replay_sizes=(32,))
    steps = [
        [prefill("p", 30), prefill("q", 6)],
        *[[decode("p"), decode("q")]] * 2,
        [prefill("p", 20), prefill("q", 25)],
    ]
    records = run_beside_eager(backend, plan, [*steps, [decode("q")]], replay_form=form)
    assert [record.padded_tokens - record.num_tokens for record in records] == [28, 14, 14, 19, 15]
    assert [record.padded_rows - record.replay_rows for record in records] == [18, 0, 0, 16, 0]


@fault("B11", "dummy batches write a block of their own, which steps are refused; pads of a step write none")
@pytest.mark.parametrize("full_sizes", [(4,), ()], ids=["full graph of 4", "piecewise graph of 8"])
def test_B11_pads_beside_three_of_four_live_requests_touch_no_other_slot(backend, full_sizes) -> None:
    plan = make_plan(model_sizes=(8,), full_sizes=full_sizes, replay_sizes=(), max_num_seqs=4)
    runner = make_runner(backend, plan, num_blocks=4, captured=False)
    mark_caches(runner)
    runner.capture_model_graphs()
    assert written_blocks(runner) <= {4}
    mark_caches(runner)
    serving = Serving(runner, free=[3, 2, 1, 0])
    record = serving.step([decode(f"d{index}") for index in range(3)]).record
    assert record.padded_tokens == (4 if full_sizes else 8)
    assert written_blocks(runner) == {0, 1, 2}
    with pytest.raises(ValueError, match="ids from 4 to 4: allowed are 0 to 3"):
        Serving(runner, free=[4]).step([decode("other")])


@fault("B13", "outputs of the replay layers are zero in every pad row; a step hands out no pads to reduce")
def test_B13_pads_add_nothing_to_a_sum_over_ranks(backend) -> None:
    """There is no collective inside a step of this design; this is what one over padded outputs would be given."""
    tokens, total = 33, 0
    for rank in range(2):
        runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,)))
        output = Serving(runner).step([prefill(f"p{rank}", tokens)])
        padded = runner.model_graphs[64].outputs["replay"]
        assert output.record.padded_tokens == len(padded[0]) == 64
        assert all(len(value) == tokens for value in outputs_of(output))
        total = total + padded[0]
    assert bool(total[:tokens].any()) and not bool(total[tokens:].any())


@fault("B15", "a size that runs more pads than rows is said aloud with the size to add; records hold the paddings")
def test_B15_rows_that_fill_less_than_half_of_a_size_are_said_aloud() -> None:
    sizes = [2816, 3072, 8192]
    plan = plan_of(ServingConfig(decoder_replay_cudagraph_capture_sizes=sizes, cudagraph_mode="PIECEWISE"))
    note = "replay size 8192 runs 3073 to 4095 rows on more pads than rows, .*: add a size from 4095 to 8191"
    assert any(re.search(note, said) for said in plan.notes)
    assert plan_cost(plan).mostly_padding_rows == (4095 - 3072) + (1407 - 127)
    filled = attrs.evolve(plan, replay_sizes=(128, 256, 512, 1024, 2048, 2816, 3072, 4096, 8192))
    assert plan_cost(filled).mostly_padding_rows == 0
    batch = Batch(Request(length, 0, Phase.PREFILL) for length in [128] * 24 + [8, 200])
    record = dispatch_step(batch, plan, model_sizes=(), full_sizes=(), replay_sizes=sizes)
    table = DispatchTable()
    table.add(record)
    assert (record.replay_rows, record.padded_rows) == (3208, 8192)
    assert table.replay_rows() == [(3208, 8192, 8192 - 3208, "PIECEWISE", 1)]
