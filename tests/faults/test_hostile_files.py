"""Files from outside, cut, spliced and filled with what breaks parsers: each is read, or refused with one line."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from replay_sim.capture.allocator_trace import Trace, write_trace
from replay_sim.capture.allocator_trace import read_trace as read_allocator_trace
from replay_sim.config.loading import load_config
from replay_sim.measure.records import Record, read_record
from replay_sim.workload.detect import read_trace
from replay_sim.workload.statistics_table import read_statistics

SPLICED = (
    *(b"", b"\0", b"\xff\xfe", b"\r", b"\n", b'"', b"'", b",", b"|", b"{}", b"[]", b"null", b"true", b"\\u0000"),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"-0", b"0.5", b"1_000", b"1000000000", b"9" * 400, b"1e-400", b"0x10"),
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b"../../etc/passwd",
        b"$(id)",
        b"<script>",
        b"__import__('os')",
        b"%s%n",
        b"\x1b[2J",
    ),
)
RECORD = Record(
    kind="pool",
    environment=dict.fromkeys(("gpu", "driver", "torch", "triton", "date", "replay_sim"), "1"),
    command="replay-sim measure --suite pool --out records",
    seed=3,
    settings={"subject": "default", "window": 128},
    points=[
        {"arrangement": "shared", "order": "largest_first", "group": "replay"}
        | {"reserved_bytes": 0, "predicted_bytes": None}
    ],
)
REQUEST = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}
TABLE = (
    "**CUDAGraph Stats:**",
    "",
    "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |",
    "|-----------------|---------------|--------------|--------------|-------|",
    "| 1 | 1 | 0 | FULL | 300 |",
    "| 70 | 72 | 2 | PIECEWISE | 4 |",
)
READERS: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "config.json": (load_config, json.dumps({"window": 64, "cudagraph_capture_sizes": [1, 2, 8]}).encode()),
    "record.json": (read_record, json.dumps(attrs.asdict(RECORD)).encode()),
    "azure.csv": (read_trace, b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" * 1),
    "lengths.csv": (read_trace, b"prompt_tokens,output_tokens\n3772,54\n1,0\n"),
    "mooncake.jsonl": (read_trace, (json.dumps(REQUEST) + "\n").encode() * 2),
    "server.log": (read_statistics, "\n".join(TABLE).encode()),
    "trace.jsonl": (read_allocator_trace, b""),
}


def whole(name: str, folder: Path) -> bytes:
    """A file that its reader takes."""
    if name == "trace.jsonl":
        write_trace(Trace((), ()), folder / name)
        return (folder / name).read_bytes()
    return READERS[name][1]


def spoiled(content: bytes, rng: random.Random) -> bytes:
    """One to three places replaced, or the file cut."""
    for _ in range(rng.randint(1, 3)):
        begin = rng.randrange(len(content) + 1)
        end = min(len(content), begin + rng.choice((0, 0, 1, 2, 5, 30)))
        content = content[:begin] + rng.choice(SPLICED) * rng.choice((1, 1, 1, 40)) + content[end:]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.2 else content


@pytest.mark.parametrize("name", READERS)
def test_a_whole_file_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(whole(name, tmp_path))
    READERS[name][0](path)


@pytest.mark.parametrize("name", READERS)
def test_a_spoiled_file_is_read_or_refused_with_one_line_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Issue 8: the command line prints a ValueError as one line and exits with 2; all else would show a traceback."""
    read, content, path = READERS[name][0], whole(name, tmp_path), tmp_path / name
    refused, rng = 0, random.Random(8)
    for _ in range(300):
        path.write_bytes(spoiled(content, rng))
        try:
            read(path)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert name in message and len(message.splitlines()) == 1 and len(message) < 1000, path.read_bytes()[:200]
            assert message.isprintable(), message
    assert refused >= 100
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
