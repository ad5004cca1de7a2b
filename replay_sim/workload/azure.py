"""Reader for the CSV of the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens."""

from collections.abc import Iterator
from datetime import UTC, datetime

from replay_sim.workload.lines import MAX_REQUESTS, Path, check_count, collect, read_columns
from replay_sim.workload.trace import MAX_ARRIVAL_S, TraceError, TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, max_requests: int = MAX_REQUESTS) -> tuple[TraceRequest, ...]:
    """The requests of an Azure trace, arrivals in seconds after the first; all of them or a TraceError."""
    return collect(path, _requests(path), max_requests)


def _requests(path: Path) -> Iterator[tuple[int, TraceRequest]]:
    """Each request with its line number."""
    first: datetime | None = None
    for index, (number, (stamp, prompt, output)) in enumerate(read_columns(path, COLUMNS)):
        time = _time(path, number, stamp)
        first = first or time
        arrival = (time - first).total_seconds()
        if not 0 <= arrival <= MAX_ARRIVAL_S:
            expected = f"a time at or after the first, {first}, by at most {MAX_ARRIVAL_S:g} s"
            raise TraceError(path, number, COLUMNS[0], expected, stamp)
        prompt_tokens = check_count(path, number, COLUMNS[1], prompt, 1)
        output_tokens = check_count(path, number, COLUMNS[2], output, 0)
        yield number, TraceRequest(arrival, prompt_tokens, output_tokens, str(index))


def _time(path: Path, number: int, stamp: str) -> datetime:
    """A time stamp to the microsecond, UTC unless it says otherwise."""
    try:
        time = datetime.fromisoformat(stamp)
    except ValueError as error:
        raise TraceError(path, number, COLUMNS[0], "a time as 2023-11-16 18:15:46.680", stamp) from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)
