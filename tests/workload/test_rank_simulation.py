"""Several ranks on one workload: how requests are dealt, the pads counted, and plans tuned for other ranks."""

import itertools
from collections import Counter

import attrs
import pytest
from batch.oracles import dispatch_plainly, select_row_by_row

from replay_sim.batch.request import Batch
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile
from replay_sim.workload.rank_simulation import (
    Dealing,
    deal,
    fewest_padded_rows,
    padding_by_ranks,
    plan_transfer,
    rank_padding,
    simulate_ranks,
)
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

PLAN = CapturePlan(
    window=8,
    model_sizes=(8, 16, 64),
    full_sizes=(1, 2, 4),
    replay_sizes=(8, 16, 32),
    trim_threshold=32,
    max_num_seqs=4,
    max_num_batched_tokens=96,
)
SETTINGS = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=96)
# Prompts and outputs of 40 requests, and of few of which one is long.
REQUESTS = [TraceRequest(0.0, 5 + 7 * index % 90, 1 + index % 6, str(index)) for index in range(40)]
UNEVEN = [TraceRequest(0.0, prompt, output, str(index)) for index, (prompt, output) in enumerate([(90, 9), (5, 5)] * 3)]
CAPTURED = {"PIECEWISE": set(PLAN.model_sizes), "FULL": set(PLAN.full_sizes), "REPLAY": set(PLAN.replay_sizes)}


def ids(hands: list[list[TraceRequest]]) -> list[list[str]]:
    return [[request.request_id for request in hand] for hand in hands]


def test_round_robin_deals_to_one_rank_after_the_other() -> None:
    """X1, issue 9: the cost of several ranks."""
    assert ids(deal(UNEVEN, 4, Dealing.ROUND_ROBIN)) == [["0", "4"], ["1", "5"], ["2"], ["3"]]


def test_least_load_deals_to_the_rank_with_the_fewest_tokens() -> None:
    """X1: 99 tokens go to rank 0, 10 to rank 1, and so the next 99; then rank 0 has the fewest."""
    assert ids(deal(UNEVEN, 2, Dealing.LEAST_LOAD)) == [["0", "3", "4"], ["1", "2", "5"]]
    tokens = [sum(r.prompt_tokens + r.output_tokens for r in hand) for hand in deal(REQUESTS, 4, Dealing.LEAST_LOAD)]
    assert max(tokens) - min(tokens) < 96


def test_fewer_than_one_rank_is_refused() -> None:
    """X1: by name."""
    with pytest.raises(ValueError, match="num_ranks is 0: it must be at least 1"):
        deal(REQUESTS, 0, Dealing.ROUND_ROBIN)


def batches_by_step(num_ranks: int, dealing: Dealing) -> list[tuple[Batch, ...]]:
    """Per step each rank's batch, empty where a rank has finished."""
    hands = deal(REQUESTS, num_ranks, dealing)
    ranks = [[step.batch for step in Scheduler(hand, SETTINGS).steps()] for hand in hands]
    return list(itertools.zip_longest(*ranks, fillvalue=Batch()))


@pytest.mark.parametrize("dealing", Dealing)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_counts_are_those_of_looking_at_every_rank_in_every_step(num_ranks: int, dealing: Dealing) -> None:
    """X1, X2, S8: pads of ranks by themselves and of graphs that fit the largest rank, by plain sums."""
    run = simulate_ranks(REQUESTS, SETTINGS, PLAN, num_ranks, dealing)
    steps = batches_by_step(num_ranks, dealing)
    alone = [dispatch_plainly(batch, PLAN, CAPTURED) for batches in steps for batch in batches]
    assert (run.tokens_alone.rows, run.tokens_alone.padded_rows) == (run.tokens.rows, sum(one[1] for one in alone))
    assert (run.replay_alone.rows, run.replay_alone.padded_rows) == (
        sum(one[3] for one in alone),
        sum(one[4] for one in alone),
    )
    assert run.rows_alone == Counter(one[3] for one in alone if one[2])
    assert run.steps == len(steps)
    assert run.idle_rank_steps == sum(not batch.num_reqs for batches in steps for batch in batches)
    padded, agreed = 0, Counter()
    for batches in steps:
        rows = [len(select_row_by_row(batch, PLAN.window)[0]) for batch in batches]
        if agrees_on_replay(batches, rows):
            agreed[max(rows)] += 1
            fitting = [size for size in PLAN.replay_sizes if size >= max(rows)]
            padded += sum(fitting[0] if fitting else max(count, 1) for count in rows)
    assert run.rows_agreed == agreed and run.replay_steps == agreed.total() > 0
    assert run.replay.padded_rows == padded


def agrees_on_replay(batches: tuple[Batch, ...], rows: list[int]) -> bool:
    """Whether these ranks have a replay batch: in the graph of 64 tokens, or eagerly if a rank trims."""
    tokens = [batch.num_tokens for batch in batches]
    decodes = all(batch.is_decode.all() and (batch.query_lens == 1).all() for batch in batches)
    if decodes and max(tokens) <= 4:
        return False
    return 16 < max(tokens) <= 64 or (max(tokens) > 64 and rows != tokens)


def test_one_rank_pads_as_it_would_by_itself() -> None:
    """X1: it joins nobody and is never idle."""
    line = rank_padding(simulate_ranks(REQUESTS, SETTINGS, PLAN, 1))
    assert (line.replay_pad_share, line.token_pad_share) == (line.replay_pad_share_alone, line.token_pad_share_alone)
    assert line.replay_pad_share > 0 and line.idle_share == line.joined_share == 0


def test_the_table_has_a_line_for_each_number_of_ranks_and_dealing() -> None:
    """X1: of requests that can be gone through once."""
    requests = generate_requests(load_profile("conversation"), 60, seed=1)
    settings = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=4096)
    plan = attrs.evolve(PLAN, max_num_batched_tokens=4096)
    table = padding_by_ranks(requests, settings, plan, (1, 2, 4))
    assert [(line.num_ranks, line.dealing) for line in table] == list(itertools.product((1, 2, 4), Dealing))
    assert attrs.astuple(table[0])[2:] == attrs.astuple(table[1])[2:]
    for line in table:
        assert 0 <= line.token_pad_share_alone <= line.token_pad_share < 1
        assert 0 <= line.idle_share <= 1 and line.replay_steps <= line.steps


@pytest.mark.parametrize("max_graphs", [1, 2, 3, 4, 9])
def test_sizes_of_fewest_padded_rows_hold_every_row_of_the_histogram(max_graphs: int) -> None:
    """P8: by trying all sets of sizes that hold the largest."""
    histogram = Counter({10: 50, 12: 9, 20: 1, 30: 2})
    least = min(
        sum(weight * min(size for size in chosen if size >= rows) for rows, weight in histogram.items())
        for count in range(1, max_graphs + 1)
        for chosen in itertools.combinations(histogram, count)
        if max(chosen) == 30
    )
    found = fewest_padded_rows(histogram, max_graphs)
    assert found[-1] == 30 and len(found) <= max_graphs
    assert sum(w * min(size for size in found if size >= rows) for rows, w in histogram.items()) == least


def test_a_plan_tuned_for_one_rank_is_held_against_one_tuned_for_many() -> None:
    """X1, P8: no three sizes that hold all steps pad less than those tuned for these ranks."""
    one, many = (simulate_ranks(REQUESTS, SETTINGS, PLAN, count) for count in (1, 5))
    planned, for_one, for_many = plan_transfer(one, many, PLAN)
    assert [line.sizes_of for line in (planned, for_one, for_many)] == ["the plan", "tuned for 1", "tuned for 5"]
    assert planned.replay_sizes == PLAN.replay_sizes
    assert len(for_one.replay_sizes) <= 3 and len(for_many.replay_sizes) <= 3
    assert for_many.eager_share == 0 and for_many.replay_sizes[-1] == max(many.rows_agreed)
    rows = sum(many.own_rows_agreed.values())
    for line in (planned, for_one, for_many):
        padded = line.rows_per_step * many.replay_steps * 5
        assert line.pad_share == pytest.approx(1 - rows / padded)
        if not line.eager_share:
            assert for_many.rows_per_step <= line.rows_per_step


def test_nothing_to_tune_is_refused_by_name() -> None:
    """P8."""
    one = simulate_ranks(REQUESTS, SETTINGS, PLAN, 1)
    with pytest.raises(ValueError, match="decoder_replay_cudagraph_capture_sizes is empty"):
        plan_transfer(one, one, attrs.evolve(PLAN, replay_sizes=()))
    with pytest.raises(ValueError, match="histogram is empty"):
        fewest_padded_rows(Counter(), 3)
