"""Seeded requests drawn from a length profile, arriving at a rate with bursts."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from replay_sim.workload.profiles import LengthProfile
from replay_sim.workload.trace import MAX_ARRIVAL_S, TraceRequest

CHUNK = 8192
BOUNDS = {"request_rate": (1e-9, 1e9), "burstiness": (1e-3, 1e3)}
"""Of what gaps between arrivals are drawn with."""


def generate_requests(
    profile: LengthProfile,
    num_requests: int,
    *,
    seed: int = 0,
    request_rate: float | None = None,
    burstiness: float | None = None,
) -> Iterator[TraceRequest]:
    """Requests in order of arrival, made a chunk at a time, the same for the same seed.

    Lengths: prompt and output independently, by linear interpolation between the profile's quantiles,
    rounded. Gaps between arrivals: gamma distributed with mean 1 / request_rate and shape `burstiness`. Both
    default to the profile's; without any rate all arrive at 0 s, without any burstiness it is 1, a Poisson
    process. The three draws are independent streams: another rate leaves the lengths as they are. ValueError
    names a negative number of requests or seed, a rate or burstiness out of BOUNDS, and, once they are drawn, those
    with which a request arrives after MAX_ARRIVAL_S.
    """
    rate = profile.request_rate if request_rate is None else request_rate
    shape = (profile.burstiness or 1.0) if burstiness is None else burstiness
    for name, count in (("num_requests", num_requests), ("seed", seed)):
        if count < 0:
            raise ValueError(f"{name} is {count}: it must be at least 0")
    for name, value in (("request_rate", rate), ("burstiness", shape)):
        least, most = BOUNDS[name]
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} is {value}: it must be from {least:g} to {most:g}")
    return _generate(profile, num_requests, seed, rate, shape)


def _generate(
    profile: LengthProfile, num_requests: int, seed: int, rate: float | None, shape: float
) -> Iterator[TraceRequest]:
    """The requests, from checked arguments."""
    prompts, outputs, gaps = (np.random.default_rng([seed, stream]) for stream in range(3))
    clock = 0.0
    for start in range(0, num_requests, CHUNK):
        count = min(CHUNK, num_requests - start)
        if rate is None:
            arrivals = np.zeros(count)
        else:
            steps = gaps.gamma(shape, 1 / (rate * shape), count)
            if not start:
                steps[0] = 0.0
            arrivals = clock + steps.cumsum()
            clock = float(arrivals[-1])
            if clock > MAX_ARRIVAL_S:
                raise ValueError(
                    f"request_rate is {rate} and burstiness {shape}: of {num_requests} requests some arrive after "
                    f"{MAX_ARRIVAL_S:g} s, the latest that is allowed; a higher rate is needed"
                )
        columns = (
            arrivals.tolist(),
            _lengths(prompts.random(count), profile.probabilities, profile.prompt_tokens),
            _lengths(outputs.random(count), profile.probabilities, profile.output_tokens),
            map(str, range(start, start + count)),
        )
        yield from map(TraceRequest, *columns)


def _lengths(
    uniform: npt.NDArray[np.float64], probabilities: tuple[float, ...], quantiles: tuple[int, ...]
) -> list[int]:
    """Lengths at uniform draws, by linear interpolation between the quantiles."""
    return np.rint(np.interp(uniform, probabilities, quantiles)).astype(np.int64).tolist()
