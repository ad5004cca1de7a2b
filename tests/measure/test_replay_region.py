"""The measurement of the replay region: its forms do the same, and what its points and captures say."""

from collections.abc import Callable

import attrs
import pytest
import torch

from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.measure import replay_region
from replay_sim.measure.records import REQUIRED_POINT_KEYS
from replay_sim.measure.replay_region import measure_forms, measure_region, region_notes, region_table
from replay_sim.measure.timing import Timing

SIZES, TOKENS = (8, 24), 64
FORMS = ["reference", "breakable", "one_launch"]
# Made-up microseconds of each arm.
TIMES = {
    "reference": 100,
    "breakable": 70,
    "one_launch": 40,
    "layers": 30,
    "a graph of one kernel": 6,
    "reference movement": 60,
    "one_launch movement": 9,
}


@pytest.fixture
def timed(monkeypatch) -> list[dict[str, Callable]]:
    """The arms of every size; each is called once and takes TIMES."""
    runs: list[dict[str, Callable]] = []

    def time_arms(arms: dict[str, Callable], device) -> dict[str, Timing]:
        runs.append(arms)
        for arm in arms.values():
            arm(0)
        return {
            name: Timing(TIMES[name], TIMES[name] / 2, TIMES[name], TIMES[name], TIMES[name] / 4, 3) for name in arms
        }

    monkeypatch.setattr(replay_region, "time_arms", time_arms)
    return runs


def test_each_size_has_a_point_of_each_form_with_what_is_beyond_the_layers(timed) -> None:
    """Issue 5, point 2: one launch against one more than there are layers."""
    points, _ = measure_region(TINY, HostBackend(), 3, SIZES, TOKENS)
    assert [(point["rows"], point["form"]) for point in points] == [(size, form) for size in SIZES for form in FORMS]
    for point in points:
        time = TIMES[point["form"]]
        assert point.keys() >= REQUIRED_POINT_KEYS["region"]
        assert (point["device_us"], point["host_us"], point["layers_us"]) == (time, time / 2, 30)
        assert point["beyond_us"] == time - 30
        assert (point["host_p10"], point["control_us"], point["control_p10"]) == (time / 4, 3, 1.5)
        assert point["moved_us"] == TIMES.get(f"{point['form']} movement")
        assert point["graph_launches"] == (1 if point["form"] == "one_launch" else TINY.num_replay_layers + 1)
        assert (point["num_reqs"], point["tokens"]) == (point["rows"] // TINY.window, 64 - 64 % (point["rows"] // 8))
    assert region_table(points).count("\n") == 1 + len(points)
    assert [note.split(":")[0] for note in region_notes(points)] == [
        f"one launch, {size} rows, {TINY.num_local_experts} experts a rank" for size in SIZES
    ]
    assert region_notes(points)[0].endswith(
        "spends 20.0 µs (p10 10.0), where the launch of a graph of one kernel takes 3.0 (p10 1.5)"
    )


def test_a_form_that_gives_other_bits_is_refused_before_it_is_timed(timed, monkeypatch) -> None:
    """G5: build, prove equal, then time."""
    monkeypatch.setattr(replay_region.Region, "run", lambda self, form, turn=0: None)
    with pytest.raises(RuntimeError, match="8 rows differ from the reference"):
        measure_region(TINY, HostBackend(), 3, SIZES, TOKENS)
    assert timed == []


def test_captures_of_each_form_say_graphs_segments_seconds_and_bytes(timed) -> None:
    """Issue 5, point 5."""
    backend = HostBackend()
    weights = replay_region.region_runner(
        TINY, replay_region.region_plan(TINY, SIZES, TOKENS), backend, 3
    ).decoder.weights
    points = measure_forms(TINY, backend, 3, SIZES, TOKENS, weights)
    layers = TINY.num_replay_layers
    assert [(p["form"], p["one_freeze_a"], p["num_graphs"], p["num_segments"]) for p in points] == [
        ("breakable", "size", 2, 2 * (layers + 1)),
        ("breakable", "group", 2, 2 * (layers + 1)),
        ("one_launch", "group", 2, 2),
    ]
    for point in points:
        assert point.keys() >= REQUIRED_POINT_KEYS["capture"]
        assert point["seconds"] > 0 and point["reserved_bytes"] > 0 and point["plan"] == "2 sizes to 24"


def test_the_forms_of_a_region_leave_the_same_rows_at_the_same_places(monkeypatch) -> None:
    """L6: against an eager run of the layers on the kept rows, which are each request's last window."""
    regions: list[replay_region.Region] = []
    monkeypatch.setattr(replay_region, "_time", lambda region: (regions.append(region), TIMED)[1])
    measure_region(attrs.evolve(TINY, late_aux_layers=(3, 5)), HostBackend(), 3, SIZES, TOKENS)
    (small, large) = regions
    length = large.batch.num_tokens // 3
    kept = [row for end in (length, 2 * length, 3 * length) for row in range(end - TINY.window, end)]
    for tensor in large.layers.break_buffers.tensors.values():
        assert sorted({int(row) for row in tensor.flatten(1).any(1).nonzero()}) == kept
    assert torch.equal(large.targets[0], large.layers.break_buffers.tensors["hidden_states"])


TIMED = {name: Timing(time, time, time, time, time, 1) for name, time in TIMES.items()}
