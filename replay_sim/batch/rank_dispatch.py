"""What the ranks ask of one step together, and how each of them then runs its own part of it (X1, X2)."""

from collections.abc import Sequence

import attrs

from replay_sim.batch.dispatch import CudagraphMode, StepNeeds, StepRecord

IDLE = StepNeeds(num_tokens=0, num_reqs=0, is_uniform_decode=True, kept_rows=0, trims=False)
"""What a rank asks for that says that it is idle: no row, and any graph will do (X2)."""
PAD_ROWS = 1
"""Rows with which a rank without rows joins a step that runs eagerly (X2)."""


def together(needs: Sequence[StepNeeds]) -> StepNeeds:
    """What the ranks ask for together, one entry each: most tokens, requests and kept rows of any rank (X1).

    A FULL graph needs a uniform decode on every rank that is not idle; one rank that trims makes all have a replay
    batch. Raises ValueError without any rank.
    """
    return StepNeeds(
        num_tokens=max(rank.num_tokens for rank in needs),
        num_reqs=max(rank.num_reqs for rank in needs),
        is_uniform_decode=all(rank.is_uniform_decode for rank in needs),
        kept_rows=max(rank.kept_rows for rank in needs),
        trims=any(rank.trims for rank in needs),
    )


def rank_record(agreed: StepRecord, own: StepNeeds) -> StepRecord:
    """How one rank runs a step of which `agreed` is the dispatch of what all ranks ask for together (X1, X2).

    Modes, reasons and the sizes of graphs are those agreed. What runs eagerly has the rank's own rows, at least one:
    a rank without rows joins with a pad. A step without tokens on any rank runs nothing (S6).
    """
    tokens = padded_rows(agreed.mode, agreed.padded_tokens, own.num_tokens) if agreed.num_tokens else 0
    has_replay = agreed.replay_mode is not None
    return attrs.evolve(
        agreed,
        num_tokens=own.num_tokens,
        num_reqs=own.num_reqs,
        padded_tokens=tokens,
        replay_rows=own.kept_rows if has_replay else 0,
        padded_rows=padded_rows(agreed.replay_mode, agreed.padded_rows, own.kept_rows) if has_replay else 0,
    )


def padded_rows(mode: CudagraphMode | None, size: int, rows: int) -> int:
    """The rows that a rank with `rows` runs: the graph's size, or eagerly its own, at least one (X2)."""
    return max(rows, PAD_ROWS) if mode is CudagraphMode.NONE else size
