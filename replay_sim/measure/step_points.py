"""Points of `steps` and `prefill` records: what was measured, how the batch lay, and what the roofline allows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import attrs
import numpy as np

from replay_sim.batch.dispatch import StepRecord
from replay_sim.config import DecoderShape
from replay_sim.measure.records import Point
from replay_sim.measure.roofline import Rates, step_limit_us
from replay_sim.measure.step_arms import ONE_LAUNCH_ARM
from replay_sim.measure.step_case import case_of_record
from replay_sim.measure.step_runs import ArmRuns, MeasuredStep, Sample
from replay_sim.measure.step_sweeps import Prompt, TimedBatch


def step_point(
    sweep: str, shape: DecoderShape, timed: TimedBatch, measured: MeasuredStep, rates: Rates, *, held_out: bool
) -> Point:
    """One batch as one arm; microseconds to a tenth.

    `step_us` with p10 and p90 is what a user waits, from an idle device until the step has finished; of the median run
    `host_us` is until the call returned and `launch_us` what one small launch cost the host just before; `device_us` is
    the sum of its kernels and copies in one profiled run, which the profiler may stretch: `device_exceeds_step` says
    that it came out longer than the step. `computed` is the first request's.
    """
    batch, record = timed.batch, measured.record
    case = case_of_record(record, int(batch.computed[0]), one_launch=measured.arm == ONE_LAUNCH_ARM)
    return {
        "sweep": sweep,
        "arm": measured.arm,
        **flat_record(record),
        "window": shape.window,
        "num_local_experts": shape.num_local_experts,
        "max_num_batched_tokens": timed.max_num_batched_tokens,
        "computed": int(batch.computed[0]),
        "is_decode": bool(batch.is_decode.all()),
        "num_decodes": int(batch.is_decode.sum()),
        "longest_query": int(batch.query_lens.max()),
        **_times("step_us", measured.samples),
        **_launch_keys(measured),
        "limit_us": round(step_limit_us(shape, case, rates), 1),
        "held_out": held_out,
        "predicted_us": None,
    }


def prefill_point(prompt: Prompt, shape: DecoderShape, runs: ArmRuns) -> Point:
    """One prompt as one arm: `prefill_us` from an idle device until its last step has finished."""
    return {
        "arm": runs.arm.name,
        "prompt_tokens": prompt.prompt_tokens,
        "max_num_batched_tokens": prompt.max_num_batched_tokens,
        "num_steps": len(runs.records),
        "window": shape.window,
        "num_local_experts": shape.num_local_experts,
        **_times("prefill_us", runs.samples),
    }


def flat_record(record: StepRecord) -> Point:
    """Every field of a step's record; modes and reasons by their names."""

    def flat(_: object, __: object, value: object) -> object:
        return value.value if isinstance(value, Enum) else value

    return attrs.asdict(record, value_serializer=flat)


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The run whose time is the median, the lower of the two in the middle: its times belong together."""
    return sorted(samples, key=lambda sample: sample.done_us)[(len(samples) - 1) // 2]


def _times(name: str, samples: Sequence[Sample]) -> Point:
    done = [one.done_us for one in samples]
    p10 = round(float(np.percentile(done, 10, method="lower")), 1)
    p90 = round(float(np.percentile(done, 90, method="higher")), 1)
    median = median_sample(samples)
    times: Point = {name: round(median.done_us, 1), "p10": p10, "p90": p90, "host_us": round(median.returned_us, 1)}
    return times | {"launch_us": median.launch_us, "n": len(samples)}


def _launch_keys(measured: MeasuredStep) -> Point:
    launches = measured.launches
    if launches is None:
        keys = ("device_us", "idle_share", "device_operations", "graph_launches", "kernel_launches")
        return dict.fromkeys(keys)
    step_us = median_sample(measured.samples).done_us
    point: Point = {
        "device_us": launches.device_us,
        "idle_share": round(max(0.0, 1 - launches.device_us / step_us), 4),
        "device_operations": launches.device_operations,
        "graph_launches": launches.graph_launches,
        "kernel_launches": launches.kernel_launches,
    }
    return point | ({"device_exceeds_step": True} if launches.device_us > step_us else {})
