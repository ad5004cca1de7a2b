"""Length and arrival profiles of workloads, measured from a trace or bundled with their source."""

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import attrs
import numpy as np

from replay_sim.workload.trace import TraceRequest

PROBABILITIES = (
    *(0.0, 0.01, 0.025),
    *(percent / 100 for percent in range(5, 100, 5)),
    *(0.975, 0.99, 0.995, 0.999, 1.0),
)
MAX_TIED_SHARE = 0.01
METHOD = (
    "prompt_tokens and output_tokens: numpy.quantile at `probabilities`, method inverted_cdf, over all "
    "requests, each on its own. request_rate: (requests - 1) / (last arrival - first), per second. "
    "burstiness: 1 / (coefficient of variation of the gaps between arrivals) squared, the shape of a "
    "gamma distribution with that variation; null where there are no arrivals or more than 1 % of the "
    "gaps are 0, since such time stamps are too coarse to tell."
)


@attrs.frozen
class LengthProfile:
    """Quantiles of prompt and output lengths at ascending probabilities from 0 to 1, and how requests arrive.

    request_rate: requests a second, None if unknown. burstiness: shape of the gamma distribution of the gaps,
    1 for a Poisson process, below 1 for bursts, None if unknown. source, licence, method: where the numbers
    come from.
    """

    name: str
    source: str
    licence: str
    method: str
    num_requests: int
    request_rate: float | None
    burstiness: float | None
    probabilities: tuple[float, ...] = attrs.field(converter=tuple[float, ...])
    prompt_tokens: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    output_tokens: tuple[int, ...] = attrs.field(converter=tuple[int, ...])


def measure_profile(requests: Sequence[TraceRequest], name: str, source: str, licence: str) -> LengthProfile:
    """The profile of these requests by METHOD; the sequence must not be empty."""
    arrivals = np.array([request.arrival_s for request in requests])
    rate, burstiness = _measure_arrivals(np.diff(arrivals))
    return LengthProfile(
        name,
        source,
        licence,
        METHOD,
        len(requests),
        rate,
        burstiness,
        PROBABILITIES,
        _quantiles([request.prompt_tokens for request in requests]),
        _quantiles([request.output_tokens for request in requests]),
    )


def profile_names() -> tuple[str, ...]:
    """The names of the bundled profiles."""
    files = resources.files("replay_sim.workload").joinpath("profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_profile(name: str) -> LengthProfile:
    """The bundled profile of that name; ValueError names the known ones."""
    if name not in profile_names():
        raise ValueError(f"profile is {name!r}: it must be one of {', '.join(profile_names())}")
    file = resources.files("replay_sim.workload").joinpath("profiles", f"{name}.json")
    return LengthProfile(**json.loads(file.read_text("utf-8")))


def profile_as_dict(profile: LengthProfile) -> dict[str, Any]:
    """The profile as its JSON file holds it."""
    return attrs.asdict(profile)


def _quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
    """Observed lengths at PROBABILITIES."""
    return tuple(int(length) for length in np.quantile(lengths, PROBABILITIES, method="inverted_cdf"))


def _measure_arrivals(gaps: np.ndarray) -> tuple[float | None, float | None]:
    """Rate and burstiness from the gaps between arrivals in seconds, None where they cannot be told."""
    if not gaps.size or not gaps.sum():
        return None, None
    rate = float(gaps.size / gaps.sum())
    if (gaps == 0).mean() > MAX_TIED_SHARE or not gaps.std():
        return rate, None
    return rate, float((gaps.mean() / gaps.std()) ** 2)
