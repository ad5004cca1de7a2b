"""Steps of a rank without rows: its pads run through every kind of graph, and eagerly, and leave nothing."""

import numpy as np
import pytest
import torch
from decoder.serving import Serving, make_plan, make_runner, prefill
from replay.fake_model import nothing_is_captured

from replay_sim.batch.dispatch import CudagraphMode, StepNeeds, dispatch_needs
from replay_sim.batch.rank_dispatch import IDLE, rank_record, together
from replay_sim.batch.request import Batch
from replay_sim.capture import BreakableGraph
from replay_sim.decoder.step import StepRunner
from replay_sim.replay.graphs import ReplayForm

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
PLAN = make_plan(model_sizes=(16, 64), full_sizes=(2,), replay_sizes=(8, 32))
# What another rank asks for, and how the rank without rows runs: mode, padded tokens, replay mode, padded rows.
STEPS = {
    "a full graph": (StepNeeds(2, 2, True, 2, False), (FULL, 2, None, 0)),
    "a graph that does not break": (StepNeeds(9, 1, False, 8, True), (PIECEWISE, 16, None, 0)),
    "a graph that breaks": (StepNeeds(40, 1, False, 8, True), (PIECEWISE, 64, PIECEWISE, 8)),
    "a graph that breaks for eager layers": (StepNeeds(40, 1, False, 40, False), (PIECEWISE, 64, NONE, 1)),
    "no graph": (StepNeeds(90, 1, False, 90, False), (NONE, 1, None, 0)),
    "no graph but the replay layers'": (StepNeeds(90, 1, False, 20, True), (NONE, 1, PIECEWISE, 32)),
    "no graph at all": (StepNeeds(90, 2, False, 50, True), (NONE, 1, NONE, 1)),
}


@pytest.fixture(scope="module")
def runners() -> dict[str, StepRunner]:
    """One runner a backend, whose graphs of both forms are captured once."""
    return {}


@pytest.fixture
def runner(backend, runners) -> StepRunner:
    if backend.name not in runners:
        runners[backend.name] = make_runner(backend, PLAN)
        runners[backend.name].use_replay_form(ReplayForm.ONE_LAUNCH)
        runners[backend.name].capture_replay_graphs()
    return runners[backend.name]


@pytest.mark.parametrize("form", ReplayForm)
@pytest.mark.parametrize("name", STEPS)
def test_pads_alone_run_as_agreed_return_no_row_and_write_no_kv(runner, monkeypatch, name: str, form) -> None:
    """X2, S8: the graphs are those of the record, and no cache changes a bit."""
    needs, expected = STEPS[name]
    runner.use_replay_form(form)
    sizes = {"model_sizes": PLAN.model_sizes, "full_sizes": PLAN.full_sizes, "replay_sizes": PLAN.replay_sizes}
    record = rank_record(dispatch_needs(together([needs, IDLE]), PLAN, **sizes), IDLE)
    assert (record.mode, record.padded_tokens, record.replay_mode, record.padded_rows) == expected
    assert (record.num_tokens, record.num_reqs, record.replay_rows) == (0, 0, 0)
    replayed, replay = [], BreakableGraph.replay
    monkeypatch.setattr(BreakableGraph, "replay", lambda graph: (replayed.append(graph.name), replay(graph))[1])
    caches = [tensor.clone() for tensor in runner._named_caches().values()]
    with nothing_is_captured(runner.backend):
        output = runner.run(Batch(), [], np.empty(0, np.int32), record)
    assert len(output.hidden_states) == len(output.pre_mix) == 0 and output.record == record
    for before, after in zip(caches, runner._named_caches().values(), strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert len(replayed) == sum(mode not in (None, NONE) for mode in (record.mode, record.replay_mode))


@pytest.mark.parametrize("form", ReplayForm)
def test_a_step_after_pads_alone_equals_one_without_them(runner, form) -> None:
    """X2: nothing of the pads stays behind."""
    runner.use_replay_form(form)
    sizes = {"model_sizes": PLAN.model_sizes, "full_sizes": PLAN.full_sizes, "replay_sizes": PLAN.replay_sizes}
    first = [tensor.clone() for tensor in rows_of(Serving(runner).step([prefill("p", 40)]))]
    for needs, _ in STEPS.values():
        record = rank_record(dispatch_needs(together([needs, IDLE]), PLAN, **sizes), IDLE)
        runner.run(Batch(), [], np.empty(0, np.int32), record)
    again = rows_of(Serving(runner).step([prefill("p", 40)]))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def rows_of(output) -> tuple[torch.Tensor, torch.Tensor]:
    return output.hidden_states, output.pre_mix
