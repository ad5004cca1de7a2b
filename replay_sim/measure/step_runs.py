"""Runs the batches of a sweep as every arm, interleaved: step time, host time, kernel time and launches (issue 4)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np
import numpy.typing as npt
import torch

from replay_sim.batch.dispatch import StepRecord
from replay_sim.batch.request import Batch
from replay_sim.decoder.step import StepRunner
from replay_sim.measure.launches import Launches, check_launches, profile_calls
from replay_sim.measure.rates import launch_us
from replay_sim.measure.step_arms import Arm, Rig
from replay_sim.measure.step_sweeps import TimedBatch
from replay_sim.progress import Progress, no_progress
from replay_sim.workload.kv_blocks import blocks_for

BATCH_SECONDS = 0.8
"""The time that the rounds of one batch may take, once the least number is done."""
MOST_ROUNDS, LEAST_ROUNDS, LEAST_LONG_ROUNDS = 15, 5, 3
LONG_US = 100_000

SPEED_SAMPLES = 3
"""Of small launches before each run: the host's speed changes within seconds, by half and more."""


@attrs.frozen
class Sample:
    """Microseconds of one run: until the device had finished, until the call returned, of one small launch before."""

    done_us: float
    returned_us: float
    launch_us: float


@attrs.frozen
class ArmRuns:
    """The runs of one batch, or of one prompt's steps, as one arm."""

    arm: Arm
    records: tuple[StepRecord, ...]
    samples: list[Sample]


@attrs.frozen
class MeasuredStep:
    """One batch as one arm: its record, the runs, and what a profiled run launched (None: not profiled)."""

    arm: str
    record: StepRecord
    samples: list[Sample]
    launches: Launches | None


@contextmanager
def collector_off() -> Iterator[None]:
    """Collects what captures left behind, and then keeps the garbage collector out of what is timed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def block_tables(batch: Batch, num_blocks: int, block_size: int, seed: int) -> list[npt.NDArray[np.int32]]:
    """Scattered blocks for each request, none shared, the same for every chunk of a single request.

    Raises ValueError if the cache does not hold the batch.
    """
    counts = [blocks_for(int(length), block_size) for length in batch.seq_lens]
    if sum(counts) > num_blocks:
        raise ValueError(f"a batch needs {sum(counts)} KV blocks: the cache has {num_blocks}")
    order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    ends = np.cumsum(counts)
    return [order[end - count : end] for count, end in zip(counts, ends, strict=True)]


class Runs:
    """Runs steps on one pair of runners, every run with token ids of its own from the seed."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.seed = rig, seed
        self._random = np.random.default_rng(seed)

    def ids(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Fresh token ids of a batch."""
        return self._random.integers(0, self.rig.shape.vocab_size, batch.num_tokens, dtype=np.int32)

    def work(self, arm: Arm, batches: Sequence[Batch], records: Sequence[StepRecord]) -> Callable[[], None]:
        """A call that runs the batches one after another as the arm; its inputs are drawn before it."""
        runner = arm.runner(self.rig)
        steps = [
            (batch, block_tables(batch, runner.num_blocks, runner.block_size, self.seed), self.ids(batch), record)
            for batch, record in zip(batches, records, strict=True)
        ]

        def run() -> None:
            runner.use_replay_form(arm.form)
            for step in steps:
                runner.run(*step)

        return run

    def applying(self, batches: Sequence[Batch]) -> list[ArmRuns]:
        """The arms that apply to all of the batches, with no runs yet."""
        found = []
        for arm in self.rig.arms:
            records = tuple(record for batch in batches if (record := arm.record(self.rig, batch)) is not None)
            if len(records) == len(batches):
                found.append(ArmRuns(arm, records, []))
        return found

    def time(self, batches: Sequence[Batch], *, warm_up: bool = True) -> list[ArmRuns]:
        """Run the batches as every arm that applies: one round to warm up, then timed rounds, the order flipped.

        Without `warm_up` batches of these sizes must have run before.
        """
        runs = self.applying(batches)
        for one in runs if warm_up else ():
            self.work(one.arm, batches, one.records)()
        rounds, done = LEAST_ROUNDS, 0
        while done < rounds:
            for one in runs if done % 2 else runs[::-1]:
                runner = one.arm.runner(self.rig)
                one.samples.append(time_call(runner, self.work(one.arm, batches, one.records)))
            done += 1
            rounds = num_rounds([one.samples[0].done_us for one in runs])
        return runs

    def measure(self, batches: Sequence[TimedBatch], progress: Progress = no_progress) -> list[list[MeasuredStep]]:
        """Every batch as every arm; first all are timed, then those that ask for it are profiled once.

        Raises RuntimeError for an arm that did not run what its name says.
        """
        timed = [self.time([one.batch]) for one in progress(batches, "steps")]
        profiled = [
            (one.batch, runs) for one, of_batch in zip(batches, timed, strict=True) if one.profiled for runs in of_batch
        ]
        calls = [self.work(runs.arm, [batch], runs.records) for batch, runs in profiled]
        launches = dict(
            zip((id(runs) for _, runs in profiled), profile_calls(calls, self.rig.off.backend.device), strict=True)
        )
        for _, runs in profiled:
            check_launches(runs.arm.name, runs.records[0], launches[id(runs)])
        return [
            [MeasuredStep(runs.arm.name, runs.records[0], runs.samples, launches.get(id(runs))) for runs in of_batch]
            for of_batch in timed
        ]


def num_rounds(round_us: Sequence[float]) -> int:
    """How many rounds to run, given what each arm took in the first: more of short ones, at least 3 or 5."""
    least = LEAST_LONG_ROUNDS if max(round_us, default=0) > LONG_US else LEAST_ROUNDS
    fitting = int(BATCH_SECONDS * 1e6 / max(1.0, sum(round_us)))
    return min(MOST_ROUNDS, max(least, fitting))


def time_call(runner: StepRunner, call: Callable[[], None]) -> Sample:
    """One run from an idle device: until it has finished, by events on the runner's stream, and until it returned."""
    backend = runner.backend
    speed = launch_us(backend.device, SPEED_SAMPLES)
    if backend.name != "cuda":
        began = time.perf_counter()
        call()
        spent = (time.perf_counter() - began) * 1e6
        return Sample(spent, spent, speed)
    with backend.on_stream(runner.stream):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        backend.synchronize()
        start.record()
        began = time.perf_counter()
        call()
        host_us = (time.perf_counter() - began) * 1e6
        end.record()
        end.synchronize()
    return Sample(start.elapsed_time(end) * 1e3, host_us, speed)
