"""One request of a workload, and the error of a trace file that cannot be read as such requests."""

import os

import attrs

from replay_sim.config.errors import shown

MAX_ARRIVAL_S = 1e9
"""The latest arrival: far beyond it a step's time is lost in the rounding of virtual time."""


class TraceError(ValueError):
    """A trace file that is refused as a whole: the line, the field, what was expected and what was found."""

    def __init__(self, path: str | os.PathLike[str], line: int, field: str, expected: str, found: object) -> None:
        super().__init__(f"{os.fspath(path)}: line {line}, {field}: expected {expected}, found {shown(found)}")
        self.line = line
        self.field = field
        self.expected = expected


@attrs.frozen
class TraceRequest:
    """A request as it reaches the server.

    arrival_s: seconds after the trace's first request. prompt_tokens: at least 1. output_tokens: tokens
    sampled for it; 0 ends it with its prefill. prefix_hashes: one a block of the prompt, equal where prompts
    share a prefix. ValueError names the field that is out of range.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    request_id: str
    prefix_hashes: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.arrival_s <= MAX_ARRIVAL_S:
            raise ValueError(f"arrival_s is {self.arrival_s}: it must be from 0 to {MAX_ARRIVAL_S:g} s")
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}: it must be at least 1")
        if self.output_tokens < 0:
            raise ValueError(f"output_tokens is {self.output_tokens}: it must be at least 0")
