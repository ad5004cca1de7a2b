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


def test_the_table_is_that_of_the_records() -> None:
    segments = {p["group"]: p["num_segments"] for p in RECORDS["capture-default-nvidia-h200.json"].points}
    for cells, point in (
        (row("model", "largest first"), pool("shared", "largest_first", "model")),
        (row("model", "smallest first"), pool("shared", "smallest_first", "model")),
        (row("replay", "in the model graphs' pool and stream"), pool("shared", "largest_first", "replay")),
        (row("replay", "in their pool, on a stream of their own"), pool("own_stream", "largest_first", "replay")),
    ):
        assert cells[2:] == [
            str(point["num_graphs"]),
            str(segments[point["group"]]),
            f"{point['seconds']:.1f}",
            f"{point['reserved_bytes'] / MIB:,.0f}",
            f"{point['predicted_bytes'] / MIB:,.0f}",
        ]


def test_the_drivers_share_is_what_no_reserved_byte_explains() -> None:
    """O5: reserved and driver memory."""
    points = RECORDS["pool-default-nvidia-h200.json"].points
    shares = {
        (model["driver_bytes"] - sum(p["reserved_bytes"] + p["plain_bytes"] for p in (model, replay))) / MIB
        for model, replay in zip(points[::2], points[1::2], strict=True)
    }
    assert {f"{share:,.0f}" for share in shares} == set(re.findall(r"(\d+) MiB that the driver takes", README))


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
