"""Reader for the JSON lines of the Mooncake traces: timestamp (ms), input_length, output_length, hash_ids."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from replay_sim.workload.kv_blocks import blocks_for
from replay_sim.workload.lines import MAX_REQUESTS, Path, check_count, collect, read_lines
from replay_sim.workload.prefix_cache import PREFIX_BLOCK_SIZE
from replay_sim.workload.trace import MAX_ARRIVAL_S, TraceError, TraceRequest

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(path: Path, max_requests: int = MAX_REQUESTS) -> tuple[TraceRequest, ...]:
    """The requests of a Mooncake trace, arrivals in seconds after the first; all of them or a TraceError.

    hash_ids become prefix_hashes: one a block of 512 prompt tokens, equal where the prompts agree up to
    there.
    """
    return collect(path, _requests(path), max_requests)


def _requests(path: Path) -> Iterator[tuple[int, TraceRequest]]:
    """Each request with its line number."""
    first: float | None = None
    for index, (number, text) in enumerate(read_lines(path)):
        fields = _object(path, number, text)
        stamp = _milliseconds(path, number, fields["timestamp"])
        first = stamp if first is None else first
        arrival = (stamp - first) / 1000
        if not 0 <= arrival <= MAX_ARRIVAL_S:
            expected = f"a time at or after the first, {first} ms, by at most {MAX_ARRIVAL_S:g} s"
            raise TraceError(path, number, "timestamp", expected, stamp)
        prompt_tokens = check_count(path, number, "input_length", fields["input_length"], 1)
        output_tokens = check_count(path, number, "output_length", fields["output_length"], 0)
        hashes = _hashes(path, number, fields["hash_ids"], prompt_tokens)
        yield number, TraceRequest(arrival, prompt_tokens, output_tokens, str(index), hashes)


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    """The line as a JSON object that has all fields."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, number, "line", "a JSON object, each key once", text) from error
    if not isinstance(value, dict):
        raise TraceError(path, number, "line", "a JSON object", text)
    for field in FIELDS:
        if field not in value:
            raise TraceError(path, number, field, "this field in the object", text)
    return value


def _milliseconds(path: Path, number: int, value: object) -> float:
    """A time of at least 0 that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise TraceError(path, number, "timestamp", "milliseconds of at least 0", value)
    return value


def _hashes(path: Path, number: int, value: object, prompt_tokens: int) -> tuple[int, ...]:
    """A list of integers, one for each block of the prompt."""
    blocks = blocks_for(prompt_tokens, PREFIX_BLOCK_SIZE)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise TraceError(path, number, "hash_ids", "a list of integers", value)
    if len(value) != blocks:
        expected = f"{blocks} integers, one for each {PREFIX_BLOCK_SIZE} of {prompt_tokens} tokens"
        raise TraceError(path, number, "hash_ids", expected, f"{len(value)} of them")
    return tuple(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; ValueError for a key that is given twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is given twice")
    return fields
