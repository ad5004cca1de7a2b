"""Known faults of dispatch: keys that differ from capture to look-up, policies that differ, ranks that disagree."""

import attrs
import pytest
from decoder.serving import Serving, decode, make_plan, make_runner, prefill
from faults.table import fault

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, dispatch_step
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.decoder import step as step_module

FULL, PIECEWISE = CudagraphMode.FULL, CudagraphMode.PIECEWISE


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


@fault("F3", "open: waits for X1, one padded size agreed by all ranks")
@pytest.mark.skip(reason="of several ranks: clause X1, one all-reduce agrees on the padded size")
def test_F3_ranks_of_100_and_300_rows_take_one_padded_size() -> None:
    """Clause X1."""


@fault("F4", "open: waits for X1, eager on every rank if one lacks the size")
@pytest.mark.skip(reason="of several ranks: clause X1, all run eagerly if any rank lacks the size")
def test_F4_a_size_that_one_rank_lacks_runs_eagerly_on_all() -> None:
    """Clause X1."""


@fault("F5", "open: waits for X2, an idle rank joins with one pad row")
@pytest.mark.skip(reason="of several ranks: clause X2, an idle rank joins every collective with one pad row")
def test_F5_an_idle_rank_joins_every_collective() -> None:
    """Clause X2."""


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
