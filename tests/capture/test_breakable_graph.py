"""Breakable capture on the host backend: segments, breaks, errors that leave no trace (C1-C12)."""

import gc
import threading

import pytest
import torch

from replay_sim.capture import CaptureError, capture, eager_break, warm_up
from replay_sim.capture.eager_break import current_recorder
from replay_sim.capture.host import HostBackend

ROWS, WIDTH = 8, 16


@pytest.fixture
def backend():
    return HostBackend(1 << 30)


@pytest.fixture
def place(backend):
    return {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}


class Scale:
    """A break that reads a live value, as attention reads live metadata."""

    value = 1.0


@eager_break
def scale_into(x, out, factor=None):
    out.copy_(x * (Scale.value if factor is None else factor))


@eager_break
def returns_new(x):
    return x + 1


def inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype)


def layered(x, weight):
    def function():
        u = torch.mm(x, weight).relu()
        out = torch.empty_like(u)
        scale_into(u, out)
        y = (out + x).view(ROWS, 4, 4).transpose(1, 2).reshape(ROWS, WIDTH)
        return {"y": y, "norms": [y.norm(dim=1)]}

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_gives_the_bits_of_the_eager_function_on_new_inputs(place, dtype):
    """C1, C2: replay follows the inputs' addresses, not their values at capture."""
    x, weight = inputs(dtype), inputs(dtype, 1)[:, :WIDTH].repeat(2, 1)[:WIDTH]
    graph = capture(layered(x, weight), **place)
    for seed in range(3):
        x.copy_(inputs(dtype, seed + 10))
        expected = layered(x, weight)()
        replayed = graph.replay()
        assert torch.equal(replayed["y"], expected["y"])
        assert torch.equal(replayed["norms"][0], expected["norms"][0])


def test_a_break_ends_one_segment_and_starts_the_next(place):
    """C1: the order is segment, break, segment."""
    graph = capture(layered(inputs(), torch.eye(WIDTH)), **place)
    kinds = [type(entry).__name__ for entry in graph.entries]
    assert kinds == ["HostSegment", "EagerBreak", "HostSegment"]
    assert graph.num_breaks == 1


def test_two_breaks_in_a_row_leave_no_empty_segment_between_them(place):
    """C1, C11."""
    x, a, b = inputs(), torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)

    def function():
        x.add_(0)
        scale_into(x, a)
        scale_into(a, b)

    graph = capture(function, **place)
    assert [type(entry).__name__ for entry in graph.entries] == ["HostSegment", "EagerBreak", "EagerBreak"]


def test_breaks_read_the_live_value_at_replay(place):
    """C5."""
    x = inputs()
    graph = capture(layered(x, torch.eye(WIDTH)), **place)
    Scale.value = 3.0
    try:
        replayed = graph.replay()["y"].clone()
        assert torch.equal(replayed, layered(x, torch.eye(WIDTH))()["y"])
    finally:
        Scale.value = 1.0


def test_a_full_capture_captures_the_breaks_as_they_are(place):
    """C1: in FULL mode nothing breaks out."""
    x = inputs()
    graph = capture(layered(x, torch.eye(WIDTH)), breaks_are_captured=True, **place)
    assert graph.num_breaks == 0 and len(graph.segments) == 1
    x.copy_(inputs(seed=5))
    assert torch.equal(graph.replay()["y"], layered(x, torch.eye(WIDTH))()["y"])


def test_results_are_poison_until_the_first_replay(place):
    """C12: operations are recorded and not run."""
    x = inputs()
    graph = capture(lambda: x * 2, **place)
    assert torch.isnan(graph.outputs).all()
    assert torch.equal(graph.replay(), x * 2)


def test_breaks_and_outputs_keep_no_pool_memory_alive(place, backend):
    """C3, C8: after the capture every block of the pool is free."""
    graph = capture(layered(inputs(), torch.eye(WIDTH)), **place)
    assert graph.num_breaks == 1
    assert backend.arena.allocator.allocated_bytes(place["pool"]) == 0
    assert backend.reserved_bytes(place["pool"]) > 0


def test_a_second_size_reuses_the_memory_of_the_first(place, backend):
    """C8, D5: largest first, outputs held weakly, so memory is about the largest, not the sum."""
    big = torch.randn(1 << 10, 1 << 10)
    capture(lambda: (big * 2).relu(), **place)
    reserved = backend.reserved_bytes(place["pool"])
    for rows in (900, 700, 512):
        part = big[:rows]
        capture(lambda part=part: (part * 2).relu(), **place)
    assert backend.reserved_bytes(place["pool"]) == reserved


def test_a_break_that_returns_a_new_tensor_is_an_error_at_capture(place):
    """C4: the message names the function and the remedy."""
    x = inputs()
    with pytest.raises(CaptureError, match=r"returns_new returned a new tensor.*[Ww]rite into"):
        capture(lambda: returns_new(x * 2), **place)
    assert current_recorder() is None


def test_a_break_may_return_what_it_was_given(place):
    """C4."""
    x, out = inputs(), torch.empty(ROWS, WIDTH)

    @eager_break
    def fill(x, out):
        out.copy_(x)
        return out

    graph = capture(lambda: fill(x * 3, out) + 1, **place)
    assert torch.equal(graph.replay(), x * 3 + 1)


def test_a_nested_capture_is_refused_and_says_what_to_do(place):
    """C6, E5."""
    x = inputs()

    @eager_break
    def nests(x):
        capture(lambda: x * 2, **place)

    with pytest.raises(CaptureError, match="one after the other"):
        capture(lambda: nests(x * 2), **place)
    assert torch.equal(capture(lambda: x * 2, **place).replay(), x * 2)


def failing_functions():
    x = inputs()

    def in_segment():
        y = x * 2
        raise ValueError(f"in a segment of {y.shape[0]} rows")

    @eager_break
    def bad(x):
        raise ValueError("in a break")

    def in_break():
        bad(x * 2)

    def shapes():
        return torch.mm(x * 2, x)

    return [(in_segment, ValueError), (in_break, ValueError), (shapes, RuntimeError)]


@pytest.mark.parametrize("function, error", failing_functions())
def test_an_error_leaves_no_trace(place, backend, function, error):
    """C7, E2: the original error is raised, memory is back, and the next capture works."""
    with pytest.raises(error) as caught:
        capture(function, **place)
    assert not isinstance(caught.value, CaptureError)
    del caught
    gc.collect()
    assert current_recorder() is None
    assert backend.arena.allocator.allocated_bytes(place["pool"]) == 0
    x = inputs()
    assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_collection_is_off_inside_and_restored_after(place, enabled, fails):
    """C9, also on an error."""
    seen = []

    def function():
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("stop")
        return inputs_tensor + 1

    inputs_tensor = inputs()
    (gc.enable if enabled else gc.disable)()
    try:
        try:
            capture(function, **place)
        except ValueError:
            assert fails
        assert seen == [False]
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


FORBIDDEN = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "tensor": lambda x: x + torch.tensor([1.0] * WIDTH),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cuda_forbids_is_refused_by_name(place, name):
    """C10, C12."""
    x = inputs()
    with pytest.raises(CaptureError) as caught:
        capture(lambda: FORBIDDEN[name](x * 1.0), **place)
    words = {"bool": "_local_scalar_dense|__bool__", "masked_select": "nonzero|index"}.get(name, name)
    assert caught.match(words)


def test_an_empty_graph_is_an_error(place):
    """C11."""
    with pytest.raises(CaptureError, match="captured no operation"):
        capture(lambda: None, **place)


def test_two_threads_capture_side_by_side(backend):
    """C6: one capture a thread."""
    results = {}

    def work(index):
        x = inputs(seed=index)
        place = {"backend": HostBackend(1 << 28)}
        place |= {"pool": place["backend"].make_pool(), "stream": place["backend"].make_stream()}
        results[index] = (capture(lambda: (x * 2).relu(), **place).replay(), (x * 2).relu())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*results[index]) for index in range(2))


def test_warm_up_runs_until_nothing_new_is_allocated(backend):
    """C8: a buffer made lazily in the first run is there before the capture."""
    held = []

    class Lazy(HostBackend):
        def live_bytes(self):
            return sum(tensor.nbytes for tensor in held)

    def function():
        if len(held) < 2:
            held.append(torch.empty(100))

    assert warm_up(function, Lazy(1 << 28)) == 3


def test_warm_up_refuses_a_function_that_always_keeps_memory():
    """C8."""
    held = []

    class Leaky(HostBackend):
        def live_bytes(self):
            return sum(tensor.nbytes for tensor in held)

    with pytest.raises(CaptureError, match="must not keep"):
        warm_up(lambda: held.append(torch.empty(10)), Leaky(1 << 28))
