"""What captures took on a GPU, from the bundled records: seconds, segments and bytes by config and group of graphs."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from replay_sim.measure.records import Point, Record

MIB = 1 << 20
NAMES = {"plan": "config", "num_graphs": "graphs", "num_segments": "segments", "num_operations": "operations"}
COLUMNS = (
    "config",
    "group",
    "graphs",
    "segments",
    "operations",
    "seconds",
    "ms a segment",
    "reserved MiB",
    "measured on",
)


def capture_table(records: Iterable[Record]) -> pd.DataFrame:
    """A line for each group of graphs in records of kind `capture`: what was captured, in how long, on what (C8).

    Where the forms of replay graphs were captured side by side, the group says the form.
    """
    points = pd.DataFrame(
        [
            {
                "group": _group(point),
                **point,
                "measured on": "{gpu}, torch {torch}, {date}".format(**record.environment),
            }
            for record in records
            if record.kind == "capture"
            for point in record.points
        ]
    )
    points["ms a segment"] = (1000 * points["seconds"] / points["num_segments"]).round(1)
    points["reserved MiB"] = (points["reserved_bytes"] / MIB).round().astype(int)
    return points.rename(columns=NAMES)[list(COLUMNS)]


def _group(point: Point) -> str:
    """Of a point without a group: the form of its replay graphs, and how often what was captured was frozen."""
    return f"replay, {point.get('form')}, one freeze a {point.get('one_freeze_a')}"
