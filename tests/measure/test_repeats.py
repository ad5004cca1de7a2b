"""Two runs of one sweep, batch by batch: ratios by hand, what cannot be compared, and the bundled repeats."""

import json

import attrs
import pytest

from replay_sim.measure.records import Record, bundled_records, read_record, write_record
from replay_sim.measure.repeats import COMPARISONS, compare_records, main, repeat_record

BUNDLED = dict(bundled_records("steps"))["steps-window-nvidia-h200.json"]
GRAPHS = [point for point in BUNDLED.points if point["arm"] == "piecewise_off"]


def slower(record: Record, factors: list[float]) -> Record:
    """The points of one arm, alone and each as many times longer."""
    points = [point | {"step_us": point["step_us"] * by} for point, by in zip(GRAPHS, factors, strict=True)]
    return attrs.evolve(record, points=points)


def test_ratios_are_those_of_the_same_batches() -> None:
    """In any order of points, and with what only one of both ran left out."""
    other = slower(BUNDLED, [1.0, 1.1, 1.2] + [1.5] * (len(GRAPHS) - 3))
    other = attrs.evolve(other, points=other.points[::-1] + [GRAPHS[0] | {"num_tokens": 7}])
    (found,) = compare_records(BUNDLED, other)
    assert found == {
        "of": "steps",
        "sweep": "window",
        "arm": "piecewise_off",
        "n": len(GRAPHS),
        "ratio_median": 1.5,
        "ratio_min": 1.0,
        "ratio_max": 1.5,
    }


@pytest.mark.parametrize("kind", COMPARISONS)
def test_every_point_of_a_sweep_is_told_from_the_others(kind: str) -> None:
    for name, record in bundled_records(kind):
        if "replay-forms" not in name:
            points = [tuple(point[key] for key in COMPARISONS[kind].same) for point in record.points]
            assert len(set(points)) == len(points)


def test_prefills_calls_and_captures_are_compared_each_by_their_own_time() -> None:
    """Issue 4, point 1: every record of a pass, not the steps alone."""
    for kind, name, by in (
        ("prefill", "prefill-prompt-nvidia-h200.json", "arm"),
        ("calls", "calls-layers-nvidia-h200.json", "op"),
        ("capture", "capture-default-nvidia-h200.json", "group"),
    ):
        record = dict(bundled_records(kind))[name]
        time = COMPARISONS[kind].time
        twice = attrs.evolve(record, points=[point | {time: 2 * point[time]} for point in record.points])
        found = compare_records(record, twice)
        assert {point[by] for point in found} == {point[by] for point in record.points}
        assert {point[key] for point in found for key in ("ratio_min", "ratio_median", "ratio_max")} == {2.0}


def test_records_without_a_common_batch_or_of_another_kind_are_refused() -> None:
    strange = attrs.evolve(BUNDLED, points=[point | {"num_tokens": 7} for point in GRAPHS])
    with pytest.raises(ValueError, match="no point in common"):
        compare_records(BUNDLED, strange)
    pool = dict(bundled_records("pool"))["pool-default-nvidia-h200.json"]
    with pytest.raises(ValueError, match="allowed are two of one of steps"):
        compare_records(BUNDLED, pool)


def test_a_point_without_what_it_is_compared_by_is_refused() -> None:
    """Captures of the replay forms have no group; a time of 0 has no ratio."""
    forms = dict(bundled_records("capture"))["capture-flash-rank-replay-forms-nvidia-h200.json"]
    with pytest.raises(ValueError, match="a point of the capture record lacks group to compare it by"):
        compare_records(forms, forms)
    still = attrs.evolve(BUNDLED, points=[GRAPHS[0] | {"step_us": 0}])
    with pytest.raises(ValueError, match="step_us of a point of the steps record is 0; it must be above 0"):
        compare_records(still, BUNDLED)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step_us": None}, "step_us of number 0 is None, allowed is a number from 0"),
        ({"step_us": 10**400}, "step_us of number 0 is 1000"),
        ({"step_us": True}, "step_us of number 0 is True"),
        ({}, "number 0 of a steps record lacks step_us"),
    ],
)
def test_a_users_record_that_cannot_be_compared_is_one_line(changed: dict, named: str, tmp_path, capsys) -> None:
    """Issue 8: a record from outside."""
    data = attrs.asdict(BUNDLED)
    point = {key: value for key, value in data["points"][0].items() if key != "step_us"}
    (tmp_path / "mine\n.json").write_text(json.dumps(data | {"points": [point | changed]}))
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "mine\n.json"), "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and named in err and err.count("\n") == 1
    assert err.startswith("python -m replay_sim.measure.repeats: ") and not (tmp_path / "out").exists()


def test_a_place_where_no_record_can_be_written_is_one_line(tmp_path, capsys) -> None:
    write_record(slower(BUNDLED, [2.0] * len(GRAPHS)), tmp_path / "mine.json")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "mine.json"), "--out", str(tmp_path / "mine.json" / "out")])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.count("\n") == 1 and "cannot be written" in err


def test_a_users_record_is_compared_with_the_bundled_one_and_kept(tmp_path, capsys) -> None:
    mine = tmp_path / "mine.json"
    other = slower(BUNDLED, [2.0] * len(GRAPHS))
    write_record(other, mine)
    write_record(attrs.evolve(other, settings=other.settings | {"subject": "nothing"}), tmp_path / "nothing.json")
    main([str(mine), str(tmp_path / "nothing.json"), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "piecewise_off" in printed and "no bundled record of nothing: left out" in printed
    assert read_record(tmp_path / "repeat-window-nvidia-h200.json") == repeat_record([BUNDLED], [other])
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "missing.json")])
    assert stopped.value.code == 2


def test_bundled_repeats_say_how_far_one_run_is_to_be_trusted() -> None:
    """Issue 4, point 1: all sweeps. Graphs repeat to a few per cent, launch-bound eager steps to a factor, the host's.

    Of the sweep `requests` the other run staged tables of more than 16 requests by several threads, 15 ms a step.
    """
    points = [point for _, record in bundled_records("repeat") for point in record.points]
    sweeps = {"threshold", "decode", "requests", "prompt", "experts", "window", "budget", "layers", "plans"}
    assert {point["sweep"] for point in points} == sweeps
    steps = [p for p in points if p["of"] == "steps"]
    graphs = [p for p in steps if p["arm"] in ("piecewise_off", "piecewise_replay_graphs")]
    prefills = [p for p in graphs if p["sweep"] not in ("decode", "requests")]
    assert len(prefills) == 10 and all(0.95 < p["ratio_min"] and p["ratio_max"] < 1.05 for p in prefills)
    assert all(0.98 < p["ratio_median"] < 1.02 for p in graphs)
    assert max(p["ratio_max"] for p in steps if p["arm"] == "eager_replay") > 1.4
