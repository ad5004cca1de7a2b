"""The forward context: one a thread, set for the length of a step, the one before it restored after."""

import threading

import pytest
import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.replay.context import ForwardContext, get_forward_context, has_forward_context, use_forward_context


def context(tokens: int) -> ForwardContext:
    return ForwardContext(CudagraphMode.NONE, tokens, tokens, {}, torch.tensor([tokens], dtype=torch.int32))


def test_outside_a_step_there_is_no_context_and_the_error_says_what_to_do() -> None:
    assert not has_forward_context()
    with pytest.raises(RuntimeError, match="use_forward_context"):
        get_forward_context()


def test_the_replay_batchs_context_covers_the_steps_and_uncovers_it_again() -> None:
    """L5: a sub-batch runs under a context of its own inside the step's."""
    step, replay = context(5), context(2)
    with use_forward_context(step):
        with use_forward_context(replay):
            assert get_forward_context() is replay
        assert get_forward_context() is step
    assert not has_forward_context()


def test_an_error_inside_a_step_leaves_no_context_behind() -> None:
    """C7: the next step and the next capture find a clean thread."""
    with pytest.raises(ZeroDivisionError), use_forward_context(context(5)), use_forward_context(context(2)):
        raise ZeroDivisionError
    assert not has_forward_context()


def test_another_thread_does_not_see_the_steps_context() -> None:
    seen = []
    with use_forward_context(context(5)):
        thread = threading.Thread(target=lambda: seen.append(has_forward_context()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_plain_context_trims_nothing() -> None:
    """L1: the state of a step is the replay batch or none."""
    plain = context(5)
    assert plain.replay_batch is None and not plain.first_layer_kv_written
