"""Measures reserved memory of the sharing arrangements, each capture in a process of its own (O1-O5)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from tabulate import tabulate

from replay_sim.capture.allocator_trace import write_trace
from replay_sim.capture.torch_snapshot import from_torch_snapshot, history_length
from replay_sim.config import SHAPES, load_config
from replay_sim.decoder.pool_prediction import record_plan
from replay_sim.decoder.step import StepRunner
from replay_sim.measure.records import Point
from replay_sim.measure.run_steps import capture_groups, make_backend
from replay_sim.plan.capture_plan import make_plan
from replay_sim.progress import Progress, no_progress
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing
from replay_sim.whole_file import write_whole
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for

MIB = 1 << 20
ORDERS = ("largest_first", "smallest_first")
OUTPUTS = ("dropped", "held")
HISTORY_SUFFIX = ".jsonl.xz"


@attrs.frozen(kw_only=True)
class PoolCase:
    """One capture of a config's plan: the arrangement, the order of sizes, and whether outputs are held.

    `history` is a file that the allocation history is written to, "" for none.
    """

    config: str
    shape: str
    backend: str
    seed: int
    arrangement: str
    order: str
    outputs: str
    history: str = ""


def pool_cases(
    config: str, shape: str, backend: str, seed: int, *, only: PoolSharing | None = None, histories: Path | None = None
) -> tuple[PoolCase, ...]:
    """The cases to measure: each arrangement largest first with outputs dropped and held, and smallest first.

    With `only`, that arrangement as it is used: largest first, outputs dropped. `histories` is the folder for them.
    """

    def case(sharing: PoolSharing, order: str, outputs: str) -> PoolCase:
        name = f"{shape}-{Path(config).stem}-{sharing.value}-{order}-{outputs}{HISTORY_SUFFIX}"
        return PoolCase(
            config=config,
            shape=shape,
            backend=backend,
            seed=seed,
            arrangement=sharing.value,
            order=order,
            outputs=outputs,
            history=str(histories / name) if histories else "",
        )

    if only is not None:
        return (case(only, "largest_first", "dropped"),)
    kinds = (("largest_first", "dropped"), ("largest_first", "held"), ("smallest_first", "dropped"))
    return tuple(case(sharing, order, outputs) for sharing in PoolSharing for order, outputs in kinds)


def measure_pool(cases: Sequence[PoolCase], progress: Progress = no_progress) -> tuple[list[Point], str]:
    """Capture each case in a fresh process, and predict it from shapes; points and a table.

    `reserved_bytes` is the growth of the graph pools' reserved memory over each group's whole capture, `plain_bytes`
    that outside of pools, `driver_bytes` the growth of the driver's over both groups. Raises RuntimeError with a
    process's last line if it fails.
    """
    predicted = {plan: _predict(*plan) for plan in {(case.config, case.shape) for case in cases}}
    points: list[Point] = []
    for case in progress(cases, "pool"):
        for point in _in_fresh_process(case):
            key = (case.arrangement, case.order, case.outputs, point["group"])
            points.append(point | {"predicted_bytes": predicted[case.config, case.shape][key]})
    keys = ("plan", "arrangement", "order", "outputs", "group", "num_graphs")
    rows = [[*(p[key] for key in keys), _mib(p["reserved_bytes"]), _mib(p["predicted_bytes"])] for p in points]
    return points, tabulate(rows, (*keys, "measured MiB", "predicted MiB"), tablefmt="pipe")


def _mib(nbytes: object) -> str:
    return f"{int(nbytes) / MIB:,.1f}" if isinstance(nbytes, int) else "-"


def _predict(config: str, shape: str) -> dict[tuple[str, str, str, object], int]:
    """Pool bytes predicted from shapes, by arrangement, order, outputs and group."""
    memory = record_plan(SHAPES[shape], make_plan(load_config(config)))
    return {
        (growth.arrangement.value, order, outputs, growth.group): growth.pool_bytes
        for order in ORDERS
        for outputs in OUTPUTS
        for growth in memory.predict(largest_first=order == ORDERS[0], hold_outputs=outputs == OUTPUTS[1])
    }


def _in_fresh_process(case: PoolCase) -> list[Point]:
    done = subprocess.run(
        [sys.executable, "-m", "replay_sim.measure.pool_runs", json.dumps(attrs.asdict(case))],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"pool run of {case.arrangement}, {case.order} failed: {last}")
    points: list[Point] = json.loads(done.stdout)
    return points


def capture_once(case: PoolCase) -> list[Point]:
    """Capture model and then replay graphs in this process and weigh both groups."""
    serving = load_config(case.config)
    plan = make_plan(serving)
    backend = make_backend(case.backend)
    max_blocks = blocks_for(max(1, plan.largest_size), BLOCK_SIZE)
    runner = StepRunner(
        attrs.evolve(SHAPES[case.shape], window=serving.window, num_weight_sets=1),
        plan,
        backend,
        num_blocks=max_blocks,
        max_blocks=max_blocks,
        block_size=BLOCK_SIZE,
        seed=case.seed,
        replay_form=ReplayForm.BREAKABLE,
        sharing=PoolSharing(case.arrangement),
        largest_first=case.order == ORDERS[0],
        hold_outputs=case.outputs == OUTPUTS[1],
    )
    history = _History() if case.history else None
    driver = _driver_used()
    groups = capture_groups(runner, history.marked if history else no_progress)
    driver = _driver_used() - driver
    if history:
        history.write(Path(case.history))
    about = {
        "arrangement": case.arrangement,
        "order": case.order,
        "outputs": case.outputs,
        "plan": Path(case.config).stem,
    }
    return [
        {
            **about,
            "group": group.group,
            "reserved_bytes": group.pool_bytes,
            "plain_bytes": group.plain_bytes,
            "predicted_bytes": None,
            "num_graphs": group.num_graphs,
            "seconds": round(group.seconds, 3),
            "driver_bytes": driver,
        }
        for group in groups
    ]


class _History:
    """Records the caching allocator's history, with a mark after every capture.

    A mark is a place in the history, so that snapshots taken to weigh pools are no marks.
    """

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(context=None, stacks="python")
        self._marks: dict[int, str] = {}

    def marked(self, sizes: Iterable[int], what: str) -> Iterator[int]:
        """Passes sizes through and marks the history after each was captured."""
        for size in sizes:
            yield size
            self._marks[history_length(torch.cuda.memory._snapshot())] = f"{what} {size}"

    def write(self, path: Path) -> None:
        """Writes the history to `path`, NAME.jsonl.xz, and the measured reserved bytes at its marks beside it."""
        recorded = from_torch_snapshot(torch.cuda.memory._snapshot(), marks=self._marks)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(recorded.trace, path)
        measured: list[dict[str, Any]] = [
            {"mark": mark.name, "reserved": {str(pool): size for pool, size in mark.reserved.items()}}
            for mark in recorded.marks
        ]
        write_whole(path.with_name(path.name.removesuffix(HISTORY_SUFFIX) + ".marks.json"), json.dumps(measured))


def _driver_used() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    print(json.dumps(capture_once(PoolCase(**json.loads(sys.argv[1])))))
