"""Launches of profiled calls: split at the host's waits, counted by kind, and held against what an arm says."""

import attrs
import pytest
import torch

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, StepRecord
from replay_sim.measure.launches import (
    CALLS_A_SESSION,
    Launches,
    TraceEvent,
    check_launches,
    profile_calls,
    split_launches,
)

EAGER = StepRecord(10, 10, CudagraphMode.NONE, 0, 0, None, ReplayReason.OFF, 1, ModelReason.NO_SIZES)
IN_GRAPHS = attrs.evolve(EAGER, mode=CudagraphMode.PIECEWISE)


def host(name: str, start: int, duration: int = 1) -> TraceEvent:
    return TraceEvent(name, start, duration, on_device=False)


def device(name: str, start: int, duration: int) -> TraceEvent:
    return TraceEvent(name, start, duration, on_device=True)


FIRST = [
    host("cudaLaunchKernel", 10),
    host("cuLaunchKernelEx", 12),
    host("cudaLaunchKernelExC", 14),
    host("cudaMemcpyAsync", 15),
    device("Memcpy HtoD (Pinned -> Device)", 20, 1_000),
    device("kernel", 1_100, 3_000),
    device("late kernel", 5_000, 500),
    device("Stream Wait Event", 5_600, 9_000),
]
SECOND = [
    host("cudaGraphLaunch", 10_010),
    host("cudaGraphLaunch", 10_020),
    host("cudaLaunchKernel", 10_030),
    device("kernel in a graph", 10_100, 2_000),
    device("kernel in a graph", 12_200, 2_000),
]
WAITS = [host("cudaDeviceSynchronize", 0), host("cudaDeviceSynchronize", 16, 9_000)]
WAITS += [host("cudaDeviceSynchronize", 10_040, 9_000), host("cudaDeviceSynchronize", 30_000)]


def test_a_calls_work_lies_before_the_end_of_the_wait_that_follows_it() -> None:
    """Kernels still start after the host began to wait."""
    first, second = split_launches([*WAITS, *SECOND, *FIRST, device("Context Sync", 30_001, 5)], 2)
    assert first == Launches(device_us=4.5, device_operations=3, graph_launches=0, kernel_launches=3)
    assert second == Launches(device_us=4.0, device_operations=2, graph_launches=2, kernel_launches=1)


def test_a_trace_of_another_number_of_calls_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the work of 2 calls, and 3 were made"):
        split_launches([*WAITS, *FIRST, *SECOND], 3)


def launched(graphs: int) -> Launches:
    return Launches(device_us=1.0, device_operations=5, graph_launches=graphs, kernel_launches=5)


@pytest.mark.parametrize("replay_mode", [None, CudagraphMode.NONE, CudagraphMode.PIECEWISE])
def test_an_arm_that_ran_what_it_says_passes(replay_mode: CudagraphMode | None) -> None:
    """Issue 4, point 4."""
    graphs = int(replay_mode is CudagraphMode.PIECEWISE)
    check_launches("some", attrs.evolve(EAGER, replay_mode=replay_mode), launched(graphs))
    check_launches("some", attrs.evolve(IN_GRAPHS, replay_mode=replay_mode), launched(1 + graphs))
    check_launches("unknown", IN_GRAPHS, None)


def test_an_arm_of_graphs_that_launched_none_is_refused() -> None:
    """Issue 4, point 4."""
    with pytest.raises(RuntimeError, match="arm piecewise_off ran 10 tokens in mode PIECEWISE.*launched 0 graphs"):
        check_launches("piecewise_off", IN_GRAPHS, launched(0))


def test_an_eager_arm_that_launched_a_graph_is_refused() -> None:
    """Issue 4, point 4."""
    with pytest.raises(RuntimeError, match="arm eager_off ran .* launched 3 graphs"):
        check_launches("eager_off", EAGER, launched(3))


def test_without_a_gpu_nothing_is_counted_and_nothing_runs() -> None:
    assert profile_calls([lambda: pytest.fail("it ran")] * 2, torch.device("cpu")) == [None, None]


@pytest.mark.gpu
def test_real_traces_of_two_sessions_are_split_into_their_calls() -> None:
    """The last session's calls are counted as the others': the profiler leaves the driver after it."""
    x = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x.mul_(1.0)
    calls = [lambda: x.add_(1.0), graph.replay, lambda: (x.add_(1.0), x.add_(1.0), graph.replay())]
    times = CALLS_A_SESSION // 3 + 2
    found = [one for one in profile_calls(calls * times, x.device) if one is not None]
    assert [(one.kernel_launches, one.graph_launches, one.device_operations) for one in found] == [
        (1, 0, 1),
        (0, 1, 3),
        (2, 1, 5),
    ] * times
    assert all(one.device_us > 0 for one in found)
