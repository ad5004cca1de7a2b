"""Memset nodes become kernel nodes: the same bytes, in the same place of the graph, on a GPU."""

import pytest
import torch

from replay_sim.capture import capture

pytestmark = pytest.mark.gpu


@pytest.fixture
def place():
    from replay_sim.capture.cuda import CudaBackend

    backend = CudaBackend()
    return {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}


def kinds_of(graph) -> list[str]:
    from cuda.bindings import driver

    from replay_sim.capture.kernel_nodes import nodes_of

    handles = [segment.graph.raw_cuda_graph() for segment in graph.segments]
    return [driver.cuGraphNodeGetType(node)[1].name for handle in handles for node in nodes_of(handle)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_a_graph_with_memsets_has_kernels_alone_and_clears_between_its_neighbours(place, dtype) -> None:
    """C2: what stands before a memset is cleared, what comes after stays, on every replay."""
    device = place["backend"].device
    x, y = torch.ones(1000, dtype=dtype, device=device), torch.zeros(1000, dtype=dtype, device=device)

    def function() -> None:
        x.add_(3)
        torch.add(x, 1, out=y)
        x[8:500].zero_()
        x.add_(2)
        y[:4].zero_()

    for _ in range(2):
        x.fill_(1)
        graph = capture(function, **place)
        assert set(kinds_of(graph)) == {"CU_GRAPH_NODE_TYPE_KERNEL"}
        for _ in range(2):
            x.fill_(1)
            graph.replay()
            assert x[:8].tolist() == [6] * 8 and x[8:500].unique().tolist() == [2] and x[500:].unique().tolist() == [6]
            assert y.tolist() == [0] * 4 + [5] * 996


def test_a_graph_of_a_memset_alone_clears(place) -> None:
    x = torch.ones(64, device=place["backend"].device)
    graph = capture(lambda: x.zero_(), **place)
    x.fill_(3)
    graph.replay()
    assert not bool(x.any()) and graph.num_operations == 1
    assert kinds_of(graph) == ["CU_GRAPH_NODE_TYPE_KERNEL"]
