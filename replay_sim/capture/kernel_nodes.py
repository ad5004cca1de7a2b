"""Memset nodes of one line made kernels in captured graphs: kernels alone launch without work for each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from replay_sim.capture.backend import CaptureError

_DTYPE_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def nodes_of(graph: int) -> list[Any]:
    """The nodes of a CUDA graph, given by its handle."""
    (count,) = _checked("cuGraphGetNodes", driver.cuGraphGetNodes(graph, 0)[::2])
    return list(_checked("cuGraphGetNodes", driver.cuGraphGetNodes(graph, count))[0])


def replace_memsets(graph: int, memory_at: Callable[[int, int], torch.Tensor]) -> None:
    """Put a kernel that fills the same bytes in the place of every memset node of one line; others stay.

    cuBLAS puts one before a product whose tiles share their sums (stream-K): three a layer at 4,096 rows, with which a
    launch took 91.1 µs at p10, and 7.8 with kernels (records/kernels-nvidia-h200.md). `memory_at(address, nbytes)` is a
    tensor of bytes there that owns nothing. The current stream must not be the default one, nor capturing. Raises
    CaptureError where a CUDA call fails, and for a memset so long that PyTorch fills it with several kernels.
    """
    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    for node in nodes_of(graph):
        if _checked("cuGraphNodeGetType", driver.cuGraphNodeGetType(node))[0] != memset:
            continue
        (clear,) = _checked("cuGraphMemsetNodeGetParams", driver.cuGraphMemsetNodeGetParams(node))
        if clear.height == 1:
            memory = memory_at(int(clear.dst), clear.elementSize * clear.width).view(_DTYPE_OF_BYTES[clear.elementSize])
            _replace(graph, node, memory, clear.value)


def _replace(graph: int, node: Any, memory: torch.Tensor, value: int) -> None:
    """A kernel node between the neighbours of `node`, in its stead; its parameters are copied when it is added."""
    limit = 1 << (8 * memory.element_size())
    value = value - limit if memory.dtype.is_signed and value >= limit // 2 else value
    fill = _captured(lambda: memory.fill_(value))
    try:
        kernels = nodes_of(fill)
        if len(kernels) != 1:
            raise CaptureError(f"a memset of {memory.nbytes} bytes takes {len(kernels)} kernels: clear less at a time")
        (params,) = _checked("cuGraphKernelNodeGetParams", driver.cuGraphKernelNodeGetParams(kernels[0]))
        before = _neighbours(driver.cuGraphNodeGetDependencies, node)
        after = _neighbours(driver.cuGraphNodeGetDependentNodes, node)
        (new,) = _checked("cuGraphAddKernelNode", driver.cuGraphAddKernelNode(graph, before, len(before), params))
        if after:
            added = driver.cuGraphAddDependencies(graph, [new] * len(after), after, None, len(after))
            _checked("cuGraphAddDependencies", added)
        _checked("cuGraphDestroyNode", driver.cuGraphDestroyNode(node))
    finally:
        driver.cuGraphDestroy(fill)


def _captured(function: Callable[[], object]) -> Any:
    """A graph of what `function` launches on the current stream; the caller destroys it. If it fails, none is left."""
    stream = torch.cuda.current_stream().cuda_stream
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _checked("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream, mode))
    try:
        function()
    except BaseException:
        status, graph = driver.cuStreamEndCapture(stream)
        if status == driver.CUresult.CUDA_SUCCESS:
            driver.cuGraphDestroy(graph)
        raise
    return _checked("cuStreamEndCapture", driver.cuStreamEndCapture(stream))[0]


def _neighbours(query: Callable[..., tuple[Any, ...]], node: Any) -> list[Any]:
    """The nodes that `query` gives, which also returns the data of their edges, none here, and their count."""
    *_, count = _checked(query.__name__, query(node, 0))
    return list(_checked(query.__name__, query(node, count))[0]) if count else []


def _checked(name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CaptureError(f"{name} failed with {status}")
    return tuple(values)
