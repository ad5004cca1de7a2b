"""Memset nodes become kernel nodes: the same bytes, in the same place of the graph, on a GPU; refusals anywhere."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import attrs
import pytest
import torch
from torch import Tensor

from replay_sim.capture import CaptureError, capture

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


# --- Over a driver that only says what it is asked ---


@attrs.define
class Driver:
    """A graph `model` of one memset, and a graph `fill` of some kernels that a capture ends in."""

    height: int = 1
    fill_kernels: int = 1
    destroyed: list[str] = attrs.field(factory=list)

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_MEMSET="memset")

    def cuGraphGetNodes(self, graph: str, count: int) -> tuple:
        nodes = ["memset"] if graph == "model" else ["kernel"] * self.fill_kernels
        return 0, nodes[:count], len(nodes)

    def cuGraphNodeGetType(self, node: str) -> tuple:
        return 0, node

    def cuGraphMemsetNodeGetParams(self, node: str) -> tuple:
        return 0, SimpleNamespace(height=self.height, dst=512, elementSize=1, width=64, value=7)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple:
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple:
        return 0, "fill"

    def cuGraphDestroy(self, graph: str) -> tuple:
        self.destroyed.append(graph)
        return (0,)


def over(driver: Driver, monkeypatch) -> ModuleType:
    """A copy of the module that calls `driver`."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=3))
    spec = importlib.util.find_spec("replay_sim.capture.kernel_nodes")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def zeros(address: int, nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_memset_that_takes_several_kernels_is_refused_and_their_graph_destroyed(monkeypatch) -> None:
    """C7: PyTorch splits a fill of more elements than 32 bits count."""
    driver = Driver(fill_kernels=2)
    with pytest.raises(CaptureError, match="memset of 64 bytes takes 2 kernels"):
        over(driver, monkeypatch).replace_memsets("model", zeros)
    assert driver.destroyed == ["fill"]


def test_a_fill_that_fails_leaves_no_graph_behind(monkeypatch) -> None:
    """C7: the original error is what the caller sees."""

    def fails(memory: Tensor, value: int) -> None:
        raise RuntimeError("no kernel for it")

    driver = Driver()
    monkeypatch.setattr(Tensor, "fill_", fails)
    with pytest.raises(RuntimeError, match="no kernel for it"):
        over(driver, monkeypatch).replace_memsets("model", zeros)
    assert driver.destroyed == ["fill"]


def test_a_memset_of_several_lines_stays(monkeypatch) -> None:
    driver, asked = Driver(height=2), []
    over(driver, monkeypatch).replace_memsets("model", lambda address, nbytes: asked.append(nbytes))
    assert not asked and not driver.destroyed
