"""Known faults of measuring: unsynchronised clocks, arms that are not what they say, and work that is not there."""

import gc
import time

import numpy as np
import pytest
import torch
from decoder.serving import Serving, make_plan, make_runner, prefill
from faults.helpers import place_of
from faults.table import fault

from replay_sim.batch.dispatch import CudagraphMode, ReplayReason, dispatch_step
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import BreakableGraph, capture
from replay_sim.measure.timing import time_arms
from replay_sim.replay.row_tensors import input_specs
from replay_sim.workload.token_ids import token_ids

CPU = torch.device("cpu")
MILLISECONDS = 1e-3


@fault("H1", "each call is timed by itself between two synchronisations, and nothing is divided")
@pytest.mark.parametrize("rounds", [1, 7])
def test_H1_a_call_of_two_milliseconds_is_two_milliseconds_in_any_number_of_rounds(rounds: int) -> None:
    arms = {"slow": lambda _: time.sleep(2 * MILLISECONDS), "quick": lambda _: None}
    found = time_arms(arms, CPU, rounds=rounds, warm_up=1)
    assert 2_000 <= found["slow"].p10 <= found["slow"].device_us < 20_000 and found["slow"].n == rounds
    assert found["quick"].device_us < 1_000


@fault("H1")
@pytest.mark.gpu
def test_H1_a_replay_is_not_charged_with_the_work_before_it() -> None:
    from replay_sim.capture.cuda import CudaBackend

    backend = CudaBackend()
    x = torch.ones(1 << 20, device=backend.device)
    graph = capture(lambda: x + 1, **place_of(backend))
    arms = {"spin": lambda _: torch.cuda._sleep(20_000_000), "replay": lambda _: graph.replay()}
    found = time_arms(arms, backend.device, rounds=5)
    assert found["replay"].device_us < found["spin"].device_us / 10


@fault("H3", "each step's record says what ran and why, and each graph counts its segments: launches can be counted")
def test_H3_an_arm_without_graphs_launches_none_and_its_record_says_so(backend, monkeypatch) -> None:
    launched, replay = [], BreakableGraph.replay

    def counted(graph: BreakableGraph):
        launched.append(len(graph.segments))
        return replay(graph)

    monkeypatch.setattr(BreakableGraph, "replay", counted)
    plan = make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,))
    asked = [prefill("p", 40)]
    graphs = make_runner(backend, plan)
    with_graphs = Serving(graphs).step(asked).record
    expected = [len(graphs.model_graphs[64].segments), len(graphs.replay_graphs.graphs[0].segments)]
    assert launched == expected and all(count > 1 for count in expected)
    launched.clear()
    without = Serving(make_runner(backend, plan, captured=False)).step(asked).record
    assert launched == []
    assert (with_graphs.mode, with_graphs.replay_mode) == (CudagraphMode.PIECEWISE, CudagraphMode.PIECEWISE)
    assert (without.mode, without.replay_mode) == (CudagraphMode.NONE, CudagraphMode.NONE)
    assert without.reason is ReplayReason.NOT_CAPTURED


@fault("H4", "a capture freezes nothing and leaves the collector as it was; arms are warmed up outside of the timing")
def test_H4_after_a_capture_the_collector_finds_garbage_as_before(place, backend) -> None:
    x, frozen = torch.ones(8, device=backend.device), gc.get_freeze_count()
    capture(lambda: x + 1, **place)
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    cycle: list = [torch.ones(1)]
    cycle.append(cycle)
    del cycle
    assert gc.collect() > 0
    turns: list[int] = []
    time_arms({"arm": turns.append}, CPU, rounds=3, warm_up=4)
    assert turns == list(range(7))


@fault("H5", "host time and device time are two figures, and the device is kept busy while the host enqueues")
@pytest.mark.gpu
def test_H5_a_kernel_far_shorter_than_its_dispatch_shows_its_own_device_time() -> None:
    device = torch.device("cuda")
    value, other = torch.ones(64, device=device), torch.ones(1 << 24, device=device)

    def dispatched(tensor: torch.Tensor) -> None:
        for _ in range(20):
            tensor.add_(1)

    found = time_arms({"small": lambda _: dispatched(value), "large": lambda _: dispatched(other)}, device, rounds=10)
    assert found["small"].host_us > 20
    assert found["large"].device_us > 5 * found["small"].device_us
    assert found["large"].host_us < 3 * found["small"].host_us


@fault("H5")
def test_H5_a_timing_holds_both_figures() -> None:
    found = time_arms({"arm": lambda _: None}, CPU, rounds=2)["arm"]
    assert found.device_us >= 0 and found.host_us >= 0


@fault("H6", "tokens are drawn by request and position, arms get a number of their own a round; no rows, no step")
def test_H6_no_two_prompts_and_no_two_rounds_share_their_inputs() -> None:
    prompts = Batch(Request(500, 0, Phase.PREFILL, request_id=f"r{index}") for index in range(20))
    ids = token_ids(prompts, 129280).reshape(20, 500)
    assert len({row.tobytes() for row in ids}) == 20
    assert np.unique(ids[:, 0]).size == 20
    turns: list[int] = []
    time_arms({"arm": turns.append}, CPU, rounds=5)
    assert len(set(turns)) == len(turns)


@fault("H6")
def test_H6_a_batch_of_pads_alone_runs_nothing_and_its_record_says_so(backend) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(16,), full_sizes=(), replay_sizes=()))
    for asked in ([], [prefill("p", 0)]):
        record = Serving(runner).step(asked).record
        assert (record.num_tokens, record.padded_tokens, record.reason) == (0, 0, ReplayReason.EMPTY)
    sizes = {"model_sizes": (16,), "full_sizes": (), "replay_sizes": ()}
    assert dispatch_step(Batch(), runner.plan, **sizes).mode is CudagraphMode.NONE
    assert all(spec.row_bytes > 0 for spec in input_specs(4, 2, torch.float32))
