"""What the ranks of the tests decide and how they fail, each in a process of its own."""

import os
import signal
from datetime import timedelta

import attrs
import torch
from replay.rank_steps import ALL_SIZES, PLAN, RankStep, random_steps
from torch import distributed as dist

from replay_sim.batch.dispatch import StepRecord
from replay_sim.replay.ranks import RankAgreement, RankError


def dispatch(agreement: RankAgreement, part: RankStep) -> StepRecord:
    """This rank's record of one step."""
    return agreement.dispatch_idle(**part.held) if part.batch is None else agreement.dispatch(part.batch, **part.held)


def decide(store: dist.Store, seed: int, num_steps: int, device: str) -> list[tuple[StepRecord, tuple, tuple]]:
    """Agree on random steps, on the CPU or on a GPU for each rank: this rank's records, and the rows of all ranks."""
    rank = dist.get_rank()
    agreement = RankAgreement(PLAN, device=torch.device(device, rank) if device == "cuda" else torch.device(device))
    decided = []
    for ranks in random_steps(seed, dist.get_world_size(), num_steps):
        record = dispatch(agreement, ranks[rank])
        decided.append((record, agreement.rank_tokens, agreement.rank_rows))
    return decided


def fail_in_all_ways(store: dist.Store, timeout_s: float) -> list[str]:
    """The errors of plans that differ, and of a rank 1 that does not come to a step, and then is killed."""
    return [refusal_of_plans_that_differ(), *lose_a_rank(store, timeout_s)]


def refusal_of_plans_that_differ() -> str:
    """The error of plans that differ in their sizes, and in notes."""
    sizes = (8, 16, 64) if dist.get_rank() else (8, 16)
    try:
        RankAgreement(attrs.evolve(PLAN, model_sizes=sizes, notes=(f"rank {dist.get_rank()}",)))
    except ValueError as error:
        return str(error)
    return "no error"


def lose_a_rank(store: dist.Store, timeout_s: float) -> list[str]:
    """Rank 1 first does not come to a step, then is killed: the errors of the others, and of what they try after."""
    part, errors = RankStep(None, ALL_SIZES), []
    for how in ("stuck", "killed"):
        dist.barrier()
        agreement = RankAgreement(PLAN, timeout_s=timeout_s)
        for _ in range(3):
            dispatch(agreement, part)
        if dist.get_rank() == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            others = [f"rank {rank} has its error" for rank in range(dist.get_world_size()) if rank != 1]
            store.wait(others, timedelta(seconds=60))
            continue
        for _ in range(2):
            try:
                dispatch(agreement, part)
            except RankError as error:
                errors.append(str(error))
        store.set(f"rank {dist.get_rank()} has its error", "")
    return errors
