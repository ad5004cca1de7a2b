"""Runs of random worlds: histories of each, until so many steps ran; what was covered, and every failure."""

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count, product
from multiprocessing import get_context

import attrs
import hypothesis
import torch
from hypothesis import HealthCheck, given, settings
from long_run.histories import Step, histories
from long_run.served import Path, Served, Tally
from long_run.worlds import World, build, draw_world

from replay_sim.batch.dispatch import ModelReason, ReplayReason
from replay_sim.capture import CaptureBackend
from replay_sim.capture.host import HostBackend
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing

HISTORIES_PER_WORLD = 4
MOST_FAILURES = 50
ARENA_BYTES = 1 << 28
WITH_REPLAY_BATCH = ("GRAPH", "NO_SIZES", "TOO_MANY_ROWS", "NOT_CAPTURED")


@attrs.define
class Report:
    """What ran: counts and paths, worlds, by seed each failure with the history that showed it; processor seconds."""

    tally: Tally = attrs.field(factory=Tally)
    worlds: int = 0
    failures: dict[int, str] = attrs.field(factory=dict)
    seconds: float = 0.0

    def add(self, other: "Report") -> None:
        """Add what another says."""
        self.tally.add(other.tally)
        self.worlds += other.worlds
        self.failures |= other.failures
        self.seconds += other.seconds


def possible_paths() -> set[Path]:
    """Every path that some step of some world takes; `replay=False`, which measurements ask for, is no step's."""
    replayed = [("NONE", reason) for reason in WITH_REPLAY_BATCH[1:]] + [("PIECEWISE", "GRAPH")]
    by_model = {
        "EMPTY": [("", "EMPTY")],
        "FULL": [("", "FULL_GRAPH")],
        "PIECEWISE": [("", "THRESHOLD_OFF"), ("", "BELOW_THRESHOLD"), *replayed],
        **dict.fromkeys(("NO_SIZES", "TOO_MANY_TOKENS", "NOT_CAPTURED"), [("", "NOTHING_TRIMS"), *replayed]),
    }
    assert set(by_model) == set(ModelReason.__members__)
    assert {reason for pairs in by_model.values() for _, reason in pairs} | {"OFF"} == set(ReplayReason.__members__)
    return {
        (model, mode, reason, form.name, sharing.name)
        for model, pairs in by_model.items()
        for (mode, reason), form, sharing in product(pairs, ReplayForm, PoolSharing)
    }


def run_worlds(
    first_seed: int,
    steps: int,
    progress: Callable[[Report], None] = lambda of_world: None,
    *,
    workers: int = 1,
    device: str = "cpu",
) -> Report:
    """Run the worlds of `first_seed` and on until `steps` steps ran right; a failure ends its world alone.

    After MOST_FAILURES worlds that failed no other is run: their steps count for nothing, so that a run in which every
    world fails would not end. `progress` is told of each world. With several `workers`, processes run worlds beside
    each other and are taken in the order of their seeds, so that the same steps and seed give the same report with any
    number.
    """
    report, worlds = Report(), _worlds(count(first_seed), workers, partial(run_seed, device=device))
    while report.tally.steps < steps and len(report.failures) < MOST_FAILURES:
        of_world = next(worlds)
        report.add(of_world)
        progress(of_world)
    worlds.close()
    return report


def _worlds(seeds: Iterable[int], workers: int, run: Callable[[int], Report]) -> Iterator[Report]:
    """The report of every seed in turn; those of the next few are made while one is waited for."""
    if workers == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=quiet) as pool:
        running: deque[Future[Report]] = deque()
        try:
            for seed in seeds:
                running.append(pool.submit(run, seed))
                if len(running) > 2 * workers:
                    yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def quiet() -> None:
    """One thread a process, and no walk of what the imports made at every collection (C9)."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run_seed(seed: int, device: str = "cpu", *, shrink: bool = False) -> Report:
    """Run the world of a seed; a failure is in the report, shrunk if asked, for which Hypothesis takes 5 minutes."""
    report, begin = Report(worlds=1), time.process_time()
    tally = Tally()
    try:
        with without_onednn():
            run_world(draw_world(seed), tally, _backend(device), shrink)
    except Exception as error:
        report.failures[seed] = f"world {seed}\n" + "".join(traceback.format_exception(error))
    else:
        report.tally.add(tally)
    gc.collect()
    report.seconds = time.process_time() - begin
    return report


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, PyTorch multiplies by itself, in a command as in a test.

    On a CPU with AVX-512 a product by oneDNN of bfloat16 rows of more than 32 columns lets a row of NaN or infinity
    reach rows beside it, so that no pad could be poisoned. RESULT.md has what was tried.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _backend(device: str) -> CaptureBackend:
    if device == "cpu":
        return HostBackend(ARENA_BYTES)
    from replay_sim.capture.cuda import CudaBackend

    return CudaBackend()


def run_world(world: World, tally: Tally, backend: CaptureBackend, shrink: bool) -> None:
    """Capture the graphs of one world and serve histories; raises what fails first, with the history that shows it."""
    served = Served(world, build(world, backend), tally)

    @hypothesis.seed(world.seed)
    @settings(
        max_examples=HISTORIES_PER_WORLD,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])),
    )
    @given(histories(world))
    def every_step_is_right(history: list[Step]) -> None:
        serve(served, history)

    every_step_is_right()


def serve(served: Served, history: list[Step]) -> None:
    """Serve one history from the start."""
    served.start()
    for step in history:
        served.step(step)
    served.finish()
