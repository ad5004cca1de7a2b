"""A sweep: design points through any executor, each finished one kept at once, and a row for each at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed

import attrs

from replay_sim.explore.sweep_file import PointsFile
from replay_sim.explore.sweep_points import GROUP_POINTS, DesignPoint, SweptWorkload, by_schedule
from replay_sim.explore.sweep_rows import Row, run_group
from replay_sim.progress import Progress, no_progress

RunGroup = Callable[[Sequence[DesignPoint], SweptWorkload], list[Row]]
"""Runs points that share a schedule, in another process: a row for each, in order; failures are rows too."""


def run_sweep(
    points: Sequence[DesignPoint],
    workloads: Mapping[str, SweptWorkload],
    executor: Executor,
    file: PointsFile,
    *,
    run: RunGroup = run_group,
    group_points: int = GROUP_POINTS,
    progress: Progress = no_progress,
) -> list[Row]:
    """The rows of all points, in their order; those that `file` holds are not run again (issue 9, Sweeps).

    `workloads` are by source; a task runs at most `group_points`. Rows do not depend on the executor, its workers or
    what was resumed, but for times that are measured. Raises OSError for an executor that loses its workers; what had
    finished by then, or by an interrupt, is in the file.
    """
    left = [point for point in points if point.index not in file.rows]
    for _ in progress(_Finished(by_schedule(left, group_points), workloads, executor, file, run), "points"):
        pass
    return [file.rows[point.index] for point in points]


@attrs.frozen
class _Finished:
    """The rows as they come, each in the file by then; its length is known, so that a bar can show it."""

    groups: Sequence[Sequence[DesignPoint]]
    workloads: Mapping[str, SweptWorkload]
    executor: Executor
    file: PointsFile
    run: RunGroup

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __iter__(self) -> Iterator[Row]:
        futures = [self.executor.submit(self.run, group, self.workloads[group[0].workload]) for group in self.groups]
        try:
            for future in as_completed(futures):
                try:
                    rows = future.result()
                except Exception as error:
                    left = f"finished points are in {self.file.path}" if self.file.rows else "no point had finished"
                    raise OSError(f"the executor failed, {type(error).__name__}: {error}; {left}") from error
                self.file.append(rows)
                yield from rows
        finally:
            for future in futures:
                future.cancel()
