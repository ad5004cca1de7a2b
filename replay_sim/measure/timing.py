"""Times a function: device time by events, host time by the wall clock, medians with spread (product.md, Measuring)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

BUSY_CYCLES = 10_000_000
"""Some milliseconds in which the host enqueues an arm while the device is kept busy: its device time has no gaps."""


@attrs.frozen
class Timing:
    """Microseconds a call over n calls; `host_us` is what the host spent before the call returned.

    p10 and p90 are of device time, `host_p10` of the host's. On a CPU device and host time are the same.
    """

    device_us: float
    host_us: float
    p10: float
    p90: float
    host_p10: float
    n: int

    def share(self, calls: int) -> Timing:
        """One call's share of `calls` calls."""
        times = {key: round(value / calls, 2) for key, value in attrs.asdict(self).items() if key != "n"}
        return Timing(**times, n=self.n)


def time_arms(
    arms: dict[str, Callable[[int], object]], device: torch.device, *, rounds: int = 30, warm_up: int = 5
) -> dict[str, Timing]:
    """Time the arms side by side in one run: interleaved, the order flipped each round.

    An arm is called with the round's number, so that it can take fresh inputs. What a capture left to the garbage
    collector is collected first (H4 of the known faults).
    """
    gc.collect()
    for index in range(warm_up):
        for arm in arms.values():
            arm(index)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for index in range(rounds):
        names: Sequence[str] = list(arms) if index % 2 else list(arms)[::-1]
        for name in names:
            samples[name].append(_sample(arms[name], warm_up + index, device))
    return {name: _summary(values) for name, values in samples.items()}


def _sample(arm: Callable[[int], object], index: int, device: torch.device) -> tuple[float, float]:
    """Device and host microseconds of one call, after all earlier work has ended (H1).

    The arm's work waits behind a spinning kernel until it is enqueued: device time is then the kernels' own, not the
    host's pace (H5).
    """
    if device.type != "cuda":
        began = time.perf_counter()
        arm(index)
        spent = (time.perf_counter() - began) * 1e6
        return spent, spent
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    began = time.perf_counter()
    arm(index)
    host = (time.perf_counter() - began) * 1e6
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3, host


def _summary(values: list[tuple[float, float]]) -> Timing:
    device, host = np.array(values).T
    p10, median, p90 = np.percentile(device, (10, 50, 90))
    values_us = (median, np.median(host), p10, p90, np.percentile(host, 10))
    device_us, host_us, p10, p90, host_p10 = (round(float(value), 2) for value in values_us)
    return Timing(device_us, host_us, p10, p90, host_p10, len(values))
