"""The CUDA backend: segments are real `torch.cuda.CUDAGraph`s on one stream and in one graph pool (C12)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from replay_sim.capture.backend import DEFAULT_STREAM_ERROR, CaptureBackend, CaptureError, seen_as
from replay_sim.capture.guard import HostAccessGuard, OperationGuard, check_innermost
from replay_sim.capture.kernel_nodes import nodes_of, replace_memsets


@attrs.frozen
class CudaSegment:
    """One instantiated CUDA graph of `num_operations` nodes, kernels and copies."""

    graph: torch.cuda.CUDAGraph
    num_operations: int

    def replay(self) -> None:
        """Launch the graph on the current stream (C2)."""
        self.graph.replay()


@attrs.define(eq=False)
class CudaPool:
    """A graph pool that outlives its graphs: the allocator drops a pool with its last graph, so `keeper` is one more.

    `retired` holds, by handle, the graphs of captures that CUDA invalidated and the keepers of their pools.
    """

    handle: Any
    keeper: torch.cuda.CUDAGraph
    retired: list[tuple[Any, torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = attrs.field(factory=list)

    @property
    def handles(self) -> set[tuple[int, int]]:
        """The pool ids whose segments are this pool's."""
        return {tuple(self.handle), *(tuple(handle) for handle, _, _ in self.retired)}


class RawPointer:
    """Device memory by address alone: a tensor made of it owns nothing (C3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class CudaBackend(CaptureBackend):
    """Captures on the current CUDA device, in thread-local mode: other threads' CUDA calls do not break a capture."""

    name = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise CaptureError("the cuda backend needs a CUDA device and none is available: use the host backend")
        super().__init__()
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device.index or 0)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool: CudaPool | None = None
        self._guards: tuple[OperationGuard, HostAccessGuard] | None = None
        self._entered = contextlib.ExitStack()

    def make_pool(self) -> CudaPool:
        """A new graph pool, kept alive by a graph that allocates nothing in it."""
        return CudaPool(*self._kept_handle())

    def _kept_handle(self) -> tuple[Any, torch.cuda.CUDAGraph]:
        handle = torch.cuda.graph_pool_handle()
        keeper = torch.cuda.CUDAGraph()
        outside = torch.zeros(1, device=self.device)
        with self.on_stream(self.make_stream()):
            outside.zero_()
            keeper.capture_begin(pool=handle, capture_error_mode="thread_local")
            outside.zero_()
            keeper.capture_end()
        return handle, keeper

    def make_stream(self) -> torch.cuda.Stream:
        """A new side stream."""
        return torch.cuda.Stream(self.device)

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Makes `stream` current, after the work of the stream before; that one then waits for it in turn."""
        outside = torch.cuda.current_stream(self.device)
        if outside == stream:
            yield
            return
        stream.wait_stream(outside)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            outside.wait_stream(stream)

    def check_ready(self) -> None:
        """Raises CaptureError while another device is current (C11)."""
        if torch.cuda.current_device() != self.device.index:
            raise CaptureError(
                f"cannot capture for {self.device} while cuda:{torch.cuda.current_device()} is current: "
                f"enter torch.cuda.device({self.device.index}) first"
            )

    def begin_segment(self, pool: CudaPool, stream: torch.cuda.Stream) -> None:
        """Starts to capture on `stream`, which must be current."""
        if stream == torch.cuda.default_stream(self.device):
            raise CaptureError(DEFAULT_STREAM_ERROR)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        self._graph, self._pool, self._entered = graph, pool, contextlib.ExitStack()
        self._guards = (OperationGuard(), HostAccessGuard())
        for guard in self._guards:
            self._entered.enter_context(guard)

    def check_break(self) -> None:
        """Refuses a break inside a mode that the captured function entered."""
        if self._guards is not None:
            check_innermost(*self._guards)

    def _stop(self) -> torch.cuda.CUDAGraph:
        if self._graph is None or self._pool is None:
            raise CaptureError("no segment is being captured: end_segment needs a begin_segment before it")
        graph, pool = self._graph, self._pool
        self._graph = self._guards = self._pool = None
        self._entered.close()
        try:
            with _no_empty_graph_warning():
                graph.capture_end()
        except RuntimeError:
            self._retire(pool, graph)
            raise
        return graph

    def _retire(self, pool: CudaPool, graph: torch.cuda.CUDAGraph) -> None:
        """Gives the pool a new handle after an invalidated capture into it.

        torch 2.11 raises at the end of such a capture before its allocators have left the pool. The device's can be
        made to leave; the one for pinned host memory cannot: it goes on asking the graph, which must stay alive, and
        refuses the handle for ever.
        """
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, pool.handle)
        pool.retired.append((pool.handle, pool.keeper, graph))
        pool.handle, pool.keeper = self._kept_handle()

    def end_segment(self) -> CudaSegment | None:
        """Ends the segment and instantiates its graph; None when nothing was captured."""
        graph = self._stop()
        num_nodes = len(nodes_of(graph.raw_cuda_graph()))
        if num_nodes == 0:
            graph.reset()
            return None
        replace_memsets(graph.raw_cuda_graph(), self._memory_at)
        graph.instantiate()
        return CudaSegment(graph, num_nodes)

    def abort_segment(self) -> None:
        """Ends the stream's capture and drops what it holds; an error of the ended capture itself is not news."""
        if self._graph is None:
            return
        with contextlib.suppress(RuntimeError):
            self._stop().reset()
        torch.cuda.synchronize(self.device)

    def weak_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same device memory, made from its address, that keeps nothing alive."""
        storage = tensor.untyped_storage()
        if tensor.numel() == 0 or not tensor.is_cuda:
            return tensor
        with torch.inference_mode(False), torch.no_grad():
            return seen_as(self._memory_at(storage.data_ptr(), storage.nbytes()), tensor)

    def _memory_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(RawPointer(address, nbytes), device=self.device)

    def live_bytes(self) -> int:
        """Bytes of live tensors in the caching allocator."""
        return torch.cuda.memory_allocated(self.device)

    def reserved_bytes(self, pool: CudaPool | None = None) -> int:
        """Bytes of the segments of `pool`, or of all memory that the caching allocator reserved."""
        if pool is None:
            return torch.cuda.memory_reserved(self.device)
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pool.handles)

    def empty_cache(self) -> None:
        """Empties the caching allocator's cache."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.device)


@contextmanager
def _no_empty_graph_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        yield
