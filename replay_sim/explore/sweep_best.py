"""The best design of a sweep's table, its neighbours on the grid, and how sharp the optimum is."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from replay_sim.explore.sweep_rows import KNOBS

TIME = "workload_s"
"""What the best has least of: all designs run the same requests, in steps of different number and length."""
MIB = 1 << 20


def ran(table: pd.DataFrame) -> pd.DataFrame:
    """The points that did not fail, with `buffer_mib`: MiB of static and break buffers; ValueError if all failed."""
    good = table[table["error"] == ""].copy()
    if good.empty:
        raise ValueError("no point of the table ran: every one has an error")
    good["buffer_mib"] = (good["static_buffer_bytes"] + good["break_buffer_bytes"]).astype(float) / MIB
    return good


def best_row(table: pd.DataFrame) -> pd.Series:
    """The point of least TIME; of those alike the one of fewest graphs and least memory. ValueError if all failed."""
    good = ran(table)
    order = [TIME, "num_replay_graphs", "buffer_mib", "point"]
    return good.sort_values(order).iloc[0]


def varied(table: pd.DataFrame) -> list[str]:
    """The knobs of which the table has several values, the workload apart: it is given, not chosen."""
    return [name for name in KNOBS if name != "workload" and table[name].nunique(dropna=False) > 1]


def at_the_edge(table: pd.DataFrame, best: pd.Series) -> list[str]:
    """The knobs of numbers whose value in `best` is the least or the most of the grid: a wider one may be better."""
    numbers = [name for name in varied(table) if not isinstance(best[name], str)]
    return [name for name in numbers if best[name] in (table[name].min(), table[name].max())]


def with_knobs_of(table: pd.DataFrame, row: pd.Series, free: Iterable[str] = ()) -> pd.DataFrame:
    """The rows whose knobs are those of `row`, but for those that are free."""
    same = pd.Series(True, index=table.index)
    for name in set(KNOBS) - set(free):
        same &= table[name].isna() if pd.isna(row[name]) else table[name] == row[name]
    return table[same]


def neighbours(table: pd.DataFrame, best: pd.Series) -> pd.DataFrame:
    """The points one step from the best along one knob each: the next value down and up, and of words every other.

    Columns: knob, value, change of TIME as a share of 1 of the best's, expected_step_ms, speedup, replay graphs and
    buffer MiB. A knob at the end of its values has one neighbour, a failed point is none.
    """
    good = ran(table)
    rows = []
    for knob in varied(good):
        line = with_knobs_of(good, best, [knob]).sort_values(knob)
        values = line[knob].tolist()
        place = values.index(best[knob])
        near = range(len(values)) if isinstance(best[knob], str) else range(max(0, place - 1), place + 2)
        rows += [_beside(knob, line.iloc[index], best) for index in near if index != place and index < len(values)]
    return pd.DataFrame(rows)


def _beside(knob: str, row: pd.Series, best: pd.Series) -> dict[str, object]:
    return {
        "knob": knob,
        "value": row[knob],
        "time against best": row[TIME] / best[TIME] - 1,
        "expected_step_ms": row["expected_step_ms"],
        "speedup": row["speedup"],
        "num_replay_graphs": int(row["num_replay_graphs"]),
        "buffer_mib": row["buffer_mib"],
        "point": int(row["point"]),
    }


def within(table: pd.DataFrame, best: pd.Series, share: float) -> pd.DataFrame:
    """The points whose TIME is at most `share` of 1 above the best's: how sharp the optimum is."""
    good = ran(table)
    return good[good[TIME] <= best[TIME] * (1 + share)]


def pareto(table: pd.DataFrame) -> pd.DataFrame:
    """The points that no other beats in both TIME and buffer MiB, by ascending memory."""
    good = ran(table).sort_values(["buffer_mib", TIME, "num_replay_graphs", "point"])
    before = good[TIME].cummin().shift(fill_value=float("inf"))
    return good[good[TIME] < before]
