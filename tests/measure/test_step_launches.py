"""Launches by part, against graphs that were really captured."""

import pytest
from decoder.serving import make_runner

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture.host import HostBackend
from replay_sim.config.shapes import TINY
from replay_sim.measure.roofline import PARTS, step_parts
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_launches import Launches, step_launches

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL


@pytest.fixture(scope="module")
def runner():
    """Model graphs of 16 and 64 tokens, of which 64 breaks, a FULL graph of 4 and a replay graph of 8 rows."""
    return make_runner(HostBackend(1 << 32))


def launches(
    mode: CudagraphMode, replay_mode: CudagraphMode | None, *, one_launch: bool = False
) -> dict[str, Launches]:
    case = StepCase(
        num_tokens=4 if mode is FULL else 64,
        padded_tokens=4 if mode is FULL else 64,
        mode=mode,
        replay_rows=0 if replay_mode is None else 8,
        padded_rows=0 if replay_mode is None else 8,
        replay_mode=replay_mode,
        num_reqs=4 if mode is FULL else 1,
        computed=0,
        one_launch=one_launch,
    )
    found = step_launches(TINY, case, step_parts(TINY, case))
    assert tuple(found) == PARTS
    return found


def total(found: dict[str, Launches], name: str) -> int:
    return sum(getattr(part, name) for part in found.values())


def test_a_graph_that_breaks_launches_as_many_segments_as_were_captured(runner) -> None:
    found = launches(PIECEWISE, PIECEWISE)
    model, replay = runner.model_graphs[64], runner.replay_graphs.graphs[0]
    before = found["first_layers"].graphs + found["kv_write"].graphs
    assert before == len(model.segments)
    assert found["first_layers"].breaks + found["kv_write"].breaks == model.num_breaks - 1, "but the replay break"
    assert found["replay_layers"].graphs == len(replay.segments)
    assert found["replay_layers"].breaks == replay.num_breaks == TINY.num_replay_layers


def test_a_graph_that_does_not_break_launches_as_many_segments_as_were_captured(runner) -> None:
    found = launches(PIECEWISE, None)
    model = runner.model_graphs[16]
    assert total(found, "graphs") == len(model.segments) and total(found, "breaks") == model.num_breaks


def test_a_full_graph_is_one_launch_and_an_eager_step_none(runner) -> None:
    full, eager = launches(FULL, None), launches(NONE, None)
    assert total(full, "graphs") == len(runner.full_graphs[4].segments) == 1
    assert total(full, "eager_kernels") == total(full, "breaks") == 0 < total(full, "graph_kernels")
    assert total(eager, "graphs") == total(eager, "breaks") == total(eager, "graph_kernels") == 0
    assert total(eager, "eager_kernels") == total(full, "graph_kernels"), "the same operations"


def test_replay_layers_in_one_launch_move_their_rows_in_it() -> None:
    found = launches(PIECEWISE, PIECEWISE, one_launch=True)
    assert found["replay_layers"].graphs == 1 and found["replay_layers"].eager_kernels == 0
    assert found["movement"] == Launches(graph_kernels=2)


def test_an_eager_replay_batch_in_a_graph_launches_its_kernels_one_by_one() -> None:
    found = launches(PIECEWISE, NONE)
    assert found["replay_layers"].graphs == found["replay_layers"].graph_kernels == 0
    assert found["replay_layers"].eager_kernels == total(launches(NONE, NONE), "eager_kernels") - sum(
        launches(NONE, NONE)[part].eager_kernels for part in ("first_layers", "kv_write", "movement")
    )
