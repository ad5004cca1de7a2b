"""The graphs of the tour's plan as a table and as strips, against the plan and the layers of the tiny decoder."""

import attrs
import pytest

from replay_sim.config import TINY
from replay_sim.explore.capture_measured import capture_table
from replay_sim.explore.decoder_graphs import decoder_strips, graphs_table
from replay_sim.explore.tour import TOUR_BATCH, TOUR_CONFIG, StepTour
from replay_sim.measure.records import bundled_records

CONFIG = attrs.evolve(
    TOUR_CONFIG, cudagraph_capture_sizes=(4, 64), decoder_replay_cudagraph_capture_sizes=(24,), max_num_seqs=4
)
LAYERS, CUT = TINY.num_layers, TINY.cut


@pytest.fixture(scope="module")
def tour() -> StepTour:
    made = StepTour(TOUR_BATCH, CONFIG)
    made.capture()
    return made


def test_a_line_a_graph(tour) -> None:
    """C1, L4: below the threshold every attention breaks; from it on KV write and replay layers follow the cut."""
    table = graphs_table(tour)
    assert table.index.tolist() == [("PIECEWISE", 4), ("PIECEWISE", 64), ("FULL", 4), ("replay", 24)]
    assert table["breaks"].tolist() == [LAYERS, CUT + 2, 0, LAYERS - CUT]
    assert table.loc[("FULL", 4), "segments"] == 1
    assert table.loc[("FULL", 4), "operations"] > table.loc[("PIECEWISE", 4), "operations"]


def test_strips_name_their_breaks(tour) -> None:
    full, small, large, replay = decoder_strips(tour)
    assert [strip.label for strip in (full, small, large, replay)] == [
        "FULL, 4 tokens",
        "PIECEWISE, 4 tokens",
        "PIECEWISE, 64 tokens",
        "replay, 24 rows",
    ]
    breaks = [entry.label for entry in large.entries if entry.is_break]
    assert breaks == [
        "attention, layer 0",
        "attention, layer 1",
        "attention, layer 2",
        "KV write, layer 3",
        "replay layers",
    ]
    assert replay.in_words.endswith("3 breaks") and full.in_words == "1 segment and no breaks"


def test_measured_captures_are_those_of_the_records() -> None:
    records = [record for _, record in bundled_records("capture")]
    table = capture_table(records)
    points = [point for record in records for point in record.points]
    assert len(table) == len(points) >= 2
    for (_, line), point in zip(table.iterrows(), points, strict=True):
        assert (line["segments"], line["seconds"]) == (point["num_segments"], point["seconds"])
        assert line["ms a segment"] == pytest.approx(1000 * point["seconds"] / point["num_segments"], abs=0.06)
    assert table["measured on"].str.startswith("NVIDIA").all()
    assert not table[["config", "group", "segments", "seconds"]].duplicated().any() and table["group"].notna().all()
    forms = [point for point in points if "form" in point]
    assert all(
        table["group"].str.contains(f"{point['form']}, one freeze a {point['one_freeze_a']}").any() for point in forms
    )
