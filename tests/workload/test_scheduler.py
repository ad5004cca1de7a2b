"""The scheduler against a plain one, and its invariants on random traces."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.batch.request import Phase
from replay_sim.config import load_config
from replay_sim.workload.kv_blocks import BlockTable
from replay_sim.workload.running import RunningRequest, RunningRequests
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

BLOCK_SIZE = 4
TWO_PROMPTS = (TraceRequest(0.0, 10, 3, "a"), TraceRequest(0.0, 5, 2, "b"))


def seconds(record: object) -> float:
    """A step time for tests: half a second."""
    return 0.5


def no_record(batch: object) -> object:
    """A dispatch for tests that look at the schedule alone."""
    return batch


@st.composite
def traces(draw: st.DrawFn) -> tuple[TraceRequest, ...]:
    """0 to 25 requests in order of arrival."""
    lengths = st.tuples(st.integers(1, 60), st.integers(0, 20), st.sampled_from([0.0, 0.2, 0.5, 9.0]))
    rows = draw(st.lists(lengths, max_size=25))
    clock = itertools.accumulate(gap for _, _, gap in rows)
    return tuple(
        TraceRequest(time, prompt, output, f"r{index}")
        for index, (time, (prompt, output, _)) in enumerate(zip(clock, rows, strict=True))
    )


@st.composite
def all_settings(draw: st.DrawFn) -> SchedulerSettings:
    """Tight and wide bounds, with and without speculation; every request of `traces` fits the blocks."""
    drafts = draw(st.integers(0, 5))
    return SchedulerSettings(
        draw(st.integers(1, 12)),
        draw(st.integers(drafts + 1, 100)),
        num_speculative_tokens=drafts,
        acceptance_rate=draw(st.sampled_from([0.0, 0.4, 1.0])),
        prompt_logprobs_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        block_size=BLOCK_SIZE,
        num_blocks=draw(st.none() | st.integers(22, 80)),
        seed=draw(st.integers(0, 3)),
    )


def schedule_plainly(trace, bounds, timed):
    """By request id, query length, tokens computed and phase in each step; all drafts accepted."""
    query_len = bounds.num_speculative_tokens + 1
    waiting, running, steps, clock = list(trace), [], [], 0.0
    while waiting or running:
        if timed and not running:
            clock = max(clock, waiting[0].arrival_s)
        budget, step, stalled = bounds.max_num_batched_tokens, {}, False
        for state in running:
            is_decode = state["computed"] >= state["prompt"]
            take = query_len if is_decode else min(state["prompt"] - state["computed"], budget)
            if take > budget or take == 0:
                stalled = True
                break
            step[state["id"]] = (take, state["computed"], is_decode)
            budget -= take
        while waiting and budget and not stalled and len(running) < bounds.max_num_seqs:
            request = waiting[0]
            if timed and request.arrival_s > clock:
                break
            waiting.pop(0)
            running.append(
                {"id": request.request_id, "prompt": request.prompt_tokens, "computed": 0}
                | {"left": request.output_tokens}
            )
            take = min(request.prompt_tokens, budget)
            step[request.request_id] = (take, 0, False)
            budget -= take
        for state in running:
            take, _, is_decode = step.get(state["id"], (0, 0, False))
            state["computed"] += take
            if take and (is_decode or state["computed"] == state["prompt"]):
                state["left"] -= query_len if is_decode else 1
        running = [s for s in running if s["computed"] < s["prompt"] or s["left"] > 0]
        steps.append(step)
        clock += 0.5
    return steps


@given(traces(), all_settings(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_schedule_equals_a_plain_one(trace, bounds, timed):
    """With all drafts accepted and blocks enough, step by step: who runs, how many tokens, from where."""
    bounds = SchedulerSettings(bounds.max_num_seqs, bounds.max_num_batched_tokens, bounds.num_speculative_tokens)
    options = {"dispatch": no_record, "step_time": seconds} if timed else {}
    steps = [
        {r.request_id: (r.query_len, r.computed, r.phase is Phase.DECODE) for r in step.batch.requests}
        for step in Scheduler(trace, bounds, **options).steps()
    ]
    assert steps == schedule_plainly(trace, bounds, timed)


@given(traces(), all_settings())
@settings(max_examples=150, deadline=None)
def test_the_invariants_of_a_schedule_hold(trace, bounds):
    """Bounds, every prompt token once, order, no starvation, blocks that nobody shares, an end."""
    prompts = {request.request_id: request.prompt_tokens for request in trace}
    order = {request.request_id: index for index, request in enumerate(trace)}
    computed, decodes, finished, unfinished = defaultdict(int), defaultdict(int), [], {}
    for index, step in enumerate(Scheduler(trace, bounds).steps()):
        assert step.index == index
        assert 0 < step.batch.num_tokens <= bounds.max_num_batched_tokens
        assert 0 < step.batch.num_reqs <= bounds.max_num_seqs
        ids = list(step.request_ids)
        assert ids == sorted(ids, key=order.get) and len(set(ids)) == len(ids)
        unfinished |= dict.fromkeys(ids)
        assert ids == sorted(unfinished, key=order.get)[: len(ids)], "a later request runs, an earlier one waits"
        for request in step.batch.requests:
            name = request.request_id
            if request.phase is Phase.PREFILL:
                assert request.computed == computed[name] < prompts[name]
                computed[name] += request.query_len
            else:
                assert computed[name] == prompts[name]
                assert request.query_len == bounds.query_len_decode
                decodes[name] += 1
        blocks = [block for table in step.block_tables for block in table.tolist()]
        assert len(blocks) == len(set(blocks))
        assert bounds.num_blocks is None or all(0 <= block < bounds.num_blocks for block in blocks)
        lengths = [math.ceil(request.seq_len / BLOCK_SIZE) for request in step.batch.requests]
        assert [len(table) for table in step.block_tables] == lengths
        finished.extend(step.finished)
        for name in step.finished:
            del unfinished[name]
    assert sorted(finished) == sorted(prompts) and not unfinished
    assert computed == prompts
    for request in trace:
        fewest = math.ceil(max(request.output_tokens - 1, 0) / bounds.query_len_decode)
        assert fewest <= decodes[request.request_id] <= max(request.output_tokens - 1, 0)


@given(traces(), all_settings())
@settings(max_examples=50, deadline=None)
def test_the_same_seed_gives_the_same_steps(trace, bounds):
    first, second = (list(Scheduler(trace, bounds).steps()) for _ in range(2))
    assert [step.batch for step in first] == [step.batch for step in second]
    assert [step.finished for step in first] == [step.finished for step in second]


def test_two_prompts_are_chunked_then_decoded_side_by_side():
    """S7: a budget of 8 splits the prompt of 10; that of 5 starts in what is left of the second step."""
    steps = list(Scheduler(TWO_PROMPTS, SchedulerSettings(4, 8)).steps())
    assert [(s.request_ids, s.batch.query_lens.tolist(), s.batch.computed.tolist()) for s in steps] == [
        (("a",), [8], [0]),
        (("a", "b"), [2, 5], [8, 0]),
        (("a", "b"), [1, 1], [10, 5]),
        (("a",), [1], [11]),
    ]
    assert [step.finished for step in steps] == [(), (), ("b",), ("a",)]
    assert steps[2].batch.uniform_decode_len == 1
    assert not steps[0].batch.window_starts.any()


def test_decodes_alone_share_their_record_and_its_time_and_each_step_has_its_own_batch():
    """From the second step on both decode, until b ends; dispatch is asked for 2 prefills, 2 decodes and 1 decode."""
    asked = []
    trace = (TraceRequest(0.0, 10, 9, "a"), TraceRequest(0.0, 5, 6, "b"))
    scheduler = Scheduler(trace, SchedulerSettings(2, 100), dispatch=lambda b: asked.append(b) or b, step_time=seconds)
    steps = list(scheduler.steps())
    assert [(b.query_lens.tolist(), b.computed.tolist()) for b in asked] == [
        ([10, 5], [0, 0]),
        ([1, 1], [10, 5]),
        ([1], [15]),
    ]
    assert [step.batch.computed.tolist() for step in steps] == [
        [0, 0],
        *([10 + i, 5 + i] for i in range(5)),
        *([15 + i] for i in range(3)),
    ]
    assert [step.start_s for step in steps] == [i / 2 for i in range(9)]
    assert len({id(step.record) for step in steps[1:6]}) == 1


def test_a_decode_advances_by_what_was_accepted():
    """Three drafts a step: with none accepted one token a step, with all four."""
    trace = (TraceRequest(0.0, 5, 9, "a"),)
    none, every = (
        [step.batch.computed.tolist() for step in Scheduler(trace, SchedulerSettings(1, 8, 3, rate)).steps()]
        for rate in (0.0, 1.0)
    )
    assert none == [[0], *([computed] for computed in range(5, 13))]
    assert every == [[0], [5], [9]]


def test_the_accepted_drafts_have_the_rate_that_was_asked_for():
    """Of 3 drafts at rate 0.5, 0.5 + 0.25 + 0.125 are accepted on average, besides one token."""
    trace = (TraceRequest(0.0, 1, 20_000, "a"),)
    steps = sum(1 for _ in Scheduler(trace, SchedulerSettings(1, 8, 3, 0.5, seed=1)).steps())
    assert 20_000 / steps == pytest.approx(1.875, rel=0.02)


def test_prompts_whose_rows_are_all_read_are_marked_in_prefill_only_and_by_their_share():
    """S1."""
    trace = [TraceRequest(0.0, 5, 3, str(index)) for index in range(2000)]
    bounds = SchedulerSettings(8, 8, prompt_logprobs_share=0.3)
    marked = set()
    for step in Scheduler(trace, bounds).steps():
        for request in step.batch.requests:
            assert not (request.all_rows_read and request.phase is Phase.DECODE)
            marked |= {request.request_id} if request.all_rows_read else set()
    assert len(marked) / len(trace) == pytest.approx(0.3, abs=0.03)


def test_arrivals_count_in_virtual_time_only():
    """Half a second a step: b arrives while a decodes, c after both are done."""
    trace = [TraceRequest(time, 3, 2, name) for time, name in ((0.0, "a"), (0.4, "b"), (60.0, "c"))]
    timed = list(Scheduler(trace, SchedulerSettings(4, 8), dispatch=no_record, step_time=seconds).steps())
    assert [(step.start_s, step.request_ids) for step in timed] == [
        (0.0, ("a",)),
        (0.5, ("a", "b")),
        (1.0, ("b",)),
        (60.0, ("c",)),
        (60.5, ("c",)),
    ]
    assert {step.seconds for step in timed} == {0.5}
    untimed = list(Scheduler(trace, SchedulerSettings(4, 9)).steps())
    assert [(step.start_s, step.request_ids) for step in untimed] == [(None, ("a", "b", "c"))] * 2


def test_a_full_cache_makes_requests_wait_and_never_runs_out():
    """Blocks for one request at a time: the second starts when the first has finished."""
    steps = list(Scheduler(TWO_PROMPTS, SchedulerSettings(4, 100, block_size=4, num_blocks=3)).steps())
    assert [step.request_ids for step in steps] == [("a",)] * 3 + [("b",)] * 2


def test_requests_are_taken_from_the_stream_as_there_is_room():
    taken = []

    def stream():
        for index in range(1_000_000):
            taken.append(index)
            yield TraceRequest(0.0, 5, 5, str(index))

    for _ in itertools.islice(Scheduler(stream(), SchedulerSettings(4, 100)).steps(), 3):
        assert len(taken) == 5


def test_no_requests_give_no_steps():
    """S6."""
    assert list(Scheduler((), SchedulerSettings(4, 100)).steps()) == []


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    message = "num_blocks is 2: it must be at least 3 for request 'a', which has 10 prompt_tokens and 3 output_tokens"
    with pytest.raises(ValueError, match=message):
        list(Scheduler(TWO_PROMPTS, SchedulerSettings(4, 100, block_size=4, num_blocks=2)).steps())


def test_requests_out_of_order_are_refused():
    trace = (TraceRequest(1.0, 5, 5, "a"), TraceRequest(0.5, 5, 5, "b"))
    with pytest.raises(ValueError, match="request 'b' arrives at 0.5 s: it must not arrive before 'a', at 1.0 s"):
        list(Scheduler(trace, SchedulerSettings(4, 100)).steps())


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_step_time_that_is_none_is_refused(bad):
    scheduler = Scheduler(TWO_PROMPTS, SchedulerSettings(4, 100), dispatch=no_record, step_time=lambda _: bad)
    with pytest.raises(ValueError, match="step_time is .* it must be finite and at least 0"):
        list(scheduler.steps())


def test_a_step_time_needs_a_dispatch():
    with pytest.raises(ValueError, match="step_time is given without dispatch"):
        Scheduler((), SchedulerSettings(4, 100), step_time=seconds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0: it must be at least 1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"prefix_cache_blocks": -1}, "prefix_cache_blocks is -1: it must be at least 0"),
        ({"window": -1}, "window is -1"),
        ({"acceptance_rate": 1.5}, "acceptance_rate is 1.5: it must be from 0 to 1"),
        ({"prompt_logprobs_share": math.nan}, "prompt_logprobs_share is nan"),
        ({"max_num_batched_tokens": 5, "num_speculative_tokens": 5}, "max_num_batched_tokens is 5"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SchedulerSettings(**({"max_num_seqs": 4, "max_num_batched_tokens": 100} | changes))


def test_settings_come_from_a_serving_config():
    config = load_config("h100-tp8-log")
    bounds = SchedulerSettings.from_config(config, seed=5)
    assert bounds.max_num_seqs == config.max_num_seqs
    assert bounds.max_num_batched_tokens == config.max_num_batched_tokens
    assert bounds.query_len_decode == config.query_len_decode
    assert bounds.window == config.window
    assert bounds.seed == 5


def test_running_requests_keep_their_order_when_some_leave():
    running = RunningRequests(4)
    for name in "abcd":
        running.add(RunningRequest(TraceRequest(0.0, 5, 5, name), BlockTable(BLOCK_SIZE)), 0, False)
    lengths, flags = np.full(4, 5), np.zeros(4, bool)
    assert running.remove(running.prompt[:3] < 0) == ()
    done = running.prompt[:3] > 0
    done[1] = False
    assert [kept.request.request_id for kept in running.remove(done)] == ["a", "c"]
    assert running.columns(lengths[:2], flags[:2], any_prefill=True).request_ids == ("b", "d")
