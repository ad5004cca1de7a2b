"""Ranks as threads of this process, whose all-reduce is a meeting at a barrier: the same decisions, in a second."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch
from replay.rank_steps import ALL_SIZES, PLAN, random_steps
from replay.rank_work import decide
from replay.test_ranks import check_decisions
from torch import distributed as dist

from replay_sim.replay.ranks import RankAgreement, RankError

MEETING_S = 30


class Meeting:
    """What `torch.distributed` is to the ranks: each thread is one."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.own = world_size, threading.local()
        self.barrier = threading.Barrier(world_size)
        self.values: list[torch.Tensor] = [torch.zeros(0)] * world_size

    def all_reduce(self, tensor: torch.Tensor, *_: object, **__: object) -> "Meeting":
        """The largest of all ranks, in place."""
        self.values[self.own.rank] = tensor.clone()
        self.barrier.wait(MEETING_S)
        tensor.copy_(torch.stack(self.values).amax(0))
        self.barrier.wait(MEETING_S)
        return self

    def wait(self, limit: object) -> None:
        """Done when `all_reduce` returned."""

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns on each rank."""

        def as_rank(rank: int) -> Any:
            self.own.rank = rank
            return work()

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(as_rank, range(self.world_size)))


@pytest.fixture(params=[1, 2, 3])
def meeting(request, monkeypatch) -> Meeting:
    made = Meeting(request.param)
    monkeypatch.setattr(dist, "get_rank", lambda: made.own.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: made.world_size)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
    return made


def test_all_ranks_decide_as_the_plain_rules_say(meeting: Meeting) -> None:
    """X1, X2."""
    num_steps = 150
    decided = meeting.run(lambda: decide(None, 21, num_steps, "cpu"))
    for ranks, *found in zip(random_steps(21, meeting.world_size, num_steps), *decided, strict=True):
        check_decisions(ranks, found)


def test_plans_that_differ_are_refused_by_what_differs(meeting: Meeting) -> None:
    """X1: notes may differ."""

    def refusal() -> str:
        rank = dist.get_rank()
        sizes = PLAN.model_sizes[: len(PLAN.model_sizes) - rank % 2]
        try:
            RankAgreement(attrs.evolve(PLAN, model_sizes=sizes, notes=(f"rank {rank}",)))
        except ValueError as error:
            return str(error)
        return "agreed"

    found = meeting.run(refusal)
    if meeting.world_size == 1:
        assert found == ["agreed"]
        return
    for rank, error in enumerate(found):
        sizes = PLAN.model_sizes[: len(PLAN.model_sizes) - rank % 2]
        assert f"differ in model_sizes: rank {rank} has model_sizes {sizes}; all ranks need one plan" in error


def test_after_a_failure_no_further_step_is_agreed_on_and_the_first_cause_is_named(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1: the first line of the cause, and which step it was."""
    agreements = meeting.run(lambda: RankAgreement(PLAN, timeout_s=7))
    meeting.run(lambda: agreements[dist.get_rank()].dispatch_idle(**ALL_SIZES))

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("\n the first line\nthe second line")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    for rank, agreement in enumerate(agreements):
        cause = rf"rank {rank} of {meeting.world_size} could not agree on step 2 .* timeout_s 7 \(the first line\)"
        for _ in range(2):
            with pytest.raises(RankError, match=cause):
                agreement.dispatch_idle(**ALL_SIZES)


@pytest.mark.parametrize("timeout_s", [0, -1, -0.5, float("nan")])
def test_a_time_limit_that_is_not_positive_is_refused(timeout_s: float) -> None:
    """X1."""
    with pytest.raises(ValueError, match="must be above 0 seconds"):
        RankAgreement(PLAN, timeout_s=timeout_s)
