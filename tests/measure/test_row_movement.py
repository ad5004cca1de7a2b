"""The measurement of row movement: what it moves, and the bytes and limits that it states."""

from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch

from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.measure import row_movement
from replay_sim.measure.records import REQUIRED_POINT_KEYS
from replay_sim.measure.row_movement import ARMS, OPS, SOURCES, Movement, measure_movement, movement_notes
from replay_sim.measure.timing import Timing

ROWS, TOKENS, SETS = (3, 8), 40, 4
HIDDEN, STREAMS = TINY.hidden_size, TINY.hc_mult
IN_BYTES = 4 * (HIDDEN + STREAMS * HIDDEN + STREAMS + STREAMS + STREAMS**2) + 8 + 4
OUT_BYTES = 4 * (STREAMS * HIDDEN + STREAMS)
CASES = [(op, arm, in_graph) for op in OPS for arm in ARMS for in_graph in (False, True)]


@pytest.fixture
def drawn(monkeypatch) -> list[Movement]:
    """Every Movement that is measured; time_arms calls each arm once for every set and gives made-up times."""
    made: list[Movement] = []
    draw = row_movement._draw

    def kept(*arguments) -> Movement:
        made.append(draw(*arguments))
        return made[-1]

    def time_arms(arms: dict[str, Callable], device, **_) -> dict[str, Timing]:
        for turn in range(SETS):
            for arm in arms.values():
                arm(turn)
        return {name: Timing(48.0, 24.0, 12.0, 96.0, 20.0, 5) for name in arms}

    monkeypatch.setattr(row_movement, "ROWS", ROWS)
    monkeypatch.setattr(row_movement, "MOST_SETS", SETS)
    monkeypatch.setattr(row_movement, "_copy_bandwidth", lambda device: 2e9)
    monkeypatch.setattr(row_movement, "_draw", kept)
    monkeypatch.setattr(row_movement, "time_arms", time_arms)
    return made


@pytest.fixture
def measured(drawn) -> tuple[list[dict], dict, str]:
    return measure_movement(TINY, HostBackend(), seed=3, tokens=TOKENS)


def test_there_is_a_point_for_each_operation_arm_and_number_of_rows_eagerly_and_in_a_graph(measured) -> None:
    points, _, table = measured
    found = [(p["rows"], (p["op"], p["arm"], p["in_graph"])) for p in points]
    assert found == [(rows, case) for rows in ROWS for case in CASES]
    for point in points:
        assert point.keys() >= REQUIRED_POINT_KEYS["movement"] and point["n"] == 5
        assert (point["tokens"], point["hidden_size"]) == (TOKENS, HIDDEN)
    assert table.count("\n") == 1 + len(points)


def test_a_graph_holds_a_call_of_every_set_and_a_point_is_one_calls_share(measured, drawn) -> None:
    """A launch of a graph costs more than a small movement: many calls in one graph tell them apart."""
    assert [len(movement.indices) for movement in drawn] == [SETS] * len(ROWS)
    for point in measured[0]:
        share = SETS if point["in_graph"] else 1
        expected = {"device_us": 48 / share, "host_us": 24 / share, "p10": 12 / share, "p90": 96 / share}
        assert {key: point[key] for key in expected} == expected


def test_bytes_are_what_must_move_and_the_limit_is_them_over_the_bandwidth(measured, drawn) -> None:
    """A gather reads and writes the kept rows; a scatter too, and clears those of the set before beside its own."""
    points, settings, _ = measured
    cleared = {}
    for movement in drawn:
        sets = [index.tolist() for index in movement.indices]
        gone = [sum(row not in sets[k] for row in sets[k - 1]) for k in range(len(sets))]
        cleared[len(sets[0])] = sum(gone) / len(sets)
    for point in points:
        rows = point["rows"]
        expected = 2 * rows * IN_BYTES if point["op"] == "gather" else (2 * rows + cleared[rows]) * OUT_BYTES
        assert point["bytes"] == round(expected)
        assert point["limit_us"] == pytest.approx(expected / 2e9 * 1e6, abs=0.01)
    assert 0 < cleared[8] < 8 and (settings["copy_bandwidth_gbps"], settings["input_sets"]) == (2.0, SOURCES)


def test_a_note_splits_the_time_beyond_the_limit_in_what_grows_with_the_rows_and_what_does_not() -> None:
    """Issue 5, point 6: the figures are of the fused operation in a graph, at the two largest numbers of rows."""
    points = [
        {"op": op, "arm": arm, "in_graph": in_graph, "rows": rows, "device_us": time * scale, "limit_us": limit}
        for op in OPS
        for arm, in_graph, scale in (("reference", True, 9), ("fused", False, 5), ("fused", True, 1))
        for rows, time, limit in ((1, 40.0, 1.0), (10, 15.0, 10.0), (20, 26.0, 20.0))
    ]
    gather, scatter = movement_notes(points)
    assert gather.startswith("gather, 20 rows: 26.0 µs, 1.300 × the limit") and scatter.startswith("scatter, 20 rows")
    assert "1.100 × the limit and 4.0 µs that do not grow" in gather


def test_rows_are_drawn_ascending_a_set_differs_from_the_next_and_values_are_never_all_zero(measured, drawn) -> None:
    """S2, H6."""
    for movement in drawn:
        for index, place in zip(movement.indices, movement.places, strict=True):
            assert index.dtype == torch.int64 and (np.diff(index.numpy()) > 0).all()
            assert 0 <= index[0] and index[-1] < TOKENS
            assert place.tolist() == [index.tolist().index(row) if row in index else -1 for row in range(TOKENS)]
        assert all(not torch.equal(*pair) for pair in zip(movement.indices, movement.indices[1:], strict=False))
        moved = [
            *(t for source in movement.sources for t in source.values()),
            *(t for r in movement.results for t in r),
        ]
        assert all(tensor.count_nonzero() > tensor.numel() // 2 for tensor in moved)


def test_what_the_timed_calls_wrote_is_the_movement(measured, drawn) -> None:
    """B2, L6: the last calls were of the last set, by graphs that end with it."""
    for movement in drawn:
        last = SETS - 1
        index, source = movement.indices[last], movement.sources[last % SOURCES]
        for name, buffer in movement.buffers[last].tensors.items():
            assert torch.equal(buffer, source[name][index])
        for targets in (movement.targets, tuple(movement.break_buffers.tensors.values())):
            for target, result in zip(targets, movement.results[last], strict=True):
                expected = torch.zeros_like(target)
                expected[index] = result
                assert torch.equal(target, expected)


@pytest.mark.parametrize("wrong", ["gather_by_address", "gather_into", "scatter_into"])
def test_an_arm_that_moves_other_bits_is_refused_before_it_is_timed(drawn, monkeypatch, wrong: str) -> None:
    """Build, prove equal, then time; one that moves nothing too."""
    monkeypatch.setattr(row_movement, wrong, lambda *_: None)
    op = wrong.split("_")[0]
    with pytest.raises(RuntimeError, match=f"the fused {op} of 3 rows differs from the reference"):
        measure_movement(TINY, HostBackend(), seed=3, tokens=TOKENS)


def test_the_same_seed_draws_the_same_rows_and_another_seed_others(drawn) -> None:
    rows = []
    for seed in (1, 1, 2):
        drawn.clear()
        measure_movement(TINY, HostBackend(), seed=seed, tokens=TOKENS)
        rows.append([index.tolist() for movement in drawn for index in movement.indices])
    assert rows[0] == rows[1] != rows[2]


def test_the_copy_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch) -> None:
    timed = attrs.make_class("Timing", ["device_us"])(device_us=500.0)
    monkeypatch.setattr(row_movement, "time_arms", lambda arms, *_, **__: {name: timed for name in arms})
    assert row_movement._copy_bandwidth(torch.device("cpu")) == pytest.approx(2 * (1 << 26) / 500e-6)
