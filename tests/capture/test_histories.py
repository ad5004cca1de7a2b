"""The allocator's model against histories recorded on an H200: 0 bytes off after every capture."""

import json
import re
from pathlib import Path

import attrs
import pytest

from replay_sim.capture.allocator_trace import Alloc, read_trace, replay

FOLDER = Path(__file__).parent / "histories"
HISTORIES = sorted(FOLDER.glob("*.jsonl.xz"))
CAPTURES = {
    "default": 26 + 10 + 16,
    "tiny": 26 + 10 + 16,
    "b200-dep2-c8": 28 + 5,
    "h100-tp8-log": 30 + 1,
    "h200-tp4-c8": 20,
}
"""Graphs of each plan: PIECEWISE, FULL and replay; tiny is the plan of `default` on the tiny decoder."""


def measured_marks(history: Path) -> list[tuple[str, dict[int | None, int]]]:
    marks = json.loads(history.with_name(history.name.removesuffix(".jsonl.xz") + ".marks.json").read_text())
    return [
        (mark["mark"], {None if pool == "None" else int(pool): size for pool, size in mark["reserved"].items()})
        for mark in marks
    ]


def modelled_marks(trace) -> list[tuple[str, dict[int | None, int]]]:
    return [(mark.name, dict(mark.reserved)) for mark in replay(trace).marks]


def plan_of(history: Path) -> str:
    """The first part of PLAN-ARRANGEMENT-ORDER-OUTPUTS.jsonl.xz."""
    return re.split("-(shared|own_stream|own_pool)-", history.name)[0]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_the_model_reserves_what_the_gpu_reserved_after_every_capture(history: Path) -> None:
    """C8, O1, O2, O5: by pool, to the byte."""
    measured = measured_marks(history)
    assert len(measured) == CAPTURES[plan_of(history)] + 1
    assert modelled_marks(read_trace(history)) == measured


def test_there_are_histories_of_every_plan_and_arrangement_in_both_orders() -> None:
    names = {path.name.split(".")[0] for path in HISTORIES}
    assert len(names) >= 6 and {plan_of(path) for path in HISTORIES} == set(CAPTURES)
    for part in ("shared", "own_stream", "own_pool", "largest_first", "smallest_first", "dropped", "held"):
        assert any(part in name for name in names)


def test_a_history_with_other_sizes_would_not_match() -> None:
    """What the comparison rests on: a tenth more in every large pool allocation moves the reserved bytes."""
    history = HISTORIES[0]
    trace = read_trace(history)
    events = tuple(
        attrs.evolve(event, size=event.size * 11 // 10)
        if isinstance(event, Alloc) and event.pool is not None and event.size > 1 << 20
        else event
        for event in trace.events
    )
    assert modelled_marks(attrs.evolve(trace, events=events)) != measured_marks(history)


def test_replay_graphs_that_share_pool_and_stream_add_nothing_on_the_gpu() -> None:
    """O1, point 3 of pool reuse: the pool has the same bytes after the last model graph and at the end."""
    marks = dict(measured_marks(FOLDER / "default-shared-largest_first-dropped.jsonl.xz"))
    assert marks["FULL 6"][1] == marks["end"][1]
