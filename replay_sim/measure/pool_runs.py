"""Measures reserved memory of the sharing arrangements, each capture in a process of its own (O1-O5)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable

import attrs
import torch
from tabulate import tabulate

from replay_sim.config import SHAPES, load_config
from replay_sim.decoder.step import StepRunner
from replay_sim.measure.records import Point
from replay_sim.measure.run_steps import BLOCK_SIZE, capture_groups, make_backend
from replay_sim.plan.capture_plan import make_plan
from replay_sim.replay.sharing import PoolSharing
from replay_sim.workload.kv_blocks import blocks_for

MIB = 1 << 20
ORDERS = ("largest_first", "smallest_first")

Progress = Callable[[Iterable, str], Iterable]


def measure_pool(
    config: str, shape: str, backend: str, seed: int, progress: Progress = lambda items, _: items
) -> tuple[list[Point], str]:
    """Capture the config's plan once for each arrangement and order, in fresh processes; points and a table.

    Reserved bytes are the growth of the caching allocator's reserved memory over each group's whole capture;
    `driver_bytes` the growth of the driver's. Raises RuntimeError with a process's last line if it fails.
    """
    cases = [(sharing, order) for sharing in PoolSharing for order in ORDERS]
    points: list[Point] = []
    for sharing, order in progress(cases, "pool"):
        arguments = [config, shape, backend, str(seed), sharing.value, order]
        done = subprocess.run(
            [sys.executable, "-m", "replay_sim.measure.pool_runs", *arguments], capture_output=True, text=True
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"pool run {sharing.value} {order} failed: {last}")
        points += json.loads(done.stdout)
    rows = [
        (p["arrangement"], p["order"], p["group"], p["num_graphs"], f"{int(p['reserved_bytes'] or 0) / MIB:,.0f}")
        for p in points
    ]
    return points, tabulate(rows, ("Arrangement", "Order", "Group", "Graphs", "Reserved MiB"), tablefmt="pipe")


def capture_once(config: str, shape_name: str, backend_name: str, seed: int, sharing: str, order: str) -> list[Point]:
    """Capture model and then replay graphs in this process and weigh both groups."""
    serving = load_config(config)
    plan = make_plan(serving)
    backend = make_backend(backend_name)
    shape = attrs.evolve(SHAPES[shape_name], window=serving.window)
    max_blocks = blocks_for(max(1, plan.largest_size), BLOCK_SIZE)
    runner = StepRunner(
        shape,
        plan,
        backend,
        num_blocks=max_blocks,
        max_blocks=max_blocks,
        block_size=BLOCK_SIZE,
        seed=seed,
        sharing=PoolSharing(sharing),
        largest_first=order == ORDERS[0],
    )
    driver = _driver_used()
    points: list[Point] = []
    for group in capture_groups(runner):
        points.append(
            {
                "arrangement": sharing,
                "order": order,
                "group": group.group,
                "reserved_bytes": group.reserved_bytes,
                "predicted_bytes": None,
                "num_graphs": group.num_graphs,
                "seconds": round(group.seconds, 3),
            }
        )
    points[-1]["driver_bytes_all_groups"] = _driver_used() - driver
    return points


def _driver_used() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    config, shape, backend, seed, sharing, order = sys.argv[1:]
    print(json.dumps(capture_once(config, shape, backend, int(seed), sharing, order)))
