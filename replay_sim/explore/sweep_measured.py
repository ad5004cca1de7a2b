"""Measures the points of a sweep on this process's device: steps that stand for all of a point's, in its own graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import pairwise

import attrs

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.request import Batch
from replay_sim.config import DecoderShape
from replay_sim.explore.sweep_executors import in_own_process
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload, schedule_of
from replay_sim.explore.sweep_rows import Row, failed_row, run_group
from replay_sim.explore.sweep_steps import DispatchedSteps
from replay_sim.measure.environment import describe_environment
from replay_sim.measure.run_steps import make_backend
from replay_sim.measure.step_arms import ARMS, Arm, Rig, Rigs, RigSpec
from replay_sim.measure.step_points import median_sample
from replay_sim.measure.step_runs import ArmRuns, Runs, collector_off
from replay_sim.plan import CapturePlan
from replay_sim.progress import no_progress
from replay_sim.replay.graphs import ReplayForm
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for
from replay_sim.workload.scheduled_step import ScheduledStep
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import planned_dispatch
from replay_sim.workload.trace import TraceRequest

STEPS_A_WAY = 8
"""Steps that are run of each way in which a plan runs steps: model mode and replay mode."""
EAGER_WITH_GRAPHS = Arm(name="eager_replay_graphs", mode=CudagraphMode.NONE, replay_mode=CudagraphMode.PIECEWISE)
"""Steps beyond the largest model graph, whose rows a replay graph holds."""
_BREAKABLE_ARMS = (*(arm for arm in ARMS if arm.form is ReplayForm.BREAKABLE), EAGER_WITH_GRAPHS)
ARM_OF_WAY = {(arm.mode, arm.replay_mode): arm for arm in _BREAKABLE_ARMS}
"""The arm that runs a step so; of replay graphs the form that the step-time model has."""


@attrs.frozen(eq=False)
class SampledStep:
    """One step of a schedule, how the plan runs it, and of how many steps it stands for."""

    batch: Batch
    record: StepRecord
    count: int


def sample_steps(
    requests: Iterable[TraceRequest], settings: SchedulerSettings, plan: CapturePlan
) -> tuple[SampledStep, ...]:
    """At most STEPS_A_WAY of the schedule's steps for each way in which `plan` runs them.

    All steps run in one way, ascending by padded tokens, padded rows, tokens and time, are cut into as many equal
    parts; the middle one of a part stands for it.
    """
    ways: dict[tuple[CudagraphMode, CudagraphMode | None], list[tuple[StepRecord, ScheduledStep]]] = {}
    for step in Scheduler(requests, settings, dispatch=planned_dispatch(plan)).steps():
        assert step.record is not None
        ways.setdefault((step.record.mode, step.record.replay_mode), []).append((step.record, step))
    sampled = []
    for steps in ways.values():
        steps.sort(key=lambda one: (one[0].padded_tokens, one[0].padded_rows, one[0].num_tokens, one[1].index))
        parts = min(STEPS_A_WAY, len(steps))
        for start, end in pairwise(len(steps) * part // parts for part in range(parts + 1)):
            record, step = steps[(start + end) // 2]
            sampled.append(SampledStep(step.batch, record, end - start))
    return tuple(sampled)


@attrs.frozen
class MeasuredTimes:
    """Times of a row as this process's device has them: a sample of the point's steps with its plan, and replay off.

    `backend` is named as in make_backend. Only graphs that the sampled steps run are captured. The decoder's weights,
    from `seed`, stay for the next point of this process. Calling it raises what a runner or a capture raises.
    """

    backend: str
    shape: DecoderShape
    seed: int

    def __call__(self, point: DesignPoint, workload: SweptWorkload, steps: DispatchedSteps, plan: CapturePlan) -> Row:
        """Mean step time as planned and without replay; each sampled step counts as the steps that it stands for."""
        sampled = sample_steps(workload.requests(), schedule_of(point), plan)
        rigs = _rigs(self)
        runs = _PlannedRuns(rigs.rig(rig_spec(plan, self.shape, sampled)), self.seed, plan)
        with collector_off():
            us = [runs.step_us(step) for step in sampled]
        total, off = (sum(step.count * pair[which] for step, pair in zip(sampled, us, strict=True)) for which in (0, 1))
        num_steps = sum(step.count for step in sampled)
        return {
            "expected_step_ms": total / num_steps / 1e3,
            "replay_off_step_ms": off / num_steps / 1e3,
            "speedup": off / total,
            "workload_s": total / 1e6,
            "extrapolated_share": 0.0,
            "source": f"{self._source()}: {len(sampled)} steps stand for {num_steps:,}",
            "outside": "",
        }

    def device_works(self) -> bool:
        """Whether there is a device that answers this process; after an illegal access, it never does again."""
        try:
            _rigs(self).backend.synchronize()
        except (RuntimeError, ValueError):
            return False
        return True

    def _source(self) -> str:
        where = describe_environment(_rigs(self).backend.device)
        gpu = "a CPU, whose times are no GPU's" if where["gpu"] is None else f"{where['gpu']}, driver {where['driver']}"
        return f"measured on {gpu}, torch {where['torch']}, {where['date']}, decoder {self.shape.name}"


def run_measured(points: Sequence[DesignPoint], workload: SweptWorkload, times: MeasuredTimes) -> list[Row]:
    """As run_group, in a process of this one's that is replaced after points that left its device unusable.

    Points that end the process, as an abort or a lack of memory does, are rows that say so.
    """
    try:
        return in_own_process(_run_and_look, points, workload, times)
    except BrokenProcessPool as error:
        return [failed_row(point, f"{type(error).__name__}: {error}") for point in points]


def _run_and_look(
    points: Sequence[DesignPoint], workload: SweptWorkload, times: MeasuredTimes
) -> tuple[list[Row], bool]:
    return run_group(points, workload, times), times.device_works()


@cache
def _rigs(times: MeasuredTimes) -> Rigs:
    """What this process measures on: the runners of the point at hand, whose weights the next point takes over."""
    arms = tuple(ARM_OF_WAY.values())
    return Rigs(times.shape, make_backend(times.backend), times.seed, arms, no_progress)


def rig_spec(plan: CapturePlan, shape: DecoderShape, sampled: Sequence[SampledStep]) -> RigSpec:
    """The pair of runners for these steps: the sizes of `plan` that they run, and the KV blocks that they need."""
    records = [step.record for step in sampled]
    in_mode = {
        mode: {record.padded_tokens for record in records if record.mode is mode}
        for mode in (CudagraphMode.PIECEWISE, CudagraphMode.FULL)
    }
    rows = {record.padded_rows for record in records if record.replay_mode is CudagraphMode.PIECEWISE}
    of_size = blocks_for(max(0, *rows, *set.union(*in_mode.values())), BLOCK_SIZE)
    of_requests = [[blocks_for(int(length), BLOCK_SIZE) for length in step.batch.seq_lens] for step in sampled]
    return RigSpec(
        window=plan.window,
        num_local_experts=shape.num_local_experts,
        model_sizes=tuple(sorted(in_mode[CudagraphMode.PIECEWISE])),
        full_sizes=tuple(sorted(in_mode[CudagraphMode.FULL])),
        replay_sizes=tuple(sorted(rows)),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_blocks=max(of_size, *map(sum, of_requests)),
        max_blocks=max(of_size, *map(max, of_requests)),
        query_len_decode=plan.query_len_decode,
    )


class _PlannedRuns(Runs):
    """Runs of single steps: each as `plan` dispatches it and with replay off, in no other way."""

    def __init__(self, rig: Rig, seed: int, plan: CapturePlan) -> None:
        super().__init__(rig, seed)
        self._dispatch = planned_dispatch(plan)

    def applying(self, batches: Sequence[Batch]) -> list[ArmRuns]:
        """As planned first; where the plan has no replay batch, replay off is the same run."""
        (batch,) = batches
        record = self._dispatch(batch)
        ways = dict.fromkeys([(record.mode, record.replay_mode), (record.mode, None)])
        runs = []
        for arm in map(ARM_OF_WAY.__getitem__, ways):
            ran = arm.record(self.rig, batch)
            assert ran is not None
            runs.append(ArmRuns(arm, (ran,), []))
        return runs

    def step_us(self, step: SampledStep) -> tuple[float, float]:
        """Median microseconds of the step as planned and with replay off, from an idle device until it has finished."""
        runs = self.time([step.batch])
        planned, off = (median_sample(one.samples).done_us for one in (runs[0], runs[-1]))
        return planned, off
