"""The prefix cache: hits, what is held, what is evicted first, and the window that is computed again."""

import random

import pytest
from workload.plain_scheduler import PlainCache

from replay_sim.workload.prefix_cache import PREFIX_BLOCK_SIZE, PrefixCache, computed_after_hit
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

BLOCK = 4
ABC, ABX, DEF = (1, 2, 3), (1, 2, 9), (4, 5, 6)
WINDOW = 128


def cached(*prompts, num_blocks=100):
    """A cache in which these prompts were computed and released, in this order."""
    cache = PrefixCache(num_blocks, BLOCK)
    for hashes in prompts:
        cache.release(hashes, cache.hold(hashes, 0, len(hashes) * BLOCK))
    return cache


def test_a_hit_is_the_longest_cached_prefix_in_whole_blocks_and_never_the_whole_prompt():
    cache = cached(ABC)
    assert [cache.hit(ABC, tokens) for tokens in (1, 4, 5, 8, 9, 12, 13, 99)] == [0, 0, 4, 4, 8, 8, 12, 12]
    assert cache.hit(ABX, 99) == 8
    assert cache.hit((9, 1, 2), 99) == cache.hit((), 99) == 0
    assert cached((1, 2)).hit(ABC, 99) == 8


def test_only_full_blocks_are_cached():
    cache = PrefixCache(100, BLOCK)
    assert [cache.hold(ABC, 0, 3), cache.hold(ABC, 0, 7), cache.hold(ABC, 1, 11), cache.hold(ABC, 2, 99)] == [
        0,
        1,
        2,
        3,
    ]
    assert cache.num_used == 3


def test_what_was_released_longest_ago_goes_first_and_of_one_prompt_its_end():
    cache = cached(ABC, DEF, num_blocks=6)
    cache.hold((7,), 0, BLOCK)
    assert (cache.hit(ABC, 99), cache.hit(DEF, 99)) == (8, 12)
    cache.release((1,), cache.hold((1,), 0, BLOCK))
    cache.hold((7, 8), 1, 2 * BLOCK)
    assert (cache.hit(ABC, 99), cache.hit(DEF, 99)) == (4, 12), "block 1 was used since, block 2 was not"
    assert cache.num_used == 6


def test_what_a_request_holds_is_not_evicted_and_stays_until_its_last_holder_lets_go():
    cache = PrefixCache(3, BLOCK)
    assert cache.hold(ABC, 0, 12) == 3 and cache.hold(ABX, 0, 8) == 2
    assert cache.hold(DEF, 0, 12) == 0 and cache.hold(ABX, 2, 12) == 2
    cache.release(ABC, 3)
    assert cache.hold(DEF, 0, 12) == 1 and cache.hit(ABC, 99) == 8
    cache.release(ABX, 2)
    assert cache.hold(DEF, 1, 12) == 3 and cache.hit(ABC, 99) == 0


def test_it_is_the_plain_cache_under_random_use():
    """Hits, and what is cached, equal those of a cache that looks for its oldest block among all."""
    rng = random.Random(0)
    tree = [tuple(10 * family + min(at, family + 1) + 100 * at for at in range(6)) for family in range(5)]
    for num_blocks in (1, 2, 5, 12):
        cache, plain, live = PrefixCache(num_blocks), PlainCache(num_blocks), []
        for name in range(400):
            if live and rng.random() < 0.5:
                state = live.pop(rng.randrange(len(live)))
                cache.release(state["hashes"], len(state["held"]))
                plain.give_back(state)
            else:
                state = {"id": name, "hashes": rng.choice(tree), "held": []}
                tokens = rng.randint(0, 6 * PREFIX_BLOCK_SIZE)
                plain.take(state, tokens)
                assert cache.hold(state["hashes"], 0, tokens) == len(state["held"])
                live.append(state)
            assert cache.num_used == len(plain.blocks) <= num_blocks
            for hashes in tree:
                prompt = rng.randint(1, 4000)
                assert cache.hit(hashes, prompt) == plain.longest(hashes, prompt)


@pytest.mark.parametrize(("hit", "computed"), [(0, 0), (127, 0), (128, 0), (129, 1), (512, 384), (1024, 896)])
def test_a_hit_recomputes_its_last_window_and_is_not_taken_if_no_longer(hit, computed):
    """Issue 6: the encoder-side rule."""
    assert computed_after_hit(hit, WINDOW) == computed


def test_the_same_prompt_again_starts_a_window_before_its_cached_blocks_end():
    """S4: its replay layers hold no window KV below. A prompt whose rows are all read starts from 0."""
    prompt = 2 * PREFIX_BLOCK_SIZE + 100
    trace = [TraceRequest(0.0, prompt, 2, name, (1, 2, 3)) for name in "ab"]
    bounds = SchedulerSettings(1, 8192, prefix_cache_blocks=2, window=WINDOW)
    start = 2 * PREFIX_BLOCK_SIZE - WINDOW
    batches = [step.batch for step in Scheduler(trace, bounds).steps()]
    rows = [(r.request_id, r.computed, r.query_len, r.window_start) for batch in batches for r in batch.requests]
    assert rows == [
        ("a", 0, prompt, 0),
        ("a", prompt, 1, 0),
        ("b", start, prompt - start, start),
        ("b", prompt, 1, start),
    ]
    read = SchedulerSettings(1, 8192, prefix_cache_blocks=2, window=WINDOW, prompt_logprobs_share=1)
    assert {step.cached_tokens for step in Scheduler(trace, read).steps()} == {0}


def test_a_block_is_hit_only_after_the_step_that_computes_it():
    trace = [TraceRequest(0.0, 600, 1, name, (1, 2)) for name in "abc"]
    bounds = SchedulerSettings(3, 1200, prefix_cache_blocks=9)
    cached_tokens = [step.cached_tokens for step in Scheduler(trace, bounds).steps()]
    assert cached_tokens == [0, 512]


@pytest.mark.parametrize("bad", [{"num_blocks": 0}, {"num_blocks": 1, "block_size": 0}])
def test_bounds_that_are_not_positive_are_named(bad):
    with pytest.raises(ValueError, match="is 0: it must be at least 1"):
        PrefixCache(**bad)
