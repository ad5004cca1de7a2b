"""Predicted beside measured: the right record, the right error, and what a model may use."""

import attrs
import pytest

from replay_sim.config import FLASH_RANK, TINY, load_config
from replay_sim.decoder.pool_prediction import PlanMemory, record_plan
from replay_sim.explore.pool_map import recorded
from replay_sim.explore.pool_measured import (
    CASES,
    arrangement_table,
    prediction_table,
    record_of,
    reserved_cases,
    reserved_source,
)
from replay_sim.measure.records import Record, bundled_records
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.replay.sharing import PoolSharing

PLAN = CapturePlan(
    window=TINY.window,
    model_sizes=(64,),
    full_sizes=(),
    replay_sizes=(16, 32),
    trim_threshold=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
PRESET = "default"


def point(group: str, reserved: int, predicted: int | None, **changes: str) -> dict:
    about = {"arrangement": "shared", "order": "largest_first", "outputs": "dropped", "plan": PRESET, "group": group}
    return {**about, "reserved_bytes": reserved, "predicted_bytes": predicted, **changes}


def record(*points: dict, **settings: str) -> Record:
    environment = {
        "gpu": "NVIDIA A",
        "driver": "1",
        "torch": "2",
        "date": "2026-01-02",
        "triton": "3",
        "replay_sim": "4",
    }
    about = {"subject": PRESET, "model": FLASH_RANK.name} | settings
    return Record(
        kind="pool", environment=environment, command="measure it", seed=0, settings=about, points=list(points)
    )


@pytest.fixture(scope="module")
def memory() -> PlanMemory:
    return record_plan(TINY, PLAN)


def test_every_case_is_predicted_and_only_those_of_the_record_are_measured(memory: PlanMemory) -> None:
    predicted = {growth.group: growth.pool_bytes for growth in memory.predict() if growth.arrangement.value == "shared"}
    measured = {"model": predicted["model"] * 2, "replay": 0}
    cases = reserved_cases(memory, record(*(point(group, size, None) for group, size in measured.items())))
    assert [(case.arrangement, case.order, case.outputs) for case in cases] == [
        (sharing.value, *case) for sharing in PoolSharing for case in CASES
    ]
    assert cases[0].predicted == (predicted["model"], 0)
    assert cases[0].measured == (measured["model"], 0)
    assert cases[0].error == -0.5
    assert all(case.measured is None and case.error is None for case in cases[1:])


def test_the_record_is_that_of_the_same_plan_on_the_same_shape() -> None:
    plan = make_plan(load_config(PRESET))
    one, more = record(point("model", 1, 1)), record(point("model", 1, 1), point("replay", 1, 1))
    others = [record(point("model", 1, 1), subject=name) for name in ("b300-tp-recipe", "no-such-preset")]
    tiny = record(*[point("model", 1, 1)] * 5, model=TINY.name)
    named = [(f"{index}.json", found) for index, found in enumerate((one, more, *others, tiny))]
    assert record_of(plan, FLASH_RANK, named) is more
    assert record_of(make_plan(load_config("b200-tp4-c8")), FLASH_RANK, named) is more
    assert record_of(attrs.evolve(plan, max_num_seqs=1), FLASH_RANK, named) is None
    assert record_of(plan, FLASH_RANK, []) is None


def test_the_source_says_whether_anything_is_measured() -> None:
    assert "measured on NVIDIA A, driver 1, torch 2, 2026-01-02, by measure it" in reserved_source(
        PRESET, TINY, record()
    )
    assert reserved_source(PRESET, TINY, None).endswith("no bundled record has this plan, so nothing here is measured")


def test_errors_are_shares_of_what_was_measured() -> None:
    points = (
        point("model", 200 << 20, 201 << 20),
        point("replay", 0, 0),
        point("replay", 0, 5),
        point("model", 1, None),
    )
    table = prediction_table([("a.json", record(*points))])
    assert table["measured MiB"].tolist()[:2] == [200, 0]
    assert table["error"].tolist()[:3] == [0.005, 0, 1]
    assert table["error"].isna().tolist() == [False, False, False, True]


def test_early_aux_states_forbid_sharing(memory: PlanMemory) -> None:
    """O3, O4."""
    table = arrangement_table(memory)
    assert table["without early aux states"].to_dict() == {
        "shared": "chosen",
        "own_stream": "allowed",
        "own_pool": "allowed",
    }
    assert table["with early aux states"].to_dict() == {
        "shared": "corrupts them",
        "own_stream": "chosen",
        "own_pool": "allowed",
    }
    assert table.loc["shared", "replay graphs add, MiB"] == 0 < table.loc["own_stream", "replay graphs add, MiB"]


def test_what_this_version_predicts_is_within_three_percent_of_the_record_of_the_default_plan() -> None:
    """O1-O3, point 2: and sharing pool and stream adds 0 bytes, measured."""
    plan = make_plan(load_config(PRESET))
    found = record_of(plan, FLASH_RANK, bundled_records("pool"))
    assert found is not None and found.environment["gpu"]
    cases = reserved_cases(recorded(FLASH_RANK, plan), found)
    assert all(case.measured and abs(case.error) <= 0.03 for case in cases)
    assert {case.measured[1] for case in cases if case.arrangement == "shared"} == {0}
