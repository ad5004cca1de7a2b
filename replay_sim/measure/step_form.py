"""The form of the step-time model: from counts and coefficients to host, device and step time (issue 4)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from replay_sim.measure.roofline import PARTS
from replay_sim.measure.step_features import APART, EXPERT_TILES, NUM_SMS, Floats, OpArrays, StepArrays
from replay_sim.measure.step_ops import KINDS

SHARPNESS = 8
"""The power of the mean of an operation's bounds: near the largest, 9 % above it where two are alike."""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
"""The quadrature over how popular experts are, a normal distribution of the logarithm."""

PRIORS: dict[str, float] = {
    **{f"{kind}.bytes": 1.2 for kind in KINDS},
    **{f"{kind}.floor": 2.0 for kind in KINDS},
    **{f"{kind}.flops": 1.3 for kind in ("dense", "experts", "wide_experts", "attention")},
    **{f"{kind}.wave": 0.3 for kind in EXPERT_TILES},
    **{f"{kind}.serial": 0.3 for kind in ("dense", "experts", "wide_experts", "attention", "routing")},
    "streams.flops": 20.0,
    "experts.spread_first": 0.5,
    "experts.spread_late": 0.5,
    "gap.eager": 1.0,
    "gap.graph": 0.5,
    "gap.graphs": 3.0,
    "device.step": 20.0,
    "device.token": 0.003,
    "host.step": 200.0,
    "host.token": 0.02,
    "host.req": 3.0,
    "host.kernel": 8.0,
    "host.graph": 10.0,
    "host.break": 20.0,
    "host.replay": 50.0,
    "host.region": 50.0,
    "host.region_eager": 50.0,
    "host.end": 20.0,
    "latency": 5.0,
}
"""Every coefficient by name, and where a fit starts.

KIND.bytes, .flops, .serial, .wave: dimensionless, over nominal microseconds; KIND.floor: microseconds a kernel. The
streams' arithmetic is in float32, far below the matmul rate.
experts.spread: how unevenly rows of one prompt pick experts, before and after the cut, as the logarithm's deviation;
rows of different requests pick independently. gap: idle
microseconds on the device a kernel launched eagerly, a kernel in a graph, a graph launch. device.step, .token:
staging on the device. host: microseconds, on a host whose small launch costs HOST_LAUNCH_US, a step, padded token,
request, eager kernel, graph launch, eager break, replay batch, replay region, eager replay
region, and after the last part. latency: from a launch until the device has it.
"""

Coefficients = Mapping[str, float]


@attrs.frozen(eq=False)
class StepTimes:
    """Microseconds of P steps, float64 (P): `step` until all is done, `host` until the call returned, `device` busy.

    `busy` and `host_parts` are (P, parts), PARTS' order, staging not among them.
    """

    step: Floats
    host: Floats
    device: Floats
    busy: Floats
    host_parts: Floats


def step_times(arrays: StepArrays, coefficients: Coefficients) -> StepTimes:
    """The times of all steps of `arrays` at the given coefficients, one for each of PRIORS."""
    busy = _busy(arrays, coefficients)
    host_parts = _host_parts(arrays, coefficients)
    staged_host = (
        coefficients["host.step"]
        + coefficients["host.token"] * arrays.tokens
        + coefficients["host.req"] * arrays.reqs
        + coefficients["host.replay"] * arrays.has_replay
    ) * arrays.host_pace
    staged_device = coefficients["device.step"] + coefficients["device.token"] * arrays.tokens
    spans = (
        busy
        + coefficients["gap.eager"] * arrays.eager_kernels
        + coefficients["gap.graph"] * arrays.graph_kernels
        + coefficients["gap.graphs"] * arrays.graphs
    )
    host, done = staged_host, staged_host + coefficients["latency"]
    for part in range(len(PARTS)):
        began = np.maximum(done, host + coefficients["latency"])
        host = host + host_parts[:, part]
        done = np.maximum(began + spans[:, part], host + coefficients["latency"])
    host = host + coefficients["host.end"] * arrays.host_pace
    return StepTimes(
        step=np.maximum(done, host),
        host=host,
        device=busy.sum(axis=1) + staged_device,
        busy=busy,
        host_parts=host_parts,
    )


def _busy(arrays: StepArrays, coefficients: Coefficients) -> Floats:
    """Kernel time by step and part."""
    ops = arrays.ops
    cells = arrays.num_steps * len(PARTS)
    each = ops.count * operation_us(ops, coefficients)
    summed = np.bincount(ops.step * len(PARTS) + ops.part, each, cells).astype(np.float64)
    return summed.reshape(arrays.num_steps, len(PARTS))


def operation_us(ops: OpArrays, coefficients: Coefficients) -> Floats:
    """Microseconds of one launch of each operation, float64 (N): its bounds together, and a floor for each kernel.

    An expert product takes a part of a wave more, in which the first tiles' weights arrive and nothing else happens.
    """

    def by_kind(bound: str) -> Floats:
        return np.array([coefficients.get(f"{kind}.{bound}", 0.0) for kind in KINDS])

    of_experts = np.flatnonzero(ops.load)
    spreads = np.full(APART + 1, coefficients["experts.spread_first"])
    spreads[PARTS.index("replay_layers")] = coefficients["experts.spread_late"]
    spread = np.where(ops.even, 0.0, spreads[ops.part])[of_experts]
    in_use, weights_us = experts_in_use(ops.load[of_experts], spread), ops.weights_us[of_experts]
    bytes_us, wave_us = ops.bytes_us.copy(), np.zeros(len(ops.bytes_us))
    bytes_us[of_experts] += weights_us * in_use
    wave_us[of_experts] = weights_us * np.minimum(NUM_SMS / ops.tiles[of_experts], in_use)
    bounds = (
        by_kind("bytes")[ops.kind] * bytes_us,
        by_kind("flops")[ops.kind] * ops.flops_us,
        by_kind("serial")[ops.kind] * ops.serial_us,
    )
    bound = sum(value**SHARPNESS for value in bounds) ** (1 / SHARPNESS)
    each: Floats = bound + by_kind("wave")[ops.kind] * wave_us + by_kind("floor")[ops.kind] * ops.kernels
    return each


def experts_in_use(load: Floats, spread: Floats) -> Floats:
    """The share of experts that some row picks, if an expert has `load` rows on average, float64 (N).

    Experts are picked unevenly: their expected rows are log-normal with deviation `spread` (N) of the logarithm.
    """
    popularity = np.exp(spread[:, None] * NODES - spread[:, None] ** 2 / 2)
    share: Floats = (1 - np.exp(-load[:, None] * popularity)) @ (WEIGHTS / WEIGHTS.sum())
    return share


def _host_parts(arrays: StepArrays, coefficients: Coefficients) -> Floats:
    """Host time by step and part; the replay region's own is with the movement of rows."""
    parts = (
        coefficients["host.kernel"] * arrays.eager_kernels
        + coefficients["host.graph"] * arrays.graphs
        + coefficients["host.break"] * arrays.breaks
    )
    region = coefficients["host.region"] * arrays.has_replay + coefficients["host.region_eager"] * arrays.region_eager
    parts[:, PARTS.index("movement")] += region
    return parts * arrays.host_pace[:, None]
