"""The measurement of row movement: what it moves, and the bytes and limits that it states."""

import attrs
import numpy as np
import pytest
import torch

from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.measure import row_movement
from replay_sim.measure.records import REQUIRED_POINT_KEYS
from replay_sim.measure.row_movement import INPUT_SETS, measure_movement
from replay_sim.replay.movement import gather_into, scatter_into

ROWS, TOKENS = (3, 8), 40
HIDDEN, STREAMS = TINY.hidden_size, TINY.hc_mult
IN_BYTES = 4 * (HIDDEN + STREAMS * HIDDEN + STREAMS + STREAMS + STREAMS**2) + 8 + 4
OUT_BYTES = 4 * (STREAMS * HIDDEN + STREAMS + len(TINY.late_aux_layers) * HIDDEN)


@pytest.fixture
def moved(monkeypatch) -> list[tuple]:
    """The arguments of every movement: operation, row index, sources, targets."""
    calls: list[tuple] = []

    def gather(index, inputs, buffers, padded) -> None:
        calls.append(("gather", index, tuple(inputs.values()), tuple(buffers.values())))
        gather_into(index, inputs, buffers, padded)

    def scatter(index, outputs, targets) -> None:
        calls.append(("scatter", index, tuple(outputs), tuple(targets)))
        scatter_into(index, outputs, targets)

    monkeypatch.setattr(row_movement, "ROWS", ROWS)
    monkeypatch.setattr(row_movement, "_copy_bandwidth", lambda device: 2e9)
    monkeypatch.setattr(row_movement, "gather_into", gather)
    monkeypatch.setattr(row_movement, "scatter_into", scatter)
    return calls


@pytest.fixture
def measured(moved) -> tuple[list[dict], dict, str]:
    return measure_movement(TINY, HostBackend(), seed=3, tokens=TOKENS)


def test_there_is_a_point_for_each_operation_and_number_of_rows(measured) -> None:
    points, _, table = measured
    assert [(point["op"], point["rows"]) for point in points] == [
        (op, rows) for rows in ROWS for op in ("gather", "scatter")
    ]
    for point in points:
        assert point.keys() >= REQUIRED_POINT_KEYS["movement"]
        assert (point["tokens"], point["hidden_size"], point["arm"]) == (TOKENS, HIDDEN, "reference")
        assert 0 < point["p10"] <= point["device_us"] <= point["p90"]
    assert table.count("\n") == 1 + len(points)


def test_bytes_are_what_must_move_and_the_limit_is_them_over_the_bandwidth(measured) -> None:
    """A gather reads and writes the kept rows, a scatter reads them and writes every row of the step."""
    points, settings, _ = measured
    for point in points:
        rows = point["rows"]
        expected = 2 * rows * IN_BYTES if point["op"] == "gather" else (rows + TOKENS) * OUT_BYTES
        assert point["bytes"] == expected
        assert point["limit_us"] == pytest.approx(expected / 2e9 * 1e6, abs=0.01)
    assert settings == {"copy_bandwidth_gbps": 2.0, "input_sets": INPUT_SETS}


def test_rows_are_drawn_ascending_and_values_are_never_all_zero(measured, moved) -> None:
    """S2, H6."""
    for _, index, sources, _ in moved:
        assert index.dtype == torch.int64 and len(index) in ROWS
        assert (np.diff(index.numpy()) > 0).all() and 0 <= index[0] and index[-1] < TOKENS
        assert all(source.count_nonzero() > source.numel() // 2 for source in sources)


def test_turns_take_other_inputs_and_what_they_write_is_the_movement(measured, moved) -> None:
    """B2, L6: consecutive calls of an operation read different sets; the last result stands in the targets."""
    for op in ("gather", "scatter"):
        calls = [call for call in moved if call[0] == op and len(call[1]) == ROWS[0]]
        sets = [call[2][0].data_ptr() for call in calls]
        assert len(set(sets)) == INPUT_SETS
        assert all(first != second for first, second in zip(sets, sets[1:], strict=False))
        _, index, sources, targets = calls[-1]
        for source, target in zip(sources, targets, strict=True):
            if op == "gather":
                assert torch.equal(target, source[index])
            else:
                expected = torch.zeros_like(target)
                expected[index] = source
                assert torch.equal(target, expected)


def test_the_same_seed_draws_the_same_rows_and_another_seed_others(moved) -> None:
    drawn = []
    for seed in (1, 1, 2):
        moved.clear()
        measure_movement(TINY, HostBackend(), seed=seed, tokens=TOKENS)
        drawn.append([index.tolist() for _, index, _, _ in moved])
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_copy_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch) -> None:
    timed = attrs.make_class("Timing", ["device_us"])(device_us=500.0)
    monkeypatch.setattr(row_movement, "time_arms", lambda arms, *_, **__: {name: timed for name in arms})
    assert row_movement._copy_bandwidth(torch.device("cpu")) == pytest.approx(2 * (1 << 26) / 500e-6)
