"""The table of a sweep as a file, and the best design in it, counted by hand."""

from pathlib import Path

import pandas as pd
import pytest
from explore.sweep_cases import FAILED, POINTS, WORKLOAD

from replay_sim.explore.sweep_best import (
    MIB,
    at_the_edge,
    best_row,
    neighbours,
    pareto,
    ran,
    varied,
    with_knobs_of,
    within,
)
from replay_sim.explore.sweep_rows import COLUMNS, Row, run_group
from replay_sim.explore.sweep_table import read_table, table_of, write_table

SECONDS = {
    ("default", 64, 8): 10.0,
    ("default", 64, 16): 8.0,
    ("default", 128, 8): 12.0,
    ("default", 128, 16): 8.05,
    ("default", 256, 8): 15.0,
    ("default", 256, 16): 9.0,
    ("eager", 64, 8): 11.0,
    ("eager", 64, 16): None,
    ("eager", 128, 8): 13.0,
    ("eager", 128, 16): 8.08,
    ("eager", 256, 8): 16.0,
    ("eager", 256, 16): 9.5,
}
"""Seconds of the workload by plan, window and max_num_seqs; None failed."""


def by_hand() -> pd.DataFrame:
    rows: list[Row] = []
    for (plan, window, seqs), seconds in SECONDS.items():
        row: Row = dict.fromkeys(COLUMNS) | {"point": len(rows), "config": "c", "workload": "w", "plan": plan}
        row |= {"window": window, "max_num_seqs": seqs, "error": "" if seconds else "refused"}
        row |= {"static_buffer_bytes": window * seqs * MIB if plan == "default" else 0, "break_buffer_bytes": MIB}
        row |= {
            "workload_s": seconds,
            "expected_step_ms": seconds,
            "speedup": 10 / (seconds or 1),
            "num_replay_graphs": 0,
        }
        row["extrapolated_share"] = 0.25
        rows.append(row)
    return table_of(rows)


@pytest.mark.parametrize("name", ["out.csv", "out.json"])
def test_a_file_gives_the_very_table_back(tmp_path: Path, name: str) -> None:
    """To the last digit, in the engine's names; a point that failed has its reason and nothing else."""
    rows = run_group(POINTS, WORKLOAD)
    path = tmp_path / "made" / name
    write_table(path, rows)
    read, made = read_table(path), table_of(rows)
    assert tuple(read.columns) == COLUMNS and len(read) == len(POINTS)
    pd.testing.assert_frame_equal(read, made, check_exact=True)
    assert (read["error"] != "").tolist() == [point.index in FAILED for point in POINTS]


def test_only_the_two_forms_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out: .*table.txt' is not allowed; it must end in .csv or .json"):
        write_table(tmp_path / "table.txt", [])


def test_the_best_has_least_time_and_its_neighbours_are_a_step_away() -> None:
    table = by_hand()
    best = best_row(table[table["window"] == 128])
    assert (best["plan"], best["window"], best["max_num_seqs"]) == ("default", 128, 16)
    assert varied(table) == ["window", "max_num_seqs", "plan"]
    assert at_the_edge(table, best) == ["max_num_seqs"]
    near = neighbours(table, best)
    assert list(zip(near["knob"], near["value"], strict=True)) == [
        ("window", 64),
        ("window", 256),
        ("max_num_seqs", 8),
        ("plan", "eager"),
    ]
    assert near["time against best"].tolist() == pytest.approx(
        [8 / 8.05 - 1, 9 / 8.05 - 1, 12 / 8.05 - 1, 8.08 / 8.05 - 1]
    )


def test_a_knob_at_its_end_and_a_failed_point_give_no_neighbour() -> None:
    table = by_hand()
    best = best_row(table)
    assert (best["plan"], best["window"], best["max_num_seqs"]) == ("default", 64, 16)
    near = neighbours(table, best)
    assert near["knob"].tolist() == ["window", "max_num_seqs"] and near["value"].tolist() == [128, 8]
    assert len(with_knobs_of(table, best, ["plan"])) == 2


def test_how_sharp_the_optimum_is_and_what_less_memory_costs() -> None:
    table = by_hand()
    best = best_row(table)
    assert within(table, best, 0.01)["workload_s"].tolist() == [8.0, 8.05, 8.08]
    assert len(ran(table)) == len(SECONDS) - 1
    front = pareto(table)
    assert front["workload_s"].tolist() == [8.08, 8.0]
    assert front["buffer_mib"].tolist() == [1.0, 64 * 16 + 1.0]


def test_ties_go_to_fewer_graphs_then_to_less_memory() -> None:
    table = by_hand()
    table["workload_s"] = 7.0
    table["num_replay_graphs"] = [1] * 6 + [0, 0, 0, 0, 0, 1]
    best = best_row(table)
    assert (best["plan"], best["window"], best["max_num_seqs"]) == ("eager", 64, 8)


def test_a_table_of_failures_alone_has_no_best() -> None:
    table = by_hand()
    with pytest.raises(ValueError, match="no point of the table ran"):
        best_row(table[table["error"] != ""])
