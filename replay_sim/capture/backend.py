"""The interface between breakable graphs and what records them: `cuda` or `host` (C12)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class CaptureError(RuntimeError):
    """What cannot be captured, or a capture used wrongly; the message names the operation and the remedy."""


DEFAULT_STREAM_ERROR = (
    "the default stream cannot capture: other work of the process runs on it. Capture on a stream from make_stream()"
)


def seen_as(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`memory`, the bytes of the storage of `like`, in its dtype, shape and strides; a conjugate view stays one."""
    size = like.dtype.itemsize
    elements = memory[: memory.numel() // size * size].view(like.dtype)
    seen = elements.as_strided(like.shape, like.stride(), like.storage_offset())
    seen = seen.conj() if like.is_conj() else seen
    return torch._neg_view(seen) if like.is_neg() else seen


class Segment(Protocol):
    """A captured stretch of operations between two eager breaks."""

    @property
    def num_operations(self) -> int:
        """How many operations a replay runs: on a GPU the nodes of a graph, kernels and copies."""

    def replay(self) -> None:
        """Run the captured operations again on the addresses that they were captured with (C2)."""


class CaptureBackend(ABC):
    """Records segments on one stream, into one graph pool.

    Pools and streams are opaque handles of the backend that made them. `begin_segment` and `end_segment` are
    called in turn by `capture`, on the stream that `on_stream` made current.
    """

    name: str
    device: torch.device
    capture_name = "graph"
    """The name of the graph whose capture began last."""

    def __init__(self) -> None:
        self._in_use = threading.Lock()

    @contextmanager
    def capturing(self, name: str) -> Iterator[None]:
        """Holds the backend for the capture of graph `name`; CaptureError while another thread captures on it (C6)."""
        mine = False
        try:
            mine = self._in_use.acquire(blocking=False)
            if not mine:
                raise CaptureError(
                    f"cannot capture {name!r} while another thread captures {self.capture_name!r} on this backend: "
                    "give each thread a backend, pool and stream of its own, or capture the graphs one after the other"
                )
            self.capture_name = name
            yield
        finally:
            if mine:
                self._in_use.release()

    @abstractmethod
    def make_pool(self) -> Any:
        """A new, empty graph pool."""

    @abstractmethod
    def make_stream(self) -> Any:
        """A new stream; segments captured on different streams share no memory, even in one pool (O2)."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Makes `stream` current, ordered after the work of the stream that was current before, and back."""

    @abstractmethod
    def check_ready(self) -> None:
        """Raises CaptureError where nothing can be captured now, such as on another device (C11)."""

    @abstractmethod
    def begin_segment(self, pool: Any, stream: Any) -> None:
        """Starts to record on the current stream, with allocations from `pool`.

        Raises CaptureError on the default stream, which no capture may use.
        """

    @abstractmethod
    def check_break(self) -> None:
        """Raises CaptureError where the segment cannot end here for an eager break."""

    @abstractmethod
    def end_segment(self) -> Segment | None:
        """Ends the segment; None when nothing was recorded."""

    @abstractmethod
    def abort_segment(self) -> None:
        """Ends a segment after an error, if one was begun, and drops it; the stream is not capturing then (C7)."""

    def run_plain(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs what no segment holds: a warm-up, or an eager break inside a capture."""
        return function(*args, **kwargs)

    @abstractmethod
    def weak_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that keeps nothing of a pool alive (C3)."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes held by live tensors outside of pools; steady once warm-up has made all lazy buffers (C8)."""

    @abstractmethod
    def reserved_bytes(self, pool: Any = None) -> int:
        """Bytes of memory segments reserved by `pool`, or by all pools and plain memory together (O5)."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Gives back cached memory that no tensor and no graph pool holds, such as a warm-up's (O5)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work of the device."""
