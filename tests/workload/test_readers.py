"""Trace readers: the three formats, and what is refused with its line, field and expectation."""

import json
import os
from pathlib import Path

import pytest

from replay_sim.workload import lines
from replay_sim.workload.azure import read_azure
from replay_sim.workload.detect import read_trace
from replay_sim.workload.lengths import read_lengths
from replay_sim.workload.mooncake import read_mooncake
from replay_sim.workload.statistics_table import read_statistics
from replay_sim.workload.trace import TraceError, TraceRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
AZURE_ROWS = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
MOONCAKE = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}


def write(tmp_path, content):
    """A file with the text or bytes."""
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(tmp_path, content, **options):
    """The error of a file that is refused."""
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, content), **options)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def test_an_azure_trace_is_read(tmp_path):
    path = write(tmp_path, AZURE + AZURE_ROWS)
    expected = (
        TraceRequest(0.0, 374, 44, "0"),
        TraceRequest(4.314579, 396, 109, "1"),
    )
    assert read_trace(path) == read_azure(path) == expected


def test_azure_time_stamps_may_name_their_zone_and_columns_may_come_in_any_order(tmp_path):
    rows = ("1,2024-05-10 01:00:00.5+01:00,7", "2,2024-05-10 00:00:01+00:00,8")
    text = "\n".join(("GeneratedTokens,TIMESTAMP,ContextTokens", *rows))
    assert [(r.arrival_s, r.prompt_tokens) for r in read_trace(write(tmp_path, text))] == [(0.0, 7), (0.5, 8)]


def test_a_mooncake_trace_is_read_with_its_prefix_hashes(tmp_path):
    path = write(tmp_path, "\n".join(json.dumps(MOONCAKE | {"timestamp": time}) for time in (3000, 6500)))
    expected = (TraceRequest(0.0, 700, 5, "0", (0, 9)), TraceRequest(3.5, 700, 5, "1", (0, 9)))
    assert read_trace(path) == read_mooncake(path) == expected


@pytest.mark.parametrize("header", ["prompt_tokens,output_tokens", "num_prefill_tokens,num_decode_tokens"])
def test_a_csv_of_lengths_is_read_and_all_requests_arrive_at_once(tmp_path, header):
    path = write(tmp_path, f"\ufeffname,{header}\n\na,3772,54\n\nb, 1 ,0\n")
    expected = (TraceRequest(0.0, 3772, 54, "0"), TraceRequest(0.0, 1, 0, "1"))
    assert read_trace(path) == read_lengths(path) == expected


@pytest.mark.parametrize(
    ("content", "line", "field", "expected"),
    [
        ("prompt_tokens,output_tokens,prompt_tokens\n1,2,3\n", 1, "header", "one column prompt_tokens"),
        (AZURE.replace("\r", ",ContextTokens\r") + AZURE_ROWS, 1, "header", "one column ContextTokens"),
        (
            "prompt_tokens,output_tokens,output_len\n1,2,x\n",
            1,
            "header",
            "output lengths, not output_tokens and output_len",
        ),
        ("input_len,prompt_len,output_len\n1,2,3\n", 1, "header", "prompt lengths, not input_len and prompt_len"),
        ("", 1, "header", "TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a,b\n1,2\n", 1, "header", "prompt_tokens,output_tokens"),
        ("prompt_tokens,b\n1,2\n", 1, "header", "prompt_tokens,output_tokens"),
        (AZURE, 1, "file", "at least one request"),
        (AZURE + "2023-11-16 18:15:46,374\n", 2, "line", "3 fields"),
        (AZURE + "yesterday,374,4\n", 2, "TIMESTAMP", "a time as"),
        (AZURE + AZURE_ROWS + "\n2023-11-16 18:15:47,1,1\n", 4, "arrival", "at or after 4.314579 s"),
        (AZURE + AZURE_ROWS + "\n2023-11-16 18:15:40,1,1\n", 4, "TIMESTAMP", "at or after the first"),
        (AZURE + AZURE_ROWS + "\n2023-11-16 18:16:47,0,1\n", 4, "ContextTokens", "integer from 1 to"),
        (AZURE + "2023-11-16 18:15:46,374,-4\n", 2, "GeneratedTokens", "integer from 0 to"),
        (AZURE + "2023-11-16 18:15:46,374,4.5\n", 2, "GeneratedTokens", "integer from 0 to"),
        (AZURE + "2023-11-16 18:15:46,374,\u0664\n", 2, "GeneratedTokens", "integer from 0 to"),
        (AZURE + "2023-11-16 18:15:46,99999999999999999999,4\n", 2, "ContextTokens", "integer from 1 to"),
        (AZURE + '"2023-11-16 18:15:46,374,4\n', 2, "line", "comma-separated"),
        (AZURE.encode() + b"2023-11-16 18:15:46,\xff,4\n", 2, "line", "UTF-8"),
        (AZURE + AZURE_ROWS + "\n9023-11-16 18:15:46,1,1\n", 4, "TIMESTAMP", "by at most 1e+09 s"),
        (json.dumps(MOONCAKE) + "\n" + json.dumps(MOONCAKE | {"timestamp": 1e300}), 2, "timestamp", "at most 1e+09 s"),
        ("prompt_tokens,output_tokens\n5,x\n", 2, "output_tokens", "integer from 0 to"),
        ("prompt_tokens,output_tokens\n5,6\n5,6,7\n", 3, "line", "2 fields"),
        ('{"timestamp": 1', 1, "line", "a JSON object"),
        ("{}", 1, "timestamp", "this field"),
        (json.dumps(MOONCAKE) + "\n[]", 2, "line", "a JSON object"),
        (json.dumps(MOONCAKE) + "\n" + "[" * 100_000, 2, "line", "a JSON object"),
        (json.dumps(MOONCAKE | {"timestamp": "now"}), 1, "timestamp", "milliseconds"),
        (json.dumps(MOONCAKE | {"timestamp": float("nan")}), 1, "timestamp", "milliseconds"),
        (json.dumps(MOONCAKE | {"timestamp": 10**400}), 1, "timestamp", "milliseconds"),
        (json.dumps(MOONCAKE | {"input_length": True}), 1, "input_length", "integer from 1"),
        (json.dumps(MOONCAKE | {"output_length": 5.0}), 1, "output_length", "integer from 0"),
        (json.dumps(MOONCAKE)[:-1] + ', "input_length": 9}', 1, "line", "each key once"),
        (json.dumps(MOONCAKE | {"hash_ids": [1]}), 1, "hash_ids", "2 integers, one for each 512 of 700 tokens"),
        (json.dumps(MOONCAKE | {"hash_ids": []}), 1, "hash_ids", "2 integers"),
        (json.dumps(MOONCAKE | {"input_length": 1024, "hash_ids": [1, 2, 3]}), 1, "hash_ids", "2 integers"),
        (json.dumps(MOONCAKE | {"hash_ids": 3}), 1, "hash_ids", "a list of integers"),
        (json.dumps(MOONCAKE | {"hash_ids": [1, "a"]}), 1, "hash_ids", "a list of integers"),
        (json.dumps(MOONCAKE) + "\n" + json.dumps(MOONCAKE | {"timestamp": 1}), 2, "timestamp", "the first"),
    ],
)
def test_a_bad_file_is_refused_by_line_field_and_expectation(tmp_path, content, line, field, expected):
    error = refusal(tmp_path, content)
    assert (error.line, error.field) == (line, field)
    assert expected in error.expected
    assert f"line {line}, {field}: expected " in str(error)


def test_nothing_is_unbounded(tmp_path, monkeypatch):
    """Lines and requests have limits; what is shown of a bad value is short."""
    assert refusal(tmp_path, AZURE + AZURE_ROWS, max_requests=1).expected == "at most 1 requests"
    assert len(str(refusal(tmp_path, "x" * 5000))) < 600
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 50)
    error = refusal(tmp_path, AZURE + AZURE_ROWS + ", " + "9" * 50)
    assert (error.line, error.expected) == (3, "at most 50 bytes")
    monkeypatch.setattr(lines, "MAX_LINES", 5)
    error = refusal(tmp_path, "prompt_tokens,output_tokens\n" + "\n \n" * 2 + "1,1\n")
    assert (error.line, error.expected) == (6, "at most 5 lines")
    monkeypatch.setattr(lines, "MAX_FILE_BYTES", 3)
    assert (refusal(tmp_path, "{}\n\n").expected, refusal(tmp_path, "{}\n").field) == ("at most 3 bytes", "timestamp")


def test_a_file_that_cannot_be_opened_is_refused_alike(tmp_path):
    with pytest.raises(TraceError, match="expected a readable file, found 'No such file or directory'"):
        read_trace(tmp_path / "absent")


def as_pipe(path):
    os.mkfifo(path)


def as_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(("make", "found"), [(as_pipe, "a pipe"), (as_device, "a device"), (Path.mkdir, "a folder")])
@pytest.mark.parametrize("read", [read_trace, read_azure, read_lengths, read_mooncake, read_statistics])
def test_what_is_no_regular_file_is_refused_without_opening_it(tmp_path, make, found, read):
    """A pipe that nobody writes to would be waited for, and one from a shell gives its lines but once."""
    make(tmp_path / "trace")
    with pytest.raises(TraceError, match=f"trace: line 1, file: expected a regular file, found '.*{found}"):
        read(tmp_path / "trace")


def test_the_most_requests_that_are_documented_fit_into_the_bounds_of_a_file():
    """A header, a line each and as many blank ones; a request of the published Mooncake trace is 252 bytes."""
    assert lines.MAX_LINES > 2 * 2_000_000 and lines.MAX_FILE_BYTES >= 1000 * 2_000_000 == 1000 * lines.MAX_REQUESTS


def test_the_readers_name_a_missing_column(tmp_path):
    path = write(tmp_path, "TIMESTAMP,ContextTokens\n1,2\n")
    with pytest.raises(TraceError, match="line 1, header: expected a column GeneratedTokens"):
        read_azure(path)
    with pytest.raises(TraceError, match="expected one of prompt_tokens"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrival_s": -1.0}, "arrival_s is -1.0"),
        ({"arrival_s": 1e300}, "arrival_s is 1e.300: it must be from 0 to 1e.09 s"),
        ({"arrival_s": float("nan")}, "arrival_s is nan"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0: it must be at least 1"),
        ({"output_tokens": -1}, "output_tokens is -1: it must be at least 0"),
    ],
)
def test_a_bad_request_names_the_field_and_the_value(fields, message):
    with pytest.raises(ValueError, match=message):
        TraceRequest(**({"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1, "request_id": ""} | fields))


def test_the_published_traces_are_read_whole(shared):
    traces = shared / "data/traces"
    assert len(read_trace(traces / "AzureLLMInferenceTrace_conv.csv")) == 19_366
    assert len(read_trace(traces / "mooncake_conversation_trace.jsonl")) == 12_031
    assert len(read_trace(traces / "vidur_arxiv_summarization_lengths.csv")) == 28_257
