"""Sweeps on real processes and on a real Dask cluster: the same rows, nothing lost, nothing repeated (issue 9)."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import pytest
from explore.sweep_cases import FAILED, POINTS, WORKLOADS, points_file, rows_in_threads

from replay_sim.explore.sweep import run_sweep
from replay_sim.explore.sweep_executors import dask_cluster, gpu_pool, in_own_process, process_pool
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload
from replay_sim.explore.sweep_rows import Row, run_group

PATIENCE_MS = 60_000
KILLED = """
import os, signal
from pathlib import Path
from explore.sweep_cases import POINTS, WORKLOADS, points_file
from replay_sim.explore.sweep import run_sweep
from replay_sim.explore.sweep_executors import process_pool

def then_die(rows, what):
    for count, row in enumerate(rows, 1):
        yield row
        if count == 20:
            print(*pool._processes, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

with points_file(Path(FOLDER)) as file, process_pool(2) as pool:
    run_sweep(POINTS, WORKLOADS, pool, file, progress=then_die)
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The rows as one process makes them."""
    return rows_in_threads(tmp_path_factory.mktemp("expected"))


@contextmanager
def two_dask_workers() -> Iterator[str]:
    """The address of a cluster of two worker processes."""
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        assert len(cluster.workers) == 2
        yield cluster.scheduler_address


def swept(executor: Executor, folder: Path) -> list[Row]:
    with points_file(folder) as file:
        return run_sweep(POINTS, WORKLOADS, executor, file)


def test_the_expected_rows_are_one_a_point_with_failures_among_them(expected: list[Row]) -> None:
    assert [row["point"] for row in expected] == [point.index for point in POINTS]
    assert [row["point"] for row in expected if row["error"]] == FAILED
    assert all(row["expected_step_ms"] > 0 for row in expected if not row["error"])


def test_rows_do_not_depend_on_the_number_of_workers(expected: list[Row], tmp_path: Path) -> None:
    """To the last digit, on real processes."""
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        with process_pool(workers) as executor:
            assert swept(executor, folder) == expected


def test_a_dask_cluster_of_two_processes_gives_the_same_rows(expected: list[Row], tmp_path: Path) -> None:
    """Issue 9, point 2."""
    with two_dask_workers() as address, dask_cluster(address) as executor:
        assert swept(executor, tmp_path) == expected


def program(text: str) -> subprocess.CompletedProcess[str]:
    """What a program has done that imports from the tests as well."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )


def remaining(folder: Path) -> tuple[set[int], set[int], list[Row]]:
    """Resume in this process: points that were finished before, points that were run now, and all rows."""
    ran: set[int] = set()

    def noting(points: Iterable[DesignPoint], workload: SweptWorkload) -> list[Row]:
        points = tuple(points)
        assert not ran & {point.index for point in points}
        ran.update(point.index for point in points)
        return run_group(points, workload)

    with points_file(folder, resume=True) as file, ThreadPoolExecutor(1) as executor:
        before = set(file.rows)
        return before, ran, run_sweep(POINTS, WORKLOADS, executor, file, run=noting)


def test_a_killed_sweep_is_resumed_without_a_loss_and_without_a_repetition(expected: list[Row], tmp_path: Path) -> None:
    """Issue 9, point 2: SIGKILL in the middle; its workers end with it."""
    done = program(KILLED.replace("FOLDER", repr(str(tmp_path))))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert all(map(has_ended, map(int, done.stdout.split())))
    before, ran, rows = remaining(tmp_path)
    assert 20 <= len(before) < len(POINTS)
    assert before | ran == set(range(len(POINTS))) and not before & ran
    assert rows == expected


def has_ended(pid: int) -> bool:
    """Whether the process ends; waits for it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    ended = bool(poll.poll(PATIENCE_MS))
    os.close(handle)
    return ended


def test_an_interrupt_leaves_what_had_finished(expected: list[Row], tmp_path: Path) -> None:
    """Ctrl-C."""

    def interrupted(rows: Iterable[Row], what: str) -> Iterator[Row]:
        for row in rows:
            yield row
            raise KeyboardInterrupt

    with points_file(tmp_path) as file, process_pool(2) as executor, pytest.raises(KeyboardInterrupt):
        run_sweep(POINTS, WORKLOADS, executor, file, progress=interrupted)
    before, ran, rows = remaining(tmp_path)
    assert 0 < len(before) < len(POINTS) and before.isdisjoint(ran) and rows == expected


def never_end() -> None:
    signal.pause()


def holds_interrupts_back() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_exception_ends_the_processes_whatever_they_run() -> None:
    """Nothing is waited for: a task that has no end would hold this test for ever."""
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), process_pool(2) as executor:
        assert executor.submit(holds_interrupts_back).result()
        for _ in range(5):
            executor.submit(never_end)
        assert len(set(multiprocessing.active_children()) - before) == 2
        raise KeyboardInterrupt
    assert set(multiprocessing.active_children()) == before
    assert not holds_interrupts_back()


def own_pid(fit: bool) -> tuple[int, bool]:
    return os.getpid(), fit


def test_a_workers_own_process_is_kept_while_it_is_fit_and_ends_with_the_worker() -> None:
    """At the end of the pool, and by an exception, whatever it runs."""
    with gpu_pool(["0"]) as executor:
        pids = [executor.submit(in_own_process, own_pid, fit).result() for fit in (True, False, True)]
    assert pids[0] == pids[1] != pids[2] and os.getpid() not in pids and all(map(has_ended, pids))
    with pytest.raises(KeyboardInterrupt), gpu_pool(["0"]) as executor:
        pid = executor.submit(in_own_process, own_pid, True).result()
        executor.submit(in_own_process, never_end)
        raise KeyboardInterrupt
    assert has_ended(pid)


def die() -> tuple[None, bool]:
    os.abort()


def test_a_workers_own_process_that_dies_is_an_error_with_its_exit_code_and_is_replaced() -> None:
    """The error has passed from process to process."""
    with gpu_pool(["0"]) as executor:
        first = executor.submit(in_own_process, own_pid, True).result()
        with pytest.raises(BrokenProcessPool, match=f"the process died with exit code -{int(signal.SIGABRT)}$"):
            executor.submit(in_own_process, die).result()
        second = executor.submit(in_own_process, own_pid, True).result()
    assert first != second and has_ended(first) and has_ended(second)


ONE_OF_THREE_DIES = """
from concurrent.futures.process import BrokenProcessPool
from explore.test_sweep import die, own_pid
from replay_sim.explore.sweep_executors import gpu_pool, in_own_process

with gpu_pool(["0"]) as pool:
    for call in ((own_pid, True), (die,), (own_pid, True)):
        try:
            print(type(pool.submit(in_own_process, *call).result()).__name__)
        except BrokenProcessPool:
            print("died")
"""


def test_after_a_process_that_died_all_end_without_a_word() -> None:
    done = program(ONE_OF_THREE_DIES)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["int", "died", "int"], "")


def end_at_once(points: object, workload: object) -> list[Row]:
    os._exit(9)


def test_a_worker_that_dies_ends_the_sweep_with_its_reason_and_what_had_finished(tmp_path: Path) -> None:
    with points_file(tmp_path) as file, process_pool(1) as executor:
        run_sweep(POINTS[:1], WORKLOADS, executor, file)
        with pytest.raises(OSError, match="BrokenProcessPool: .*; finished points are in .*csv.points") as lost:
            run_sweep(POINTS, WORKLOADS, executor, file, run=end_at_once)
        assert isinstance(lost.value.__cause__, BrokenProcessPool)


def test_a_bar_is_told_how_many_points_are_left(tmp_path: Path) -> None:
    seen: list[int] = []

    def noting(rows, what: str):
        seen.append(len(rows))
        return rows

    with points_file(tmp_path) as file, ThreadPoolExecutor(1) as executor:
        run_sweep(POINTS[:8], WORKLOADS, executor, file, progress=noting)
        run_sweep(POINTS, WORKLOADS, executor, file, progress=noting)
    assert seen == [8, len(POINTS) - 8]
