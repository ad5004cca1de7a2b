"""The plan: which graphs are captured, at which sizes, and which of them break for replay."""

from itertools import pairwise

import attrs

from replay_sim.config import ServingConfig
from replay_sim.plan.capture_sizes import (
    full_capture_sizes,
    listed,
    model_capture_sizes,
    replay_capture_sizes,
)
from replay_sim.plan.reachable import mostly_padding, reachable_rows, unreachable_sizes
from replay_sim.plan.trim_threshold import trim_threshold


def _ascending(_: object, attribute: "attrs.Attribute[tuple[int, ...]]", sizes: tuple[int, ...]) -> None:
    if any(size < 1 for size in sizes) or any(low >= high for low, high in pairwise(sizes)):
        raise ValueError(f"{attribute.name}: {sizes} is not allowed; sizes must be positive and ascending")


@attrs.frozen(kw_only=True)
class CapturePlan:
    """What is captured and how a step may use it; all sizes are ascending.

    Attributes:
        window: rows that a trimmed prefill keeps (S1).
        model_sizes: padded tokens of the PIECEWISE model graphs.
        full_sizes: padded tokens of the FULL graphs, multiples of `query_len_decode`.
        replay_sizes: padded rows of the replay graphs; empty when every replay batch runs eagerly.
        trim_threshold: padded tokens from which on a PIECEWISE graph breaks for replay; None for never.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        query_len_decode: tokens of a decode request in a step.
        notes: what must be said aloud about this plan (P6), a sentence each.
    """

    window: int
    model_sizes: tuple[int, ...] = attrs.field(validator=_ascending)
    full_sizes: tuple[int, ...] = attrs.field(validator=_ascending)
    replay_sizes: tuple[int, ...] = attrs.field(validator=_ascending)
    trim_threshold: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    query_len_decode: int = 1
    notes: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in ("window", "max_num_seqs", "max_num_batched_tokens", "query_len_decode"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; it must be at least 1")

    @property
    def largest_size(self) -> int:
        """The largest size of any graph, 0 without graphs."""
        return max((*self.model_sizes, *self.full_sizes, *self.replay_sizes), default=0)

    @property
    def breaking_sizes(self) -> tuple[int, ...]:
        """The PIECEWISE sizes whose graphs break for the replay layers (L4)."""
        if self.trim_threshold is None:
            return ()
        return tuple(size for size in self.model_sizes if size >= self.trim_threshold)


def make_plan(config: ServingConfig) -> CapturePlan:
    """Return the plan that `config` asks for; the config stays as it was (P4).

    Raises:
        ConfigError: sizes above the token budget (P3), a threshold not above the window (P5).
    """
    threshold = trim_threshold(config)
    model_sizes, model_notes = model_capture_sizes(config)
    replay_sizes, replay_notes = replay_capture_sizes(config)
    plan = CapturePlan(
        window=config.window,
        model_sizes=model_sizes,
        full_sizes=full_capture_sizes(config),
        replay_sizes=replay_sizes,
        trim_threshold=threshold,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        query_len_decode=config.query_len_decode,
    )
    return attrs.evolve(plan, notes=(*replay_notes, *model_notes, *_reach_notes(plan)))


def _reach_notes(plan: CapturePlan) -> list[str]:
    """Say what no batch can select (P6), and what is mostly padding (P7)."""
    notes = []
    if plan.model_sizes and plan.trim_threshold is not None and not plan.breaking_sizes:
        notes.append(
            f"no model graph breaks for replay: the largest, {plan.model_sizes[-1]}, is below "
            f"decoder_replay_trim_threshold {plan.trim_threshold}"
        )
    reachable = reachable_rows(plan)
    if not reachable:
        notes.append("no step has a replay batch: none is large enough to trim")
        return notes
    unreachable = unreachable_sizes(plan)
    below = [size for size in unreachable if size < reachable[0][0]]
    beyond = [size for size in unreachable if size > reachable[0][0]]
    if below:
        notes.append(
            f"replay sizes {listed(below)} are unreachable: the smallest replay batch has {reachable[0][0]} rows"
        )
    if beyond:
        notes.append(f"replay sizes {listed(beyond)} are unreachable: no replay batch has that many rows")
    notes += [
        f"replay size {size} runs {low} to {high} rows on more pads than rows, which eager layers may outrun: add a "
        f"size from {high} to {size - 1}"
        for size, low, high in mostly_padding(plan)
    ]
    return notes
