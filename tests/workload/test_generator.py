"""The generator: seeded, bounded in memory, true to its profile."""

import itertools

import numpy as np
import pytest

from replay_sim.workload.generator import CHUNK, generate_requests
from replay_sim.workload.profiles import load_profile, measure_profile

CONVERSATION = load_profile("conversation")
MANY = 3 * CHUNK + 5


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    first = list(generate_requests(CONVERSATION, 500, seed=7))
    assert first == list(generate_requests(CONVERSATION, 500, seed=7))
    assert first != list(generate_requests(CONVERSATION, 500, seed=8))


def test_requests_come_in_order_with_ids_of_their_own():
    requests = list(generate_requests(CONVERSATION, MANY))
    arrivals = [request.arrival_s for request in requests]
    assert len(requests) == len({request.request_id for request in requests}) == MANY
    assert arrivals == sorted(arrivals) and arrivals[0] == 0


def test_generated_requests_have_the_profile_that_they_were_drawn_from():
    """As many lengths lie at or below each quantile as its probability says, within 2 %."""
    requests = list(generate_requests(CONVERSATION, MANY))
    for field in ("prompt_tokens", "output_tokens"):
        lengths = np.array([getattr(request, field) for request in requests])
        quantiles = getattr(CONVERSATION, field)
        shares = [(lengths <= quantile).mean() for quantile in quantiles]
        np.testing.assert_allclose(shares, CONVERSATION.probabilities, atol=0.02)
        assert quantiles[0] <= lengths.min() and lengths.max() <= quantiles[-1]
    measured = measure_profile(requests, "", "", "")
    assert measured.request_rate == pytest.approx(CONVERSATION.request_rate, rel=0.03)
    assert measured.burstiness == pytest.approx(CONVERSATION.burstiness, rel=0.05)


def test_another_rate_and_burstiness_leave_the_lengths_as_they_are():
    plain = list(generate_requests(CONVERSATION, MANY, seed=3))
    bursts = list(generate_requests(CONVERSATION, MANY, seed=3, request_rate=2.0, burstiness=0.25))
    assert [r.prompt_tokens for r in plain] == [r.prompt_tokens for r in bursts]
    assert [r.output_tokens for r in plain] == [r.output_tokens for r in bursts]
    measured = measure_profile(bursts, "", "", "")
    assert measured.request_rate == pytest.approx(2.0, rel=0.05)
    assert measured.burstiness == pytest.approx(0.25, rel=0.1)


def test_a_profile_without_arrivals_has_all_requests_arrive_at_once_unless_a_rate_is_given():
    profile = load_profile("summarisation")
    assert {request.arrival_s for request in generate_requests(profile, 50)} == {0.0}
    assert len({request.arrival_s for request in generate_requests(profile, 50, request_rate=1.0)}) == 50


def test_requests_are_made_as_they_are_asked_for():
    """A billion of them cost nothing until they are drawn."""
    assert len(list(itertools.islice(generate_requests(CONVERSATION, 10**9), 10))) == 10


def test_arrivals_end_where_virtual_time_would_round_a_step_away():
    """1,000 requests at one in 1e8 seconds would take 3,000 years."""
    with pytest.raises(ValueError, match="request_rate is 1e-08 and burstiness 1.0: .* arrive after 1e.09 s"):
        list(generate_requests(CONVERSATION, 1000, request_rate=1e-8, burstiness=1.0))
    assert len(list(generate_requests(CONVERSATION, 1000, request_rate=1e-5))) == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": -1}, "num_requests is -1: it must be at least 0"),
        ({"seed": -5}, "seed is -5: it must be at least 0"),
        ({"request_rate": 0.0}, "request_rate is 0.0: it must be from 1e-09 to 1e"),
        ({"request_rate": 1e-308}, "request_rate is 1e-308: it must be from 1e-09 to 1e"),
        ({"burstiness": 1e-300}, "burstiness is 1e-300: it must be from 0.001 to 1000"),
        ({"request_rate": float("inf")}, "request_rate is inf"),
        ({"burstiness": -1.0}, "burstiness is -1.0"),
        ({"burstiness": float("nan")}, "burstiness is nan"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_requests(CONVERSATION, **({"num_requests": 1} | arguments))
