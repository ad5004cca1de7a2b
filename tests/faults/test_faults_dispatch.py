"""Known faults of dispatch: keys that differ from capture to look-up, policies that differ, ranks that disagree."""

import attrs
import pytest
from decoder.serving import Serving, decode, make_plan, make_runner, prefill
from faults.table import fault
from replay.rank_outputs import Ran, run_asked
from replay.rank_processes import results, run_ranks

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, ModelReason, ReplayReason, dispatch_step
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.decoder import step as step_module

NONE, FULL, PIECEWISE = CudagraphMode.NONE, CudagraphMode.FULL, CudagraphMode.PIECEWISE
# Steps of two ranks, None for one that is idle; rank 1 lacks the model graph of 256 and the replay graph of 32.
RANK_PLAN = make_plan(model_sizes=(128, 256, 320), full_sizes=(2,), replay_sizes=(8, 32))
RANK_LACKS = [{}, {"model": 256, "replay": 32}]
RANK_STEPS = {
    "100 and 300 tokens": [[prefill("a", 100)], [prefill("a", 300)]],
    "a model size that rank 1 lacks": [[prefill("b", 200)], [prefill("b", 10)]],
    "a replay size that rank 1 lacks": [[prefill("c", 30, keeps=True)], [prefill("c", 5)]],
    "an idle rank, eagerly": [[prefill("d", 200)], None],
    "an idle rank in graphs": [[prefill("e", 100)], None],
    "an idle rank whose replay batch is eager": [[prefill("f", 100, keeps=True)], None],
    "an idle rank in a full graph": [[decode("a")], None],
}


@fault("F1", "capture and step ask the same dispatch; every captured key is hit by a step of its size")
def test_F1_every_captured_size_is_hit(backend) -> None:
    runner = make_runner(backend)
    table, serving = DispatchTable(), Serving(runner)
    steps = [[prefill(f"m{size}", size)] for size in runner.model_graphs]
    steps += [[decode(f"f{size}-{index}") for index in range(size)] for size in runner.full_graphs]
    steps += [[prefill(f"r{size}", size, keeps=True), prefill(f"x{size}", 0)] for size in (32, 128)]
    for asked in steps:
        table.add(serving.step(asked).record)
    for mode, sizes in ((PIECEWISE, runner.model_graphs), (FULL, runner.full_graphs)):
        assert sizes and all(table.model[size, size, mode] > 0 for size in sizes)
    hit = {padded for (_, padded, mode), count in table.replay.items() if count and mode is PIECEWISE}
    assert hit == set(runner.replay_graphs.sizes)


@fault("F1")
def test_F1_a_capture_takes_its_key_from_the_dispatch_of_a_step(backend, monkeypatch) -> None:
    asked = []

    def spy(batch, plan, **sizes):
        asked.append(dispatch_step(batch, plan, **sizes))
        return asked[-1]

    monkeypatch.setattr(step_module, "dispatch_step", spy)
    runner = make_runner(backend, make_plan(model_sizes=(16, 64), full_sizes=(2,)))
    keys = {(record.mode, record.padded_tokens) for record in asked}
    assert keys == {(PIECEWISE, 16), (PIECEWISE, 64), (FULL, 2)}
    assert keys == {
        *((PIECEWISE, size) for size in runner.model_graphs),
        *((FULL, size) for size in runner.full_graphs),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[str, list[Ran]]:
    """The steps of RANK_STEPS on two ranks whose layers hold collectives; per step what each rank ran."""
    steps = list(RANK_STEPS.values())
    ends = run_ranks(tmp_path_factory.mktemp("ranks"), 2, run_asked, RANK_PLAN, RANK_LACKS, steps)
    return dict(zip(RANK_STEPS, zip(*results(ends), strict=True), strict=True))


@fault("F3", "one all-reduce a step: all ranks take the smallest size that fits the largest")
def test_F3_ranks_of_100_and_300_rows_take_one_padded_size(ranks) -> None:
    records = [ran.record for ran in ranks["100 and 300 tokens"]]
    assert [(record.num_tokens, record.padded_tokens, record.mode) for record in records] == [
        (100, 320, PIECEWISE),
        (300, 320, PIECEWISE),
    ]
    assert [(record.replay_rows, record.padded_rows, record.replay_mode) for record in records] == [
        (8, 8, PIECEWISE),
        (8, 8, PIECEWISE),
    ]


@fault("F4", "a rank sends which sizes it lacks: what one lacks runs eagerly on all")
def test_F4_a_size_that_one_rank_lacks_runs_eagerly_on_all(ranks) -> None:
    model = [ran.record for ran in ranks["a model size that rank 1 lacks"]]
    assert [(record.mode, record.padded_tokens) for record in model] == [(NONE, 200), (NONE, 10)]
    assert {record.model_reason for record in model} == {ModelReason.NOT_CAPTURED}
    replay = [ran.record for ran in ranks["a replay size that rank 1 lacks"]]
    assert [(record.mode, record.padded_tokens) for record in replay] == [(PIECEWISE, 128)] * 2
    assert [(record.replay_mode, record.padded_rows) for record in replay] == [(NONE, 30), (NONE, 5)]
    assert {record.reason for record in replay} == {ReplayReason.NOT_CAPTURED}


@fault("F5", "an idle rank says so and runs pads: it meets every collective, and writes nothing")
def test_F5_an_idle_rank_joins_every_collective(ranks) -> None:
    # Padded tokens and rows of both ranks; in a FULL graph no break of the test meets the other rank.
    expected = {
        "an idle rank, eagerly": ((200, 1), (8, 8)),
        "an idle rank in graphs": ((128, 128), (8, 8)),
        "an idle rank whose replay batch is eager": ((128, 128), (100, 1)),
        "an idle rank in a full graph": ((2, 2), (0, 0)),
    }
    for name, (tokens, rows) in expected.items():
        for ran in ranks[name]:
            assert (ran.rank_tokens, ran.rank_rows) == (tokens, rows)
            assert ran.met == ([tokens, rows] if any(rows) else [])
        idle = ranks[name][1].record
        assert (idle.num_tokens, idle.num_reqs, idle.replay_rows) == (0, 0, 0)
        assert (idle.padded_tokens, idle.padded_rows) == (tokens[1], rows[1])


@fault("F7", "there is no such flag: plan, capture and step round up by one function")
def test_F7_130_rows_run_at_256_and_nothing_switches_padding_off() -> None:
    plan = make_plan(model_sizes=(128, 256), full_sizes=(), replay_sizes=(128, 256), max_num_batched_tokens=256)
    captured = {"model_sizes": (128, 256), "full_sizes": (), "replay_sizes": (128, 256)}
    record = dispatch_step(Batch([Request(130, 0, Phase.PREFILL, all_rows_read=True)]), plan, **captured)
    assert (record.num_tokens, record.padded_tokens, record.replay_rows, record.padded_rows) == (130, 256, 130, 256)
    fields = [field.name for field in (*attrs.fields(ServingConfig), *attrs.fields(type(plan)))]
    assert not [name for name in fields if "pad" in name or "exact" in name]


@fault("F9", "the key is the count of all kept rows")
@pytest.mark.parametrize("lengths", [(30, 20, 9), (9, 20, 30), (5, 6, 7)])
def test_F9_three_parts_are_all_in_the_key(backend, lengths: tuple[int, ...]) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(16, 32)))
    output = Serving(runner).step([prefill(f"p{index}", length) for index, length in enumerate(lengths)])
    kept = sum(min(length, 8) for length in lengths)
    record = output.record
    assert (record.mode, record.num_tokens, record.replay_rows) == (PIECEWISE, sum(lengths), kept)
    assert record.padded_rows == 32
    assert len(output.hidden_states) == sum(lengths)
    assert int((output.pre_mix != 0).any(1).sum()) == kept
