"""The scheduler on 1,000 random traces: its invariants, and step by step against a plain one (issue 6, point 3)."""

import random
from collections import defaultdict

import attrs
import pytest
from workload.plain_scheduler import BLOCK, schedule_plainly

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, StepRecord
from replay_sim.batch.request import Phase
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

NUM_TRACES, SHARDS = 1000, 10
PROMPTS, OUTPUTS, GAPS = (1, 100, 511, 512, 513, 1024, 1500, 2600), (0, 1, 2, 7, 30), (0.0, 0.0, 0.1, 3.0)
WINDOWS, BUDGETS = (0, 1, 128, 512, 700), (40, 300, 1000, 5000)


def random_trace(rng):
    """Up to 12 requests in order of arrival, of three families whose prompts share blocks up to a random one."""
    clock, requests = 0.0, []
    for index in range(rng.randint(1, 12)):
        clock += rng.choice(GAPS)
        prompt = rng.choice(PROMPTS) + rng.randint(0, 2)
        shared, family = rng.randint(0, 5), rng.randint(0, 2)
        blocks = range(-(-prompt // BLOCK))
        hashes = tuple(100 * family + at if at < shared else 10_000 + 100 * index + at for at in blocks)
        requests.append(TraceRequest(clock, prompt, rng.choice(OUTPUTS), f"r{index}", hashes))
    return tuple(requests)


def random_settings(rng):
    """With and without a prefix cache, speculative tokens, acceptance of them all, and chunks."""
    drafts = rng.choice((0, 0, 1, 5))
    return SchedulerSettings(
        rng.randint(1, 6),
        rng.choice(BUDGETS) + drafts,
        num_speculative_tokens=drafts,
        acceptance_rate=rng.choice((1.0, 1.0, 0.5)),
        prefix_cache_blocks=rng.choice((0, 1, 3, 8, 100)),
        window=rng.choice(WINDOWS),
        seed=rng.randint(0, 9),
    )


def recorded(batch):
    """A record that holds the batch's tokens."""
    tokens, mode = batch.num_tokens, CudagraphMode.NONE
    return StepRecord(
        tokens, tokens, mode, 0, 0, None, ReplayReason.NOTHING_TRIMS, batch.num_reqs, ModelReason.NO_SIZES
    )


def seconds_of(tokens):
    """A step time that grows with the tokens, in sixteenths, which add up exactly."""
    return (1 + tokens // 64) / 16


def run(trace, bounds, timed):
    """The steps, in virtual time or without."""
    if not timed:
        return list(Scheduler(trace, bounds).steps())
    time = {"dispatch": recorded, "step_time": lambda record: seconds_of(record.num_tokens)}
    return list(Scheduler(trace, bounds, **time).steps())


def check_invariants(trace, bounds, steps):
    """Budget, seats, order, each prompt token once but for a replayed window, hits on computed blocks, all finish."""
    by_id = {request.request_id: request for request in trace}
    order = list(by_id)
    starts, computed, unfinished, seen = {}, defaultdict(int), dict(by_id), set()
    for step in steps:
        batch = step.batch
        ids = list(batch.request_ids)
        assert 0 < batch.num_tokens <= bounds.max_num_batched_tokens and len(ids) <= bounds.max_num_seqs
        assert ids == [name for name in order if name in unfinished][: len(ids)], "a later request runs before"
        fresh = set()
        for request in batch.requests:
            name, hashes = request.request_id, by_id[request.request_id].prefix_hashes
            if name not in starts:
                starts[name] = computed[name] = request.computed
                if request.computed:
                    hit = request.computed + bounds.window
                    assert bounds.prefix_cache_blocks and hit % BLOCK == 0 and hit > bounds.window
                    assert hit < by_id[name].prompt_tokens and set(hashes[: hit // BLOCK]) <= seen
            assert request.window_start == starts[name]
            if request.phase is Phase.PREFILL:
                assert request.computed == computed[name] and request.query_len
                computed[name] += request.query_len
                assert computed[name] <= by_id[name].prompt_tokens
                fresh |= set(hashes[: computed[name] // BLOCK])
            else:
                assert computed[name] == by_id[name].prompt_tokens <= request.computed
                assert request.query_len == bounds.query_len_decode
        seen |= fresh
        for name in step.finished:
            del unfinished[name]
    assert not unfinished and computed == {name: request.prompt_tokens for name, request in by_id.items()}
    assert sum(step.cached_tokens for step in steps) == sum(starts.values())
    return sum(map(bool, starts.values()))


def as_plain(steps):
    """The steps as the plain scheduler gives them."""
    return [
        {r.request_id: (r.query_len, r.computed, r.phase is Phase.DECODE, r.window_start) for r in step.batch.requests}
        for step in steps
    ]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_invariants_hold_and_steps_equal_a_plain_schedule_on_random_traces(shard):
    """Issue 6, point 3; S4, S7: the window start of a hit is where its computation starts."""
    hits = compared = chunked = 0
    for seed in range(shard, NUM_TRACES, SHARDS):
        rng = random.Random(seed)
        trace, bounds, timed = random_trace(rng), random_settings(rng), rng.random() < 0.5
        steps = run(trace, bounds, timed)
        hits += check_invariants(trace, bounds, steps)
        again = run(trace, bounds, timed)
        assert as_plain(again) == as_plain(steps) and [s.start_s for s in again] == [s.start_s for s in steps]
        chunked += any(
            request.phase is Phase.PREFILL and request.computed > request.window_start
            for step in steps
            for request in step.batch.requests
        )
        if bounds.acceptance_rate == 1 or not bounds.num_speculative_tokens:
            plain, times = schedule_plainly(trace, bounds, seconds_of if timed else None)
            assert as_plain(steps) == plain
            assert {t.request_id: attrs.astuple(t)[1:] for step in steps for t in step.times} == times
            compared += 1
    assert hits > 20 and compared > 50 and chunked > 20


def test_a_step_starts_when_the_one_before_it_ends_or_its_first_request_arrives():
    rng = random.Random(5)
    trace = random_trace(rng)
    steps = run(trace, SchedulerSettings(3, 1000, 1), timed=True)
    assert [step.index for step in steps] == list(range(len(steps)))
    clock = 0.0
    for step in steps:
        assert step.start_s in (clock, *(request.arrival_s for request in trace)) and step.start_s >= clock
        assert step.seconds == seconds_of(step.batch.num_tokens) == seconds_of(step.record.num_tokens)
        clock = step.start_s + step.seconds
