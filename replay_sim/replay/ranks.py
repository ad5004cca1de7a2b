"""The agreement of data-parallel ranks on how one step runs, by one all-reduce a step (X1, X2).

Layers that hold collectives meet the other ranks' layers, so these must be the same on every rank in every step:

- the plan; the constructor compares it.
- the model's mode, and whether there is a replay batch and its mode: they fix which layers run, in which order, and
  so the order of the collectives, and whether a graph or the host issues them.
- the size of every graph that runs: it fixes the rows of the collectives inside. A graph is taken only if every rank
  has it.
- the rows of every rank where layers run eagerly: each rank runs its own, at least one, and knows the others'
  (`rank_tokens`, `rank_rows`), because collectives of unequal rows need them.
- that a step runs at all: it does unless no rank has a token. A rank without one runs pads.

The decision is `dispatch_needs` of what all ranks need together and hold in common, the policy of a single rank, so
that nothing but the all-reduce can differ. Capture agrees on nothing: every rank captures the plan's sizes in order.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from datetime import timedelta

import attrs
import torch
from torch import distributed as dist

from replay_sim.batch.dispatch import StepNeeds, StepRecord, dispatch_needs, step_needs
from replay_sim.batch.rank_dispatch import IDLE, padded_rows, rank_record
from replay_sim.batch.request import Batch
from replay_sim.plan.capture_plan import CapturePlan

DEFAULT_TIMEOUT_S = 60.0
CPU = torch.device("cpu")
COMPARED = tuple(field.name for field in attrs.fields(CapturePlan) if field.name != "notes")


class RankError(RuntimeError):
    """The ranks could not agree: one of them has failed, is stuck or left. No rank can run a further step."""


class RankAgreement:
    """Agrees with all ranks of the default process group, which must exist, on each step of `plan`.

    Its own group reduces on `device`, by gloo on a CPU and NCCL on a GPU. A rank waits `timeout_s` seconds at most for
    the others, so that it must exceed the longest time between two steps of any rank, capture included.
    `rank_tokens` and `rank_rows` hold, for the step agreed last, the padded rows of each rank, of its model and of its
    replay batch; the latter are zeros without one. Raises ValueError for a timeout that is not positive and, on every
    rank, for plans that differ; RankError if a rank does not come.
    """

    def __init__(self, plan: CapturePlan, *, timeout_s: float = DEFAULT_TIMEOUT_S, device: torch.device = CPU) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}: it must be above 0 seconds")
        self.plan = plan
        self.timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.rank_tokens: tuple[int, ...] = ()
        self.rank_rows: tuple[int, ...] = ()
        self._device = device
        self._limit = timedelta(seconds=timeout_s)
        self._steps = 0
        self._failure: str | None = None
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            self._group = dist.new_group(timeout=self._limit, backend=backend)
        except RuntimeError as error:
            raise self._failed("the plan", error) from error
        self._compare_plans()

    def dispatch(
        self,
        batch: Batch,
        *,
        model_sizes: Collection[int],
        full_sizes: Collection[int],
        replay_sizes: Collection[int],
    ) -> StepRecord:
        """How this rank runs its batch in the step that all ranks now agree on, given the sizes that it captured.

        A batch without tokens joins with pads, and is not taken for an idle rank: it is no uniform decode, so that no
        rank takes a FULL graph. Raises RankError.
        """
        return self._agree(step_needs(batch, self.plan), (model_sizes, full_sizes, replay_sizes))

    def dispatch_idle(
        self, *, model_sizes: Collection[int], full_sizes: Collection[int], replay_sizes: Collection[int]
    ) -> StepRecord:
        """How this rank, which says that it is idle, joins the step with pads (X2). Raises RankError."""
        return self._agree(IDLE, (model_sizes, full_sizes, replay_sizes))

    def _agree(self, own: StepNeeds, held: Sequence[Collection[int]]) -> StepRecord:
        """One all-reduce of what this rank needs and holds, and its record of the step."""
        self._steps += 1
        most = self._largest(self._contribution(own, held), f"step {self._steps}")
        world = self.world_size
        tokens, rows, most = most[:world], most[world : 2 * world], most[2 * world :]
        reqs, not_uniform, trims, *lacked = most
        needs = StepNeeds(max(tokens), reqs, not not_uniform, max(rows), bool(trims))
        model_sizes, full_sizes, replay_sizes = self._held_by_all(lacked)
        agreed = dispatch_needs(
            needs, self.plan, model_sizes=model_sizes, full_sizes=full_sizes, replay_sizes=replay_sizes
        )
        self._keep_rows(agreed, tokens, rows)
        return rank_record(agreed, own)

    def _contribution(self, own: StepNeeds, held: Sequence[Collection[int]]) -> list[int]:
        """This rank's entries of the all-reduce, of which each is the largest of any rank's afterwards.

        Tokens and kept rows have a place for each rank, 0 on the others. What all ranks must have or be is sent as
        what this rank lacks or is not.
        """
        tokens, rows = [0] * self.world_size, [0] * self.world_size
        tokens[self.rank], rows[self.rank] = own.num_tokens, own.kept_rows
        lacks = [
            size not in sizes for planned, sizes in zip(self._planned_sizes(), held, strict=True) for size in planned
        ]
        return [*tokens, *rows, own.num_reqs, not own.is_uniform_decode, own.trims, *lacks]

    def _held_by_all(self, lacked: Sequence[int]) -> list[set[int]]:
        """The planned sizes, model, full and replay, that no rank lacks; `lacked` has an entry for each."""
        held, start = [], 0
        for sizes in self._planned_sizes():
            entries = zip(sizes, lacked[start : start + len(sizes)], strict=True)
            held.append({size for size, lacks in entries if not lacks})
            start += len(sizes)
        return held

    def _planned_sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.plan.model_sizes, self.plan.full_sizes, self.plan.replay_sizes

    def _keep_rows(self, agreed: StepRecord, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """The padded rows of every rank in this step."""
        has_tokens, has_replay = bool(agreed.num_tokens), agreed.has_replay_batch
        self.rank_tokens = tuple(
            padded_rows(agreed.mode, agreed.padded_tokens, count) if has_tokens else 0 for count in tokens
        )
        self.rank_rows = tuple(
            padded_rows(agreed.replay_mode, agreed.padded_rows, count) if has_replay else 0 for count in rows
        )

    def _compare_plans(self) -> None:
        """Raises ValueError naming what differs between the ranks' plans."""
        digests = [zlib.crc32(repr(getattr(self.plan, name)).encode()) for name in COMPARED]
        most = self._largest([*digests, *(-digest for digest in digests)], "the plan")
        pairs = zip(COMPARED, most[: len(digests)], most[len(digests) :], strict=True)
        different = [name for name, largest, negated in pairs if largest != -negated]
        if different:
            raise ValueError(
                f"the ranks' plans differ in {', '.join(different)}: rank {self.rank} has "
                f"{', '.join(f'{name} {getattr(self.plan, name)}' for name in different)}; all ranks need one plan"
            )

    def _largest(self, values: Sequence[int], what: str) -> list[int]:
        """Each value's largest on any rank. Raises RankError, also ever after a failure."""
        if self._failure is not None:
            raise RankError(self._failure)
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        try:
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
            work.wait(self._limit)
        except RuntimeError as error:
            raise self._failed(what, error) from error
        return [int(value) for value in tensor.tolist()]

    def _failed(self, what: str, error: RuntimeError) -> RankError:
        cause = str(error).strip().splitlines()[0]
        self._failure = (
            f"rank {self.rank} of {self.world_size} could not agree on {what} with the other ranks within timeout_s "
            f"{self.timeout_s:g} ({cause}): a rank has failed or is stuck, so look for the first error among their "
            "logs and start all ranks anew; if a rank only needs longer, raise timeout_s"
        )
        return RankError(self._failure)
