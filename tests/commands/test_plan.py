"""`replay-sim plan`: what it prints."""

import json

import pytest
from click.testing import CliRunner

from replay_sim.commands.plan import command
from replay_sim.config import preset_names

PROMISED = {
    "decoder_replay_cudagraph_capture_sizes",
    "num_replay_graphs",
    "static_buffer_bytes",
    "unreachable_sizes",
    "mean_padding",
    "worst_padding",
}


def output(*args: str) -> str:
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", preset_names())
def test_json_is_one_object_with_the_promised_keys(name: str) -> None:
    """P7."""
    summary = json.loads(output(name, "--json"))
    assert set(summary) >= PROMISED
    assert summary["num_replay_graphs"] == len(summary["decoder_replay_cudagraph_capture_sizes"])
    assert 0 <= summary["mean_padding"] <= summary["worst_padding"] < 1
    assert set(summary["unreachable_sizes"]) <= set(summary["decoder_replay_cudagraph_capture_sizes"])


def test_the_published_server_gets_its_one_replay_graph() -> None:
    """P2: the log of a running server counted one graph."""
    assert json.loads(output("h100-tp8-log", "--json"))["decoder_replay_cudagraph_capture_sizes"] == [128]


def test_the_table_says_sizes_bytes_and_notes() -> None:
    """P6, P7: a table for people, and aloud what no batch can select."""
    table = output("b200-tp4-c32")
    assert "decoder_replay_cudagraph_capture_sizes" in table
    assert "210,157,568 (200.4 MiB)" in table
    assert "128 to 8191" in table
    assert "note: replay sizes 6, 12, 18, 24, 30, 36, 48, 60, 72, 96, 120 are unreachable" in table


def test_an_empty_plan_prints_its_reason() -> None:
    """U7."""
    table = output("h200-tp4-c8")
    assert "note: no replay graphs: the bound 64" in table


@pytest.mark.parametrize("option", [("--order", "smallest_first"), ("--hold-outputs",)])
def test_what_only_a_prediction_of_memory_looks_at_is_refused_without_one(option: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"{option[0][2:].replace('-', '_')} is .*: it needs memory"):
        CliRunner().invoke(command, ("default", *option), catch_exceptions=False)


def test_the_shape_decides_the_bytes() -> None:
    """P7: 64 hidden, four streams, float32."""
    summary = json.loads(output("default", "--json", "--shape", "tiny"))
    assert summary["static_buffer_bytes"] == 2048 * (5 * 64 * 4 + 8 + 4 + 4 * (4 + 4 + 16))
