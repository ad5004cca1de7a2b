"""Where a workload's requests come from: a trace file, or draws from a bundled profile."""

from collections.abc import Iterable
from pathlib import Path

from replay_sim.config.errors import printable
from replay_sim.workload.detect import read_trace
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile
from replay_sim.workload.trace import TraceRequest

DEFAULT_PROFILE = "conversation"
DEFAULT_REQUESTS = 1000


def open_workload(
    trace: str | Path | None = None,
    *,
    profile: str | None = None,
    num_requests: int = DEFAULT_REQUESTS,
    seed: int = 0,
    request_rate: float | None = None,
    burstiness: float | None = None,
) -> tuple[Iterable[TraceRequest], str]:
    """The requests and where they come from, in words: all of `trace`, or `num_requests` drawn from `profile`.

    Drawn requests can be gone through once; they arrive as the profile's do unless a rate in requests a second or a
    burstiness says otherwise. The words name a file without its folder, with escapes for what cannot be shown: they go
    into records and reports that others read. Raises ValueError for a bad file, an unknown profile, a burstiness
    without any rate, or a trace together with what only drawn requests take.
    """
    if trace is not None:
        for name, value in (("profile", profile), ("request_rate", request_rate), ("burstiness", burstiness)):
            if value is not None:
                raise ValueError(f"{name} is {value!r} and trace is {str(trace)!r}: only one of them may be given")
        read = read_trace(trace)
        return read, f"{len(read):,} requests of {printable(Path(trace).name)}"
    chosen = load_profile(profile or DEFAULT_PROFILE)
    if burstiness is not None and request_rate is None and chosen.request_rate is None:
        raise ValueError(f"burstiness is {burstiness!r}: it needs request_rate, as profile {chosen.name} has no rate")
    words = f"{num_requests:,} requests drawn with seed {seed} from profile {chosen.name}, quantiles of {chosen.source}"
    if request_rate is not None:
        words += f", at {request_rate:g} requests a second"
    if burstiness is not None:
        words += f", burstiness {burstiness:g}"
    drawn = generate_requests(chosen, num_requests, seed=seed, request_rate=request_rate, burstiness=burstiness)
    return drawn, words
