"""Reader for a plain CSV of prompt and output lengths, under the column names that benchmarks use."""

from collections.abc import Iterator, Sequence

from replay_sim.workload.lines import (
    MAX_REQUESTS,
    Path,
    check_count,
    collect,
    csv_fields,
    read_columns,
    read_lines,
)
from replay_sim.workload.trace import TraceError, TraceRequest

PROMPT_COLUMNS = (
    "prompt_tokens",
    "prompt_len",
    "num_prefill_tokens",
    "input_tokens",
    "input_length",
    "input_len",
)
OUTPUT_COLUMNS = ("output_tokens", "output_len", "num_decode_tokens", "output_length")


def read_lengths(path: Path, max_requests: int = MAX_REQUESTS) -> tuple[TraceRequest, ...]:
    """The requests of a CSV of lengths, all arriving at 0 s; all of them or a TraceError."""
    return collect(path, _requests(path), max_requests)


def length_columns(header: Sequence[str]) -> tuple[str, str] | None:
    """The names of the prompt's and the output's column in the header, or None if one is missing."""
    prompt = next((name for name in PROMPT_COLUMNS if name in header), None)
    output = next((name for name in OUTPUT_COLUMNS if name in header), None)
    return (prompt, output) if prompt and output else None


def _check_meanings(path: Path, number: int, header: Sequence[str], text: str) -> None:
    """Raise TraceError for two columns of the same meaning: either may be the one that counts."""
    for meant, names in (("prompt", PROMPT_COLUMNS), ("output", OUTPUT_COLUMNS)):
        given = [name for name in header if name in names]
        if len(set(given)) > 1:
            raise TraceError(path, number, "header", f"one column of {meant} lengths, not {' and '.join(given)}", text)


def _requests(path: Path) -> Iterator[tuple[int, TraceRequest]]:
    """Each request with its line number."""
    number, text = next(read_lines(path), (1, ""))
    header = csv_fields(path, number, text) if text else []
    columns = length_columns(header)
    if columns is None:
        expected = f"one of {', '.join(PROMPT_COLUMNS)} and one of {', '.join(OUTPUT_COLUMNS)}"
        raise TraceError(path, number, "header", expected, text)
    _check_meanings(path, number, header, text)
    for index, (number, (prompt, output)) in enumerate(read_columns(path, columns)):
        prompt_tokens = check_count(path, number, columns[0], prompt, 1)
        output_tokens = check_count(path, number, columns[1], output, 0)
        yield number, TraceRequest(0.0, prompt_tokens, output_tokens, str(index))
