"""Predicted pool bytes against those measured on GPUs, in the bundled records."""

import functools

import pytest

from replay_sim.config import SHAPES, load_config
from replay_sim.decoder.pool_prediction import record_plan
from replay_sim.measure.records import bundled_records
from replay_sim.plan.capture_plan import make_plan

RECORDS = {name: record for name, record in bundled_records("pool") if record.environment["gpu"]}
TOLERANCE = 0.03


@functools.cache
def memory(preset: str, shape: str):
    return record_plan(SHAPES[shape], make_plan(load_config(preset)))


def predicted(point: dict, shape: str) -> int:
    growths = memory(point["plan"], shape).predict(
        largest_first=point["order"] == "largest_first", hold_outputs=point["outputs"] == "held"
    )
    (growth,) = (g for g in growths if (g.arrangement.value, g.group) == (point["arrangement"], point["group"]))
    return growth.pool_bytes


@pytest.mark.parametrize("name", RECORDS)
def test_prediction_is_within_3_percent_of_every_measurement(name: str) -> None:
    """O1 to O5, point 2 of pool reuse."""
    record = RECORDS[name]
    for point in record.points:
        assert predicted(point, record.settings["model"]) == pytest.approx(point["reserved_bytes"], rel=TOLERANCE), (
            point
        )


def test_at_least_five_real_plans_were_measured() -> None:
    plans = {point["plan"] for record in RECORDS.values() for point in record.points}
    assert len(plans) >= 5


def test_sharing_pool_and_stream_adds_nothing_measured_and_predicted() -> None:
    """O1, point 3 of pool reuse: in both orders; held outputs may take memory of their own."""
    shared = [
        point
        for record in RECORDS.values()
        for point in record.points
        if (point["arrangement"], point["group"]) == ("shared", "replay")
    ]
    assert len(shared) >= 3
    for point in shared:
        assert point["reserved_bytes"] == point["predicted_bytes"], point
        assert point["reserved_bytes"] == 0 or point["outputs"] == "held", point
