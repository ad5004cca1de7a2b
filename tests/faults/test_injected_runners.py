"""Faults injected while a runner captures its graphs, in both forms: what is there serves, the rest comes later."""

import gc
from collections.abc import Iterator

import pytest
from decoder.serving import make_runner
from faults.helpers import SMOOTH, live_pool_bytes
from faults.injection import KINDS, PLAN, Fuse, eager_equals

from replay_sim.capture.caching_allocator import OutOfMemoryError
from replay_sim.capture.host import HostBackend
from replay_sim.replay.context import has_forward_context


def test_a_device_of_any_capacity_captures_all_or_says_what_is_missing(form) -> None:
    """D8: by capacity, a segment more at a time; the sizes that were captured serve, and the rest come later."""
    needed, outcomes = 0, []
    while True:
        backend = HostBackend(1 << 30)
        allocator = backend.arena.allocator
        allocator.capacity_bytes = needed
        runner = make_runner(backend, PLAN, SMOOTH, captured=False, replay_form=form)
        try:
            runner.capture_model_graphs()
            runner.capture_replay_graphs()
        except OutOfMemoryError as error:
            outcomes.append(error.requested)
            assert f"of capacity_bytes={needed} are reserved" in str(error)
            del error
            gc.collect()
            assert live_pool_bytes(backend, runner.pool) == 0
            eager_equals(runner)
            allocator.capacity_bytes = None
            runner.capture_model_graphs()
            runner.capture_replay_graphs()
        else:
            break
        finally:
            eager_equals(runner)
        needed += 2 << 20
    assert outcomes and set(runner.model_graphs) == {16, 64} and runner.replay_graphs.sizes == (8, 32)


def test_an_interrupt_between_two_sizes_leaves_those_before_it(backend, form) -> None:
    runner = make_runner(backend, PLAN, SMOOTH, captured=False, replay_form=form)

    def interrupted(sizes, _) -> Iterator[int]:
        yield sizes[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.capture_model_graphs(interrupted)
    assert list(runner.model_graphs) == [64]
    with pytest.raises(KeyboardInterrupt):
        runner.capture_replay_graphs(interrupted)
    assert runner.replay_graphs.sizes == (32,) and not has_forward_context()
    eager_equals(runner)
    runner.capture_model_graphs()
    runner.capture_replay_graphs()
    eager_equals(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_any_run_of_the_replay_layers_marks_its_size_and_the_next_capture_is_right(
    backend, form, kind
) -> None:
    """C7, G3: in the warm-up and in the capture of both sizes, the replay layers of the decoder itself."""
    runner = make_runner(backend, PLAN, SMOOTH, captured=False, replay_form=form)
    runner.capture_model_graphs()
    graphs, fuse = runner.replay_graphs, Fuse(0, kind)
    run_layers = graphs._run_layers
    graphs._run_layers = lambda inputs: (fuse.spend(), run_layers(inputs))[1]
    runner.capture_replay_graphs()  # what a library makes when it is first used is made
    fuse.spent = 0
    runner.capture_replay_graphs()
    places = fuse.spent
    assert places >= 4
    for at in range(1, places + 1):
        graphs._graphs.clear()
        fuse.at, fuse.spent = at, 0
        with pytest.raises(kind, match=f"injected at call {at}") as caught:
            runner.capture_replay_graphs()
        assert caught.type is kind and not has_forward_context()
        del caught
        gc.collect()
        assert live_pool_bytes(backend, runner.pool) == 0
        failed = 32 if at <= places // 2 else 8
        assert graphs.failed == {failed: f"{kind.__name__}: injected at call {at}"}
        assert graphs.sizes == (() if failed == 32 else (32,))
        eager_equals(runner)
    runner.capture_replay_graphs()
    assert graphs.sizes == (8, 32) and graphs.failed == {}
    eager_equals(runner)
