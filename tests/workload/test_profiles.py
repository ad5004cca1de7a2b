"""Profiles: bundled ones against their traces, and measuring."""

import json
from datetime import datetime

import numpy as np
import pytest

from replay_sim.workload.detect import read_trace
from replay_sim.workload.profiles import (
    PROBABILITIES,
    load_profile,
    measure_profile,
    profile_as_dict,
    profile_names,
)
from replay_sim.workload.trace import TraceRequest

TRACES = {
    "conversation": "AzureLLMInferenceTrace_conv.csv",
    "long_context": "mooncake_conversation_trace.jsonl",
    "summarisation": "vidur_arxiv_summarization_lengths.csv",
}


def smallest_that_covers(lengths: list[int], probability: float) -> int:
    """The smallest observed length that at least this share of all do not exceed."""
    ordered = sorted(lengths)
    return next(length for rank, length in enumerate(ordered, start=1) if rank >= probability * len(ordered) - 1e-6)


def test_the_bundled_profiles_are_those_with_a_source():
    assert profile_names() == tuple(sorted((*TRACES, "code")))
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.source and profile.licence and profile.method
        assert profile.probabilities == PROBABILITIES
        for quantiles in (profile.prompt_tokens, profile.output_tokens):
            assert len(quantiles) == len(PROBABILITIES)
            assert list(quantiles) == sorted(quantiles) and quantiles[0] >= 1


@pytest.mark.parametrize("name", TRACES)
def test_a_bundled_profile_is_what_its_trace_gives(shared, name):
    """Recomputed whole by the package, and its quantiles by counting."""
    bundled = load_profile(name)
    requests = read_trace(shared / "data/traces" / TRACES[name])
    measured = measure_profile(requests, name, bundled.source, bundled.licence)
    assert (measured.num_requests, measured.method) == (bundled.num_requests, bundled.method)
    for field in ("request_rate", "burstiness"):
        expected = getattr(bundled, field)
        assert getattr(measured, field) == (expected and pytest.approx(expected, rel=1e-6))
    for field in ("prompt_tokens", "output_tokens"):
        lengths = [getattr(request, field) for request in requests]
        counted = tuple(smallest_that_covers(lengths, probability) for probability in PROBABILITIES)
        assert getattr(measured, field) == getattr(bundled, field) == counted


def test_the_code_profile_says_that_it_is_of_a_sample_and_has_the_rate_of_the_whole_trace():
    """8,819 requests between the first and the last time stamp of the published trace."""
    code = load_profile("code")
    first, last = (datetime.fromisoformat(f"2023-11-16 {time}") for time in ("18:17:03.979960", "19:14:19.928016"))
    assert code.request_rate == pytest.approx(8818 / (last - first).total_seconds())
    assert code.num_requests == 500 and "a sample of 500 of the trace's 8,819 requests" in code.method
    assert code.burstiness is None and "a sample" in code.source


def test_arrivals_are_measured_from_the_gaps():
    gaps = np.random.default_rng(0).gamma(0.5, 1 / (4 * 0.5), 100_000)
    requests = [TraceRequest(time, 5, 5, "") for time in np.cumsum(gaps).tolist()]
    profile = measure_profile(requests, "bursts", "drawn", "none")
    assert profile.request_rate == pytest.approx(4, rel=0.02)
    assert profile.burstiness == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("arrivals", "rate", "burstiness"),
    [
        ([0.0], None, None),
        ([0.0, 0.0], None, None),
        ([0.0, 0.0, 3.0, 3.0], 1.0, None),
        ([0.0, 2.0, 4.0], 0.5, None),
    ],
)
def test_what_arrivals_cannot_tell_stays_unknown(arrivals, rate, burstiness):
    """One request, no arrivals, stamps too coarse, a clock without variation."""
    profile = measure_profile([TraceRequest(time, 5, 5, "") for time in arrivals], "", "", "")
    assert (profile.request_rate, profile.burstiness) == (rate, burstiness)


def test_a_profile_is_json():
    profile = load_profile("conversation")
    assert json.loads(json.dumps(profile_as_dict(profile)))["num_requests"] == 19_366


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ValueError, match="profile is 'chat': it must be one of code, conversation, long_context"):
        load_profile("chat")
