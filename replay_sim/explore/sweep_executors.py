"""The executors that a sweep runs on: processes of this machine, one a core or one a GPU, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from multiprocessing.util import Finalize
from typing import Any, ParamSpec, TypeVar

VISIBLE = "CUDA_VISIBLE_DEVICES"
CONNECT_SECONDS = 10
P = ParamSpec("P")
T = TypeVar("T")


def cores() -> int:
    """Cores of this machine that a process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """So many fresh processes of this machine, each on the main module's import alone.

    An interrupt from the keyboard reaches the parent only. A parent that is killed takes its workers with it, and an
    exception ends them at once, whatever they run.
    """
    with _ended(_Workers(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)) as pool:
        yield pool


class _Workers(ProcessPoolExecutor):
    """A pool whose processes inherit, from their first instruction on, that interrupts from the keyboard are held back.

    It knows them, so that they can be ended.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: set[BaseProcess] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As the base, which starts processes here."""
        before = set(multiprocessing.active_children())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._known |= set(multiprocessing.active_children()) - before

    def end(self) -> list[int | None]:
        """End all processes, whatever they run; what has not finished is lost. Their exit codes; a signal's is below 0.

        The pool's own thread has ended too: as this process exits, it would be woken by a pipe that it closes.
        """
        for process in self._known:
            process.terminate()
        for process in self._known:
            process.join()
        self.shutdown(cancel_futures=True)
        return [process.exitcode for process in self._known]


@contextmanager
def _ended(pool: _Workers) -> Iterator[Executor]:
    """The pool, shut down at the end, and ended by an exception."""
    try:
        yield pool
    except BaseException:
        pool.end()
        raise
    pool.shutdown()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none is touched."""
    import torch

    given = os.environ.get(VISIBLE)
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


@contextmanager
def gpu_pool(gpus: Sequence[str]) -> Iterator[Executor]:
    """A fresh process for each of these GPUs, which sees no other; else as process_pool."""
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    with _ended(_Workers(len(gpus), mp_context=context, initializer=_start_gpu_worker, initargs=(free,))) as pool:
        yield pool


def in_own_process(function: Callable[P, tuple[T, bool]], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call in a process that this one starts for itself, and that ends with it.

    The function returns its result and whether its process is fit for the next call, which else has a fresh one.
    Raises what the function raises, and BrokenProcessPool, which names the exit code, if its process dies.
    """
    try:
        result, fit = _own_process().submit(function, *args, **kwargs).result()
    except BrokenProcessPool as error:
        raise BrokenProcessPool(f"the process died with exit code {_end_own_process()}") from error
    if not fit:
        _end_own_process()
    return result


def _end_own_process() -> int | None:
    """End it, so that the next call has a fresh one; its exit code."""
    (code,) = _own_process().end()
    _own_process.cache_clear()
    return code


@cache
def _own_process() -> _Workers:
    """The process of the next call. It is ended before this one, as it exits, waits for all that it started."""
    own = _Workers(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    Finalize(None, own.end, exitpriority=0)
    return own


@contextmanager
def dask_cluster(address: str) -> Iterator[Executor]:
    """The workers of the Dask scheduler at an address such as tcp://host:8786; they need this very package.

    Raises ValueError without the package `distributed`, and OSError where no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ValueError(f"dask: {address!r} needs the package distributed, which the extra `dask` installs") from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise OSError(f"dask: no scheduler answers at {address!r}: {error}") from error
    with client:
        yield client.get_executor()


def _start_worker() -> None:
    """End when the parent does, however it does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _start_gpu_worker(free: SimpleQueue[str]) -> None:
    """Take one GPU of those left, before CUDA is initialised."""
    os.environ[VISIBLE] = free.get()
    _start_worker()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
