"""Known faults of measuring: unsynchronised clocks, arms that are not what they say, and work that is not there."""

import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from decoder.serving import Serving, make_plan, make_runner, prefill
from faults.helpers import place_of
from faults.simulated_gpu import SimulatedGpu
from faults.table import fault

from replay_sim.batch.dispatch import CudagraphMode, ReplayReason
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import BreakableGraph, capture
from replay_sim.capture.host import HostBackend
from replay_sim.config.shapes import TINY
from replay_sim.measure import step_runs, timing
from replay_sim.measure.launches import Launches
from replay_sim.measure.step_arms import ARMS, Rig, RigSpec
from replay_sim.measure.step_runs import Runs
from replay_sim.measure.step_sweeps import TimedBatch
from replay_sim.measure.timing import time_arms
from replay_sim.workload.token_ids import token_ids

RIG = RigSpec(
    window=TINY.window,
    num_local_experts=TINY.num_local_experts,
    model_sizes=(32,),
    full_sizes=(),
    replay_sizes=(),
    max_num_seqs=2,
    max_num_batched_tokens=32,
    num_blocks=4,
    max_blocks=1,
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WARM_UP = 2


@pytest.fixture
def gpu(monkeypatch) -> SimulatedGpu:
    """In place of the GPU and the clock that timing reads."""
    made = SimulatedGpu()
    monkeypatch.setattr(timing, "torch", made)
    monkeypatch.setattr(timing, "time", made)
    return made


@fault("H1", "each call is timed by itself between two synchronisations, and nothing is divided")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("rounds", [1, 7])
def test_H1_a_call_of_two_milliseconds_is_two_milliseconds_in_any_number_of_rounds(
    gpu, device: torch.device, rounds: int
) -> None:
    arms = {"slow": lambda _: gpu.launch(2_000, 2_000), "quick": lambda _: None}
    found = time_arms(arms, device, rounds=rounds, warm_up=1)
    assert (found["slow"].p10, found["slow"].device_us, found["slow"].host_us) == (2_000, 2_000, 2_000)
    assert found["slow"].n == rounds and found["quick"].device_us == 0


@fault("H1")
def test_H1_a_replay_is_not_charged_with_the_work_before_it_and_its_own_is_waited_for(gpu) -> None:
    """1.76 ms that were 15.82: the host returns long before the device is done."""
    arms = {"prefill": lambda _: gpu.launch(10, 15_820), "replay": lambda _: gpu.launch(3, 1_760)}
    found = time_arms(arms, CUDA, rounds=5, warm_up=2)
    assert (found["replay"].device_us, found["prefill"].device_us) == (1_760, 15_820)
    assert gpu.log == ["synchronize", "sleep", "record", "record", "wait"] * 10
    assert gpu.free_us == gpu.host_us


@fault("H1")
@pytest.mark.gpu
def test_H1_a_call_finds_the_work_of_the_call_before_done() -> None:
    """By events of its own, on a real stream."""
    from replay_sim.capture.cuda import CudaBackend

    backend = CudaBackend()
    x = torch.ones(1 << 20, device=backend.device)
    graph = capture(lambda: x + 1, **place_of(backend))
    ends: list[torch.cuda.Event] = []

    def spin(_) -> None:
        torch.cuda._sleep(20_000_000)
        ends.append(torch.cuda.Event())
        ends[-1].record()

    def replay(turn: int) -> None:
        assert turn < WARM_UP or all(end.query() for end in ends)
        graph.replay()

    time_arms({"spin": spin, "replay": replay}, backend.device, rounds=4, warm_up=WARM_UP)
    assert len(ends) == WARM_UP + 4


@fault("H3", "a step's record says what ran; an arm that launched what its record denies is refused by name")
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


def count_launches(calls, _) -> list[Launches]:
    """What the profiler counts on a GPU: the segments that each call replays."""
    found = []
    for call in calls:
        with mock.patch.object(BreakableGraph, "replay", autospec=True, side_effect=BreakableGraph.replay) as replays:
            call()
        segments = sum(len(one.args[0].segments) for one in replays.call_args_list)
        found.append(Launches(1.0, 1, segments, 0))
    return found


@fault("H3")
def test_H3_a_side_whose_graphs_are_off_is_refused_and_not_compared(monkeypatch) -> None:
    monkeypatch.setattr(step_runs, "profile_calls", count_launches)
    for name in ("LEAST_ROUNDS", "LEAST_LONG_ROUNDS", "MOST_ROUNDS"):
        monkeypatch.setattr(step_runs, name, 1)
    sides = [arm for arm in ARMS if arm.name in ("eager_off", "piecewise_off")]
    rig = Rig(RIG, TINY, HostBackend(), 0, sides)
    batches = [TimedBatch(batch=Batch([Request(30, 0, Phase.PREFILL)]), max_num_batched_tokens=32)]
    (eager, graphs) = Runs(rig, 0).measure(batches)[0]
    assert (eager.launches.graph_launches, graphs.launches.graph_launches) == (
        0,
        len(rig.off.model_graphs[32].segments),
    )
    rig.off.model_graphs[32] = SimpleNamespace(replay=lambda: rig.off._forward(32))
    with pytest.raises(RuntimeError, match="arm piecewise_off ran 30 tokens in mode PIECEWISE.*launched 0 graphs"):
        Runs(rig, 0).measure(batches)


@fault("H4", "a capture freezes nothing; timing collects what it left, then warms up, outside of what is timed")
def test_H4_after_a_capture_the_collector_finds_garbage_as_before(place, backend) -> None:
    x, frozen = torch.ones(8, device=backend.device), gc.get_freeze_count()
    capture(lambda: x + 1, **place)
    assert gc.isenabled() and gc.get_freeze_count() <= frozen, "some that were frozen may have died"
    cycle: list = [torch.ones(1)]
    cycle.append(cycle)
    del cycle
    assert gc.collect() > 0


@fault("H4")
def test_H4_arms_find_the_garbage_gone_and_are_warmed_up_before_the_clock_is_read(gpu, monkeypatch) -> None:
    events: list[str] = []
    clock, collect = gpu.perf_counter, gc.collect
    monkeypatch.setattr(gc, "collect", lambda: (events.append("collect"), collect())[1])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: (events.append("clock"), clock())[1]))
    gc.disable()  # nothing else may find it
    try:
        cycle: list = [garbage := Left()]
        cycle.append(cycle)
        left = weakref.ref(garbage)
        del cycle, garbage

        def arm(turn: int) -> None:
            assert left() is None
            events.append(f"arm {turn}")

        time_arms({"arm": arm}, CPU, rounds=2, warm_up=3)
    finally:
        gc.enable()
    warm_up, timed = ["arm 0", "arm 1", "arm 2"], ["clock", "arm 3", "clock", "clock", "arm 4", "clock"]
    assert events == ["collect", *warm_up, *timed]


class Left:
    """What a capture may leave to the collector."""


@fault("H5", "host time and device time are two figures, and the device is kept busy while the host enqueues")
def test_H5_a_kernel_far_shorter_than_its_dispatch_shows_its_own_device_time(gpu) -> None:
    """Kernels of 8 and 40 us behind 98 us of dispatch are five times apart, and the host's time is beside them."""
    arms = {name: (lambda _, us=us: gpu.launch(98, us)) for name, us in (("small", 8), ("large", 40))}
    found = time_arms(arms, CUDA, rounds=10)
    assert (found["small"].device_us, found["large"].device_us) == (8, 40)
    assert found["small"].host_us == found["small"].host_p10 == found["large"].host_us == 98


@fault("H5")
def test_H5_many_small_launches_have_no_gaps_of_the_host_in_their_device_time(gpu) -> None:
    found = time_arms({"arm": lambda _: [gpu.launch(5, 1) for _ in range(100)]}, CUDA, rounds=3)["arm"]
    assert (found.device_us, found.host_us) == (100, 500)


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
def test_H6_a_batch_of_pads_alone_runs_nothing_and_its_record_says_so(backend, monkeypatch) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(16,), full_sizes=(), replay_sizes=()))
    ran: list[str] = []
    forward, replay = runner._forward, BreakableGraph.replay
    monkeypatch.setattr(runner, "_forward", lambda size: (ran.append("eager"), forward(size))[1])
    monkeypatch.setattr(BreakableGraph, "replay", lambda graph: (ran.append(graph.name), replay(graph))[1])
    for asked in ([], [prefill("p", 0)]):
        output = Serving(runner).step(asked)
        record = output.record
        assert (record.num_tokens, record.padded_tokens, record.reason) == (0, 0, ReplayReason.EMPTY)
        assert record.mode is CudagraphMode.NONE and len(output.hidden_states) == 0
    assert ran == []
    for tokens in (9, 17):
        Serving(runner).step([prefill("p", tokens)])
    assert ran == ["PIECEWISE graph of 16 tokens", "eager"]
