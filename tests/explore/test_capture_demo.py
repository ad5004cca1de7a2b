"""The small function: what a replay runs, what it follows, and what a capture holds, on both backends."""

import pytest
import torch

from replay_sim.capture.breakable_graph import EagerBreak
from replay_sim.explore.capture_demo import (
    CaptureDemo,
    SmallFunction,
    bytes_in_use,
    differing,
    order_table,
    poison,
)

SCALES = (1.0, 3.0)


@pytest.fixture
def demo(backend) -> CaptureDemo:
    made = CaptureDemo(backend)
    made.capture()
    return made


def test_piecewise_breaks_and_full_does_not(demo) -> None:
    """C1."""
    piecewise, full = demo.graphs["PIECEWISE"], demo.graphs["FULL"]
    assert [isinstance(entry, EagerBreak) for entry in piecewise.entries] == [False, True, False]
    assert [isinstance(entry, EagerBreak) for entry in full.entries] == [False]
    assert full.num_operations == piecewise.num_operations + 1


def test_the_function_is_what_it_says(backend) -> None:
    function = SmallFunction(backend.device)
    function.scale = -2.0
    assert torch.equal(function(), torch.mm(function.x, function.weight).relu() * -2.0 + function.x)


def test_a_break_follows_the_live_value_and_a_full_graph_keeps_that_of_its_capture(demo) -> None:
    """C2, C5."""
    table = demo.live_table(SCALES)
    assert table["PIECEWISE: elements that differ"].tolist() == [0, 0]
    same, other = table["FULL: elements that differ"]
    assert same == 0 < other
    assert demo.function.scale == 1.0


def test_python_of_the_break_alone_runs_at_replay(demo) -> None:
    """C2."""
    table = demo.calls_table(replays=4)
    assert table.loc["PIECEWISE"].tolist() == [0, 4]
    assert table.loc["FULL"].tolist() == [0, 0]


def test_after_the_captures_nothing_of_the_pool_is_in_use(demo, backend) -> None:
    """C3, C8."""
    reserved, in_use = demo.memory_table()["bytes"]
    assert reserved > 0 == in_use == bytes_in_use(backend, demo.pool)


def test_the_output_is_poison_until_the_first_replay() -> None:
    """C12."""
    shown = poison()
    assert shown.before.isnan().all() and not shown.after.isnan().any()
    assert shown.table()["NaN"].tolist() == [128, 0]
    function = SmallFunction(torch.device("cpu"))
    assert differing(shown.after, function()) == 0


def test_differing_counts_bits_and_not_values() -> None:
    assert differing(torch.tensor([0.0, 1.0, torch.nan]), torch.tensor([-0.0, 1.0, torch.nan])) == 1


def test_largest_first_reserves_for_the_largest_alone() -> None:
    """C8: two tensors of 32 MiB. Rising: a segment of 20 for two of 8; 16 beside it; then two of 24 and two of 32."""
    table = order_table()
    assert table["largest first"].tolist() == [64, 64, 64, 64]
    assert table["smallest first"].tolist() == [20, 36, 84, 148]
    held = table["largest first, outputs held"].tolist()
    assert held[0] == 64 < held[-1] and held == sorted(held)
