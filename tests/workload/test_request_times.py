"""Times of requests by hand, and the histogram of times against sorted ones."""

import math

import numpy as np
import pytest

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, StepRecord
from replay_sim.workload.request_times import RequestTimes, TimeHistogram
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import Simulation
from replay_sim.workload.trace import TraceRequest

TRACE = (TraceRequest(0.0, 10, 3, "a"), TraceRequest(0.3, 5, 2, "b"), TraceRequest(9.0, 2, 0, "c"))
BIN = 2 ** (1 / 32)


def record(batch):
    tokens = batch.num_tokens
    return StepRecord(
        tokens, tokens + 1, CudagraphMode.NONE, 0, 0, None, ReplayReason.NOTHING_TRIMS, 1, ModelReason.NO_SIZES
    )


def timed(trace, bounds):
    return Scheduler(trace, bounds, dispatch=record, step_time=lambda step: step.num_tokens / 8)


def test_times_are_those_of_the_steps_that_sampled_the_first_and_the_last_token():
    """Steps of 8, 2 + 5, 1 + 1 and 1 tokens, an eighth of a second a token, then 2 from 9 s on."""
    steps = list(timed(TRACE, SchedulerSettings(4, 8)).steps())
    assert [(step.start_s, step.seconds) for step in steps] == [
        (0.0, 1.0),
        (1.0, 0.875),
        (1.875, 0.25),
        (2.125, 0.125),
        (9.0, 0.25),
    ]
    a, b, c = sorted((times for step in steps for times in step.times), key=lambda times: times.request_id)
    assert (a.first_token_s, a.finish_s, b.first_token_s, b.finish_s) == (1.875, 2.25, 1.875, 2.125)
    assert (a.ttft_s, b.ttft_s) == (1.875, 1.875 - 0.3)
    assert (a.time_per_output_token_s, b.time_per_output_token_s) == (0.1875, 0.25)
    assert (c.ttft_s, c.time_per_output_token_s, c.finish_s) == (None, None, 9.25)


def test_one_output_token_has_no_time_per_output_token():
    assert RequestTimes("a", 1.0, 2.0, 2.0, 1).time_per_output_token_s is None


def test_a_simulation_adds_up_times_as_it_does_steps():
    simulation = Simulation()
    assert simulation.times() is None
    steps = list(simulation.watch(timed(TRACE, SchedulerSettings(4, 8)).steps()))
    times = simulation.times()
    assert times["step_s"]["count"] == simulation.steps == len(steps) == 5
    assert times["step_s"]["mean"] == pytest.approx(2.5 / 5) and times["step_s"]["max"] == 1.0
    assert (times["ttft_s"]["count"], times["time_per_output_token_s"]["count"]) == (2, 2)
    assert times["ttft_s"]["mean"] == pytest.approx((1.875 + 1.575) / 2)
    histograms = simulation.histograms()
    assert histograms["num_tokens"] == {"values": [1, 2, 7, 8], "counts": [1, 2, 1, 1]}
    assert histograms["padded_tokens"] == {"values": [2, 3, 8, 9], "counts": [1, 2, 1, 1]}
    assert histograms["replay_rows"] == histograms["padded_rows"] == {"values": [], "counts": []}


def test_without_a_step_time_no_request_has_times():
    assert not any(step.times for step in Scheduler(TRACE, SchedulerSettings(4, 8), dispatch=record).steps())


def test_quantiles_are_true_to_a_bin_and_mean_and_longest_exact():
    drawn = np.random.default_rng(0).lognormal(-4, 1.5, 5000)
    histogram = TimeHistogram()
    for seconds in drawn.tolist():
        histogram.add(seconds)
    for share in (0.001, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(drawn, share, method="inverted_cdf")
        assert exact / BIN < histogram.quantile(share) < exact * BIN
    summary = histogram.as_dict()
    assert summary["mean"] == pytest.approx(drawn.mean()) and summary["max"] == drawn.max()
    assert sum(summary["bin_counts"]) == summary["count"] == 5000
    assert summary["bin_starts"][0] <= drawn.min() * 1.0000001 and summary["bin_starts"][-1] <= drawn.max()


def test_times_counted_at_once_are_those_counted_one_by_one():
    one, many = TimeHistogram(), TimeHistogram()
    for seconds in (0.0, 0.5, 0.5, 0.5, 3.0):
        one.add(seconds)
    for seconds, count in ((0.5, 3), (3.0, 1), (0.0, 1)):
        many.add(seconds, count)
    assert one.as_dict() == many.as_dict()
    assert one.quantile(0.2) < 1e-8 and one.quantile(1) == pytest.approx(3.0, rel=BIN - 1)


@pytest.mark.parametrize("share", [0, 1.1, math.nan])
def test_a_share_out_of_range_or_of_nothing_is_refused(share):
    histogram = TimeHistogram()
    for _ in range(2):
        with pytest.raises(ValueError, match="it must be above 0 and at most 1"):
            histogram.quantile(share)
        histogram.add(1.0)
    with pytest.raises(ValueError, match="of 0 times"):
        TimeHistogram().quantile(0.5)
