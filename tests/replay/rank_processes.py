"""Runs a function on several gloo ranks, a process each, and hands back what each returned or how it ended."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import distributed as dist

PATIENCE_S = 120
"""How long a rank may take before it counts as hanging; nothing that passes comes near it."""


@attrs.frozen
class RankEnd:
    """The exit code of a rank, None if it hung, and what its function returned or the traceback that ended it."""

    exit_code: int | None
    result: Any = None


def run_ranks(folder: Path, world_size: int, work: Callable[..., Any], *arguments: Any) -> list[RankEnd]:
    """`work(store, *arguments)` on every rank; `work` is a function of an importable module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])  # once for all ranks of all tests
    places = [(folder, rank, world_size) for rank in range(world_size)]
    processes = [context.Process(target=_run_rank, args=(*place, work, arguments)) for place in places]
    for process in processes:
        process.start()
    ends = []
    for rank, process in enumerate(processes):
        process.join(PATIENCE_S)
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        file = folder / f"rank{rank}.pickle"
        result = pickle.loads(file.read_bytes()) if file.exists() else None
        ends.append(RankEnd(None if hung else process.exitcode, result))
    return ends


def results(ends: list[RankEnd]) -> list[Any]:
    """What the ranks returned; fails with the traceback of one that did not end well."""
    for rank, end in enumerate(ends):
        assert end.exit_code == 0, f"rank {rank} ended with {end.exit_code}:\n{end.result}"
    return [end.result for end in ends]


def _run_rank(folder: Path, rank: int, world_size: int, work: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    limit = timedelta(seconds=PATIENCE_S / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    file = folder / f"rank{rank}.pickle"
    try:
        file.write_bytes(pickle.dumps(work(store, *arguments)))
    except BaseException:
        file.write_bytes(pickle.dumps(traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()
