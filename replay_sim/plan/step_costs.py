"""What a tuner asks of a step-time model: the two parts of a step's time, by padded size."""

from typing import Protocol


class StepCosts(Protocol):
    """Microseconds of a step as the sum of two parts, so that sizes can be chosen for each (P8).

    `source` says in words where the figures come from and how far off they are; `error` is the median relative error on
    steps that were held out, None if none were.
    """

    @property
    def source(self) -> str:
        """Where the figures come from: measured or modelled, on what, with what error."""

    @property
    def error(self) -> float | None:
        """Median relative error on steps that the figures were not made of, as a share of 1."""

    def model_us(self, padded_tokens: int, mode: str, breaks: bool) -> float:
        """Microseconds of a step of `padded_tokens` in `mode`, NONE, PIECEWISE or FULL.

        With `breaks` the step has a replay batch, and this is all but the replay layers; else all layers run on
        all tokens.
        """

    def replay_us(self, padded_rows: int, graph: bool) -> float:
        """Microseconds of the replay layers on `padded_rows` rows, in a graph of that size or eagerly."""
