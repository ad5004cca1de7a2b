"""The arena's truth: on a CPU, as on a GPU, what dies is reused, and a stale output holds another graph's data."""

import pytest
import torch

from replay_sim.capture import capture
from replay_sim.capture.allocator_blocks import LARGE_SEGMENT
from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.decoder.step import StepRunner
from replay_sim.plan import CapturePlan
from replay_sim.replay.sharing import PoolSharing

MIB = 1 << 20
SIZES = (20480, 12288, 8192, 4096)  # rows of 1 KiB
WIDTH = 256


@pytest.fixture
def backend() -> HostBackend:
    return HostBackend(1 << 30)


def place_of(backend: HostBackend, pool=None, stream=None) -> dict:
    return {
        "backend": backend,
        "pool": backend.make_pool() if pool is None else pool,
        "stream": backend.make_stream() if stream is None else stream,
    }


def layers(rows: int):
    """Four layers whose temporaries die, and their last output."""
    x = torch.ones(WIDTH).cumsum(0).repeat(rows, 1) / WIDTH

    def function() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = (y * 2).tanh()
        return y

    return function


def test_a_stale_output_holds_the_other_graphs_data(backend) -> None:
    """C12, D1: bit for bit, at the same address."""
    place = place_of(backend)
    x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))
    first, second = capture(lambda: x * 2, **place), capture(lambda: x[:2048].tanh(), **place)
    stale = first.replay()
    assert torch.equal(stale, x * 2)
    fresh = second.replay()
    assert stale.data_ptr() == fresh.data_ptr()
    assert torch.equal(stale[:2048], x[:2048].tanh())
    assert torch.equal(stale[2048:], x[2048:] * 2)


def test_a_dead_temporary_gives_its_bytes_to_the_next_operation(backend) -> None:
    """C12: one segment serves a chain of any length."""
    graph = capture(layers(4096), **place_of(backend))
    assert backend.reserved_bytes() == LARGE_SEGMENT
    assert torch.equal(graph.replay(), layers(4096)())


def total(backend: HostBackend, sizes: tuple[int, ...], **options: bool) -> int:
    place = place_of(backend)
    graphs = [capture(layers(rows), **place, **options) for rows in sizes]
    assert len(graphs) == len(sizes)
    return backend.reserved_bytes(place["pool"])


def test_smaller_graphs_after_the_largest_add_nothing(backend) -> None:
    """C8."""
    assert total(backend, SIZES) == total(backend, SIZES[:1])


def test_smallest_first_costs_more(backend) -> None:
    """C8."""
    assert total(backend, SIZES[::-1]) > total(backend, SIZES)


def test_held_outputs_cost_their_sum(backend) -> None:
    """D5."""
    equal = SIZES[:1] * 4
    held = total(backend, equal, hold_outputs=True)
    assert held >= sum(equal) * WIDTH * 4
    assert held > total(backend, equal)


@pytest.mark.parametrize("rows", [4096, 16])
def test_sharing_adds_nothing_and_another_stream_or_pool_adds_its_own(backend, rows: int) -> None:
    """O1, O2, D3: of blocks of either kind."""
    model = place_of(backend)
    capture(layers(rows), **model)
    reserved = backend.reserved_bytes()
    grown = {}
    for sharing, place in {
        PoolSharing.SHARED: model,
        PoolSharing.OWN_STREAM: place_of(backend, pool=model["pool"]),
        PoolSharing.OWN_POOL: place_of(backend, stream=model["stream"]),
    }.items():
        capture(layers(rows), **place)
        grown[sharing] = backend.reserved_bytes() - reserved
        reserved = backend.reserved_bytes()
    assert grown[PoolSharing.SHARED] == 0
    assert grown[PoolSharing.OWN_STREAM] == grown[PoolSharing.OWN_POOL] > 0


PLAN = CapturePlan(
    window=TINY.window,
    model_sizes=(16, 64),
    full_sizes=(4,),
    replay_sizes=(8, 32),
    trim_threshold=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


@pytest.mark.parametrize("sharing", PoolSharing)
def test_the_decoders_replay_graphs_add_what_their_arrangement_says(sharing: PoolSharing) -> None:
    """O1-O3, point 3."""
    backend = HostBackend(1 << 30)
    runner = StepRunner(TINY, PLAN, backend, num_blocks=4, max_blocks=1, sharing=sharing)
    runner.capture_model_graphs()
    model = backend.reserved_bytes()
    runner.capture_replay_graphs()
    grown = backend.reserved_bytes() - model
    assert (grown == 0) == (sharing is PoolSharing.SHARED)
    assert runner.sharing.sharing is sharing
    assert (backend.reserved_bytes(runner.pool) == model) == (sharing is not PoolSharing.OWN_STREAM)


def test_a_graph_captured_under_memory_keeps_its_address_after_others_die(backend) -> None:
    """C2: what is captured later never moves what was captured before."""
    place = place_of(backend)
    sizes = (2048, 1024, 512)
    graphs = [capture(layers(rows), **place) for rows in sizes]
    for rows, graph in list(zip(sizes, graphs, strict=True)) * 2:
        assert torch.equal(graph.replay(), layers(rows)())
