"""One step as counts and predictions see it: what its record says, and what a record leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.config.shapes import DecoderShape


@attrs.frozen(kw_only=True)
class StepCase:
    """A step's dispatch (D4), and how its requests lie: `num_reqs` requests of equal length, `computed` tokens each.

    A step of unequal requests is taken as one of equal ones. `replay_mode` None: the replay layers ran on the whole
    batch. `one_launch`: the replay graph is a single launch that gathers and scatters too.
    """

    num_tokens: int
    padded_tokens: int
    mode: CudagraphMode
    replay_rows: int
    padded_rows: int
    replay_mode: CudagraphMode | None
    num_reqs: int
    computed: int
    one_launch: bool = False

    @property
    def has_replay_batch(self) -> bool:
        """Whether the replay layers run on a replay batch of their own (L5)."""
        return self.replay_mode is not None

    @property
    def query_len(self) -> float:
        """Tokens of a request."""
        return self.num_tokens / self.num_reqs

    @property
    def kept_len(self) -> float:
        """Rows of the replay batch of a request."""
        return self.replay_rows / self.num_reqs


def case_of_record(record: StepRecord, computed: int, *, one_launch: bool = False) -> StepCase:
    """The case of a dispatched step whose requests had `computed` tokens before.

    Raises ValueError for an empty step, which runs nothing.
    """
    if record.num_tokens < 1 or record.num_reqs < 1:
        raise ValueError(f"num_tokens {record.num_tokens}: an empty step runs nothing, it must be at least 1")
    return StepCase(
        num_tokens=record.num_tokens,
        padded_tokens=record.padded_tokens,
        mode=record.mode,
        replay_rows=record.replay_rows,
        padded_rows=record.padded_rows,
        replay_mode=record.replay_mode,
        num_reqs=record.num_reqs,
        computed=computed,
        one_launch=one_launch,
    )


def case_of_point(point: Mapping[str, object]) -> StepCase:
    """The case of one point of a `steps` record; KeyError names a key that it lacks."""

    def count(key: str) -> int:
        value = point[key]
        assert isinstance(value, int), f"{key} is {value!r}"
        return value

    replay_mode = point["replay_mode"]
    return StepCase(
        num_tokens=count("num_tokens"),
        padded_tokens=count("padded_tokens"),
        mode=CudagraphMode(point["mode"]),
        replay_rows=count("replay_rows"),
        padded_rows=count("padded_rows"),
        replay_mode=None if replay_mode is None else CudagraphMode(replay_mode),
        num_reqs=count("num_reqs"),
        computed=count("computed"),
        one_launch=point["arm"] == "piecewise_replay_one_launch",
    )


def long_context(shape: DecoderShape) -> int:
    """Tokens before a step from which on more change nothing: every row then attends all the keys that it may."""
    return max(shape.window, shape.index_topk)
