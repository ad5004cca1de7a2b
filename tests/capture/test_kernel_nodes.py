"""Memset nodes become kernel nodes: the same bytes, in the same place of the graph, on a GPU."""

import pytest
import torch
from torch import Tensor

from replay_sim.capture import capture

KERNEL, MEMSET = "CU_GRAPH_NODE_TYPE_KERNEL", "CU_GRAPH_NODE_TYPE_MEMSET"
# Bytes of an element: the dtype that holds it, and a value whose bytes differ and whose top bit is set.
ELEMENTS = {1: (torch.uint8, 0xA5), 2: (torch.int16, 0xA5C3), 4: (torch.int32, 0xA5C3E187)}


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


def set_memory(target: Tensor, value: int) -> None:
    """A memset of the driver on the current stream; what PyTorch clears with may be a kernel."""
    from cuda.bindings import driver

    memsets = {1: driver.cuMemsetD8Async, 2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}
    stream = torch.cuda.current_stream().cuda_stream
    (status,) = memsets[target.element_size()](target.data_ptr(), value, target.numel(), stream)
    assert status == driver.CUresult.CUDA_SUCCESS


def as_element(value: int, dtype: torch.dtype) -> int:
    """The number that an element of those bits is."""
    return int.from_bytes(value.to_bytes(dtype.itemsize, "little"), "little", signed=dtype.is_signed)


def leave_memsets(monkeypatch) -> None:
    monkeypatch.setattr("replay_sim.capture.cuda.replace_memsets", lambda graph, memory_at: None)


@pytest.mark.gpu
@pytest.mark.parametrize("replaced", [False, True], ids=["memsets left", "memsets replaced"])
@pytest.mark.parametrize("size", ELEMENTS)
def test_a_graph_with_memsets_has_kernels_alone_and_sets_between_its_neighbours(
    place, monkeypatch, size: int, replaced: bool
) -> None:
    """C2: what stands before a memset is overwritten, what comes after stays, on every replay, as with the memsets."""
    dtype, value = ELEMENTS[size]
    device, element = place["backend"].device, as_element(value, dtype)
    x, y = torch.ones(1000, dtype=dtype, device=device), torch.zeros(1000, dtype=dtype, device=device)

    def function() -> None:
        x.add_(3)
        torch.add(x, 1, out=y)
        set_memory(x[8:500], value)
        x.add_(2)
        set_memory(y[:4], value)

    if not replaced:
        leave_memsets(monkeypatch)
    graph = capture(function, **place)
    assert sorted(kinds_of(graph)) == [KERNEL] * 3 + [KERNEL if replaced else MEMSET] * 2
    for _ in range(2):
        x.fill_(1)
        graph.replay()
        assert x.tolist() == [6] * 8 + [element + 2] * 492 + [6] * 500
        assert y.tolist() == [element] * 4 + [5] * 996


@pytest.mark.gpu
@pytest.mark.parametrize("replaced", [False, True], ids=["memset left", "memset replaced"])
def test_a_graph_of_a_memset_alone_sets(place, monkeypatch, replaced: bool) -> None:
    dtype, value = ELEMENTS[4]
    x = torch.ones(64, dtype=dtype, device=place["backend"].device)
    if not replaced:
        leave_memsets(monkeypatch)
    graph = capture(lambda: set_memory(x, value), **place)
    assert kinds_of(graph) == [KERNEL if replaced else MEMSET] and graph.num_operations == 1
    x.fill_(3)
    graph.replay()
    assert x.tolist() == [as_element(value, dtype)] * 64
