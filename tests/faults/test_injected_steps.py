"""Faults injected into steps: the error is the original, and the next step is right; and a step inside another."""

import threading

import pytest
import torch
from decoder.serving import Serving, decode, make_runner
from faults.helpers import SMOOTH, outputs_of
from faults.injection import ASKED, PLAN, Fuse, Injected, eager_equals

from replay_sim.decoder.layer import DecoderLayer
from replay_sim.replay.context import has_forward_context
from replay_sim.replay.graphs import ReplayForm


def least_places(form: ReplayForm) -> int:
    """Before and after each write of KV by the host; a one-launch graph holds those of the replay layers."""
    return 2 * (SMOOTH.num_layers if form is ReplayForm.BREAKABLE else SMOOTH.cut)


def layer_calls(monkeypatch, fuse: Fuse) -> None:
    """Spends at every break of the decoder: each attention, and each KV write."""
    write_kv = DecoderLayer.write_kv

    def spending(layer, *arguments) -> None:
        fuse.spend()
        write_kv(layer, *arguments)
        fuse.spend()

    monkeypatch.setattr(DecoderLayer, "write_kv", spending)


@pytest.mark.parametrize("kind", [Injected, KeyboardInterrupt])
def test_an_error_at_any_break_of_a_step_is_raised_as_it_is_and_the_step_can_run_again(
    backend, monkeypatch, form, kind
) -> None:
    """A step in model and replay graphs, interrupted before and after every write of KV; all in one pair of runners."""
    runner = make_runner(backend, PLAN, SMOOTH, replay_form=form)
    arguments = Serving(runner).arguments(ASKED)
    expected = [value.clone() for value in outputs_of(runner.step(*arguments))]
    fuse = Fuse(0, kind)
    layer_calls(monkeypatch, fuse)
    runner.step(*arguments)
    places = fuse.spent
    assert places >= least_places(form)
    for at in range(1, places + 1):
        fuse.at, fuse.spent = at, 0
        with pytest.raises(kind, match=f"injected at call {at}") as caught:
            runner.step(*arguments)
        assert caught.type is kind and not has_forward_context()
        assert getattr(backend, "running", None) is None
        del caught
        fuse.at = 0
        assert all(torch.equal(*pair) for pair in zip(outputs_of(runner.step(*arguments)), expected, strict=True))


def test_an_error_in_the_metadata_of_a_step_leaves_the_next_one_right(backend, monkeypatch, form) -> None:
    """B8, C7 of the faults: between two of its copies, with a wider batch before it."""
    runner = make_runner(backend, PLAN, SMOOTH, replay_form=form)
    arguments = Serving(runner).arguments([decode("d")])
    expected = [value.clone() for value in outputs_of(runner.step(*arguments))]
    staging = runner.contexts.batch._staging
    wide, copy, fuse = Serving(runner).arguments(ASKED), staging._copy, Fuse(0, KeyboardInterrupt)
    monkeypatch.setattr(staging, "_copy", lambda *arguments: (fuse.spend(), copy(*arguments)))
    runner.step(*wide)
    places = fuse.spent
    assert places >= 3
    for at in range(1, places + 1):
        fuse.at, fuse.spent = at, 0
        with pytest.raises(KeyboardInterrupt):
            runner.step(*wide)
        fuse.at = 0
        assert not has_forward_context()
        assert all(torch.equal(*pair) for pair in zip(outputs_of(runner.step(*arguments)), expected, strict=True))
        assert not bool(runner.contexts.batch.block_table[1:].any())


def test_a_replay_without_a_context_says_what_to_enter(backend) -> None:
    """C5: a model graph and a replay graph."""
    runner = make_runner(backend, PLAN, SMOOTH)
    for graph in (runner.model_graphs[64], runner.replay_graphs.graphs[0]):
        with (
            backend.on_stream(runner.stream),
            pytest.raises(RuntimeError, match="no forward context is set: run layers"),
        ):
            graph.replay()
    with pytest.raises(RuntimeError, match="no forward context is set"):
        runner.replay_graphs.run(torch.zeros(1, dtype=torch.int64, device=backend.device), {})
    eager_equals(runner)


@pytest.mark.parametrize("on_a_thread", [False, True], ids=["this thread", "another thread"])
def test_a_step_inside_a_step_of_the_same_runner_is_refused_and_both_work_after(
    backend, monkeypatch, form, on_a_thread: bool
) -> None:
    """Both would write the same buffers: refused at every break, in eager steps and in graphs alike."""
    runner = make_runner(backend, PLAN, SMOOTH, replay_form=form)
    arguments = Serving(runner).arguments(ASKED)
    expected = [value.clone() for value in outputs_of(runner.step(*arguments))]
    refused: list[str] = []

    def intrude() -> None:
        try:
            runner.step(*arguments)
        except RuntimeError as error:
            refused.append(str(error))

    def spend() -> None:
        if not on_a_thread:
            return intrude()
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    fuse = Fuse(0, Injected)
    monkeypatch.setattr(fuse, "spend", spend)
    layer_calls(monkeypatch, fuse)
    actual = outputs_of(runner.step(*arguments))
    assert len(refused) >= least_places(form) and set(refused) == {
        "a step or a capture of this StepRunner runs already, over the same buffers: end it first, or give each thread "
        "a runner and a backend of its own"
    }
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    monkeypatch.undo()
    assert all(torch.equal(*pair) for pair in zip(outputs_of(runner.step(*arguments)), expected, strict=True))
