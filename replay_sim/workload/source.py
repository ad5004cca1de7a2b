"""Where a workload's requests come from: a trace file, or draws from a bundled profile."""

from collections.abc import Iterable
from pathlib import Path

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
) -> tuple[Iterable[TraceRequest], str]:
    """The requests and where they come from, in words: all of `trace`, or `num_requests` drawn from `profile`.

    Drawn requests can be gone through once. The words name a file without its folder: they go into records and
    reports that others read. Raises ValueError for a bad file, an unknown profile, or a trace and a profile together.
    """
    if trace is not None and profile is not None:
        raise ValueError(f"profile is {profile!r} and trace is {str(trace)!r}: only one of them may be given")
    if trace is not None:
        read = read_trace(trace)
        return read, f"{len(read):,} requests of {Path(trace).name}"
    chosen = load_profile(profile or DEFAULT_PROFILE)
    words = f"{num_requests:,} requests drawn with seed {seed} from profile {chosen.name}, quantiles of {chosen.source}"
    return generate_requests(chosen, num_requests, seed=seed), words
