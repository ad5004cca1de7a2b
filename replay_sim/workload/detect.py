"""Reads a trace file in whichever known format its first line shows."""

from replay_sim.workload import azure
from replay_sim.workload.lengths import length_columns, read_lengths
from replay_sim.workload.lines import MAX_REQUESTS, Path, csv_fields, read_lines
from replay_sim.workload.mooncake import read_mooncake
from replay_sim.workload.statistics_table import has_statistics
from replay_sim.workload.trace import TraceError, TraceRequest

KNOWN = (
    f"the header {','.join(azure.COLUMNS)} of an Azure trace, a JSON object of a Mooncake trace, "
    "or a CSV header with prompt and output lengths such as prompt_tokens,output_tokens"
)
STATISTICS = (
    "a trace of requests, and not a table of CUDA-graph statistics, which holds none: `tune --statistics FILE` takes it"
)


def read_trace(path: Path, max_requests: int = MAX_REQUESTS) -> tuple[TraceRequest, ...]:
    """The requests in order of arrival; TraceError names the line, the field and what was expected."""
    number, text = next(read_lines(path), (1, ""))
    if text.lstrip().startswith("{"):
        return read_mooncake(path, max_requests)
    header = csv_fields(path, number, text) if text else []
    if set(azure.COLUMNS) <= set(header):
        return azure.read_azure(path, max_requests)
    if length_columns(header):
        return read_lengths(path, max_requests)
    if has_statistics(path):
        raise TraceError(path, number, "file", STATISTICS, text)
    raise TraceError(path, number, "header", KNOWN, text)
