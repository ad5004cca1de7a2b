"""The README's numbers are those of the bundled records."""

import re
from pathlib import Path

from replay_sim.measure.records import bundled_records

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
RECORDS = dict(bundled_records())
MIB = 1 << 20


def row(*starts: str) -> list[str]:
    """The cells of the README's only table row that begins with these cells."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in README.splitlines() if "|" in line]
    (found,) = (cells for cells in rows if cells[: len(starts)] == list(starts))
    return found


def pool(arrangement: str, order: str, group: str) -> dict:
    (point,) = (
        point
        for point in RECORDS["pool-default-nvidia-h200.json"].points
        if (point["arrangement"], point["order"], point["outputs"], point["group"])
        == (arrangement, order, "dropped", group)
    )
    return point


def test_pool_bytes_measured_and_predicted_are_the_records() -> None:
    for cells, point in (
        (row("model", "largest first"), pool("shared", "largest_first", "model")),
        (row("model", "smallest first"), pool("shared", "smallest_first", "model")),
        (row("replay", "in the model graphs' pool and stream"), pool("shared", "largest_first", "replay")),
        (row("replay", "in their pool, on a stream of their own"), pool("own_stream", "largest_first", "replay")),
    ):
        assert cells[2] == str(point["num_graphs"])
        assert cells[-2:] == [f"{point['reserved_bytes'] / MIB:,.0f}", f"{point['predicted_bytes'] / MIB:,.0f}"]


def test_segments_and_seconds_are_the_capture_records() -> None:
    points = {point["group"]: point for point in RECORDS["capture-default-nvidia-h200.json"].points}
    for start, group in (
        (("model", "largest first"), "model"),
        (("replay", "in the model graphs' pool and stream"), "replay"),
    ):
        assert row(*start)[3:5] == [str(points[group]["num_segments"]), f"{points[group]['seconds']:.1f}"]


def test_the_error_of_the_prediction_is_said_as_it_is() -> None:
    pools = [record for record in RECORDS.values() if record.kind == "pool"]
    largest = max(
        abs(point["predicted_bytes"] / point["reserved_bytes"] - 1)
        for record in pools
        for point in record.points
        if point["reserved_bytes"]
    )
    (said,) = re.findall(r"within ([\d.]+) % of the (\d+) plans measured", README)
    assert said == (f"{largest * 100:.1f}", str(len({point["plan"] for record in pools for point in record.points})))


def test_the_environment_named_is_the_records() -> None:
    environment = RECORDS["pool-default-nvidia-h200.json"].environment
    for key in ("gpu", "driver", "torch", "date"):
        assert str(environment[key]) in README
