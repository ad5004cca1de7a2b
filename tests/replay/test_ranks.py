"""Several ranks: one decision everywhere, outputs of the rank alone, and errors instead of hanging."""

import signal
from collections import Counter

import attrs
import pytest
import torch
from decoder.serving import make_plan, make_runner
from replay.rank_outputs import run_outputs
from replay.rank_processes import RankEnd, results, run_ranks
from replay.rank_steps import ALL_SIZES, PLAN, Decision, RankStep, decide_plainly, random_steps
from replay.rank_work import decide, fail_in_all_ways

from replay_sim.batch.dispatch import CudagraphMode, StepRecord, dispatch_needs, dispatch_step, step_needs
from replay_sim.batch.rank_dispatch import IDLE, rank_record, together
from replay_sim.batch.request import Batch
from replay_sim.capture.host import HostBackend
from replay_sim.replay.ranks import RankAgreement

# Random steps on two and on four ranks: of decisions alone, and of the decoder with graphs.
DECISIONS = {2: (11, 1400), 4: (12, 700)}
OUTPUTS = {2: (9, 16), 4: (54, 10)}
# Graphs of the decoder, of which rank 1 lacks two; the one of 64 tokens breaks for replay.
OUTPUT_PLAN = make_plan(model_sizes=(16, 64), full_sizes=(2, 4), replay_sizes=(16, 32))
LACKS = [{}, {"full": 2, "replay": 32}, {}, {}]
GRAPH_OR_EAGER = ("PIECEWISE", "NONE")
TIMEOUT_S = 2.0


def decision(record: StepRecord) -> tuple:
    replay_mode = None if record.replay_mode is None else record.replay_mode.value
    return record.mode.value, record.padded_tokens, replay_mode, record.replay_rows, record.padded_rows


@pytest.mark.parametrize("world_size", DECISIONS)
def test_all_ranks_take_the_decision_that_all_their_needs_and_graphs_call_for(tmp_path, world_size: int) -> None:
    """X1, X2: idle ranks, ranks that lack a size and ranks without graphs among them; every rank knows all rows."""
    seed, num_steps = DECISIONS[world_size]
    decided = results(run_ranks(tmp_path, world_size, decide, seed, num_steps, "cpu"))
    kinds = Counter()
    for ranks, *found in zip(random_steps(seed, world_size, num_steps), *decided, strict=True):
        expected = check_decisions(ranks, found)
        kinds[expected[0][0], expected[0][2]] += 1
        kinds["idle beside others"] += any(part.batch is None for part in ranks) and expected[0][1] > 0
        kinds["no rank has work"] += expected[0][1] == 0
        kinds["a rank has no graphs"] += any(not any(part.held.values()) for part in ranks)
    modes = {("FULL", None), *((mode, replay) for mode in GRAPH_OR_EAGER for replay in (None, *GRAPH_OR_EAGER))}
    expected_kinds = {*modes, "idle beside others", "no rank has work", "a rank has no graphs"}
    assert {kind for kind, count in kinds.items() if count >= 5} == expected_kinds


def check_decisions(ranks: list[RankStep], found: list[tuple[StepRecord, tuple, tuple]]) -> list[Decision]:
    """Each rank's record is the plain one, and each knows the padded tokens and rows of all."""
    expected = decide_plainly(ranks)
    assert [decision(record) for record, _, _ in found] == expected
    rows = tuple(one[1] for one in expected), tuple(one[4] for one in expected)
    assert all((rank_tokens, rank_rows) == rows for _, rank_tokens, rank_rows in found)
    return expected


@pytest.mark.gpu
def test_ranks_agree_on_gpus_by_nccl(tmp_path) -> None:
    """X1: the same decisions where the all-reduce runs on the GPUs, of which two are taken where there are."""
    world_size = min(torch.cuda.device_count(), 2)
    decided = results(run_ranks(tmp_path, world_size, decide, 13, 200, "cuda"))
    for ranks, *found in zip(random_steps(13, world_size, 200), *decided, strict=True):
        check_decisions(ranks, found)


@pytest.mark.parametrize("world_size", OUTPUTS)
def test_outputs_are_those_of_each_rank_alone_and_collectives_inside_of_layers_meet(tmp_path, world_size: int) -> None:
    """X1, X2, S8: bit for bit at the agreed sizes, within rounding without pads; an idle rank writes no KV."""
    by_rank = results(run_ranks(tmp_path, world_size, run_outputs, OUTPUT_PLAN, LACKS, *OUTPUTS[world_size]))
    seen = Counter()
    for parts in zip(*by_rank, strict=True):
        records = [ran.record for ran in parts]
        first = records[0]
        assert len({(record.mode, record.replay_mode, record.reason) for record in records}) == 1
        tokens, rows = (
            tuple(count) for count in zip(*((r.padded_tokens, r.padded_rows) for r in records), strict=True)
        )
        nothing_meets = first.mode is CudagraphMode.FULL or not any(tokens)
        in_layers = [] if nothing_meets else [tokens, rows if first.has_replay_batch else tokens]
        for ran in parts:
            assert (ran.rank_tokens, ran.rank_rows, ran.met) == (tokens, rows, in_layers)
        seen[first.mode.value, first.replay_mode and first.replay_mode.value] += 1
        seen["idle"] += any(not record.num_reqs and record.padded_tokens for record in records)
    modes = {("FULL", None), *((mode, replay) for mode in GRAPH_OR_EAGER for replay in (None, *GRAPH_OR_EAGER))}
    assert {kind for kind, count in seen.items() if count} == {*modes, "idle"}


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> list[RankEnd]:
    """Three ranks whose plans differ, of which rank 1 then does not come to a step, and at last is killed."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), 3, fail_in_all_ways, TIMEOUT_S)


def test_plans_that_differ_are_refused_on_every_rank_by_the_setting(failures) -> None:
    """X1: notes are no difference."""
    for rank, sizes in ((0, (8, 16)), (2, (8, 16, 64))):
        assert failures[rank].exit_code == 0, failures[rank].result
        assert failures[rank].result[0] == (
            f"the ranks' plans differ in model_sizes: rank {rank} has model_sizes {sizes}; all ranks need one plan"
        )


def test_a_rank_that_does_not_come_or_is_killed_ends_the_others_with_an_error_that_names_the_step(failures) -> None:
    """X1: within the time limit, and every later step is refused at once."""
    assert failures[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert failures[rank].exit_code == 0, failures[rank].result
        stuck, stuck_again, killed, killed_again = failures[rank].result[1:]
        assert (stuck, killed) == (stuck_again, killed_again)
        for error in (stuck, killed):
            start = f"rank {rank} of 3 could not agree on step 4 with the other ranks within timeout_s {TIMEOUT_S:g} ("
            assert error.startswith(start)
            assert "start all ranks anew" in error and "\n" not in error


def test_one_rank_alone_decides_as_it_would_without_others() -> None:
    """X1: the policy is one, whoever asks."""
    for (part,) in random_steps(3, 1, 400):
        own = IDLE if part.batch is None else step_needs(part.batch, PLAN)
        agreed = dispatch_needs(together([own]), PLAN, **part.held)
        assert rank_record(agreed, own) == dispatch_step(part.batch or Batch(), PLAN, **part.held)


def test_needs_together_decide_as_ranks_do() -> None:
    """X1: without processes, as simulations ask."""
    for ranks in random_steps(4, 3, 400):
        needs = [IDLE if part.batch is None else step_needs(part.batch, PLAN) for part in ranks]
        common = {name: set.intersection(*(set(part.held[name]) for part in ranks)) for name in ALL_SIZES}
        agreed = dispatch_needs(together(needs), PLAN, **common)
        assert [decision(rank_record(agreed, own)) for own in needs] == decide_plainly(ranks)


def test_a_batch_without_tokens_is_not_taken_for_an_idle_rank() -> None:
    """X2: the idle rank leaves the others their FULL graph; nothing else does without saying so."""
    decodes = random_steps_decode()
    assert decide_plainly([decodes, RankStep(None, ALL_SIZES)])[0][0] == "FULL"
    own = step_needs(decodes.batch, PLAN)
    for other, mode in ((IDLE, CudagraphMode.FULL), (step_needs(Batch(), PLAN), CudagraphMode.PIECEWISE)):
        assert dispatch_needs(together([own, other]), PLAN, **ALL_SIZES).mode is mode


def random_steps_decode() -> RankStep:
    """A part that decodes, from the random ones."""
    parts = (part for (part,) in random_steps(3, 1, 400) if part.batch is not None)
    return next(part for part in parts if decide_plainly([attrs.evolve(part, held=ALL_SIZES)])[0][0] == "FULL")


def test_a_runner_without_an_agreement_has_no_idle_steps() -> None:
    """X2."""
    runner = make_runner(HostBackend(1 << 30), captured=False)
    with pytest.raises(ValueError, match="agreement is None"):
        runner.idle_step()


def test_a_time_limit_that_is_not_positive_is_refused() -> None:
    """X1: by name, before any group is made."""
    with pytest.raises(ValueError, match="timeout_s is 0: it must be above 0"):
        RankAgreement(make_plan(), timeout_s=0)
