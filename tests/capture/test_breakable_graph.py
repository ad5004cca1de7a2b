"""Breakable capture on both backends: segments, breaks, errors that leave no trace (C1-C12)."""

import gc
import subprocess
import sys
import threading
from typing import NamedTuple

import pytest
import torch

from replay_sim.capture import CaptureError, eager_break, warm_up
from replay_sim.capture import capture as capture_cold
from replay_sim.capture.breakable_graph import EagerBreak
from replay_sim.capture.eager_break import current_recorder
from replay_sim.capture.host import HostBackend

ROWS, WIDTH = 8, 16


def live_pool_bytes(backend, pool):
    """Bytes of the pool's blocks that are not free."""
    if backend.name == "host":
        return backend.arena.allocator.allocated_bytes(pool)
    snapshot = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in snapshot if tuple(s["segment_pool_id"]) in pool.handles)


def capture(function, *, backend, pool, stream, **options):
    """Capture after a warm-up, as graphs are: a library's handle cannot be made inside a capture (C8)."""
    with backend.on_stream(stream):
        warm = torch.ones(WIDTH, WIDTH, device=backend.device)
        torch.mm(warm, warm)
        torch.mm(warm.bfloat16(), warm.bfloat16())
    return capture_cold(function, backend=backend, pool=pool, stream=stream, **options)


class Scale:
    """A break that reads a live value, as attention reads live metadata."""

    value = 1.0


@eager_break
def scale_into(x, out, factor=None):
    out.copy_(x * (Scale.value if factor is None else factor))


@eager_break
def returns_new(x):
    return x + 1


def inputs(place, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).to(place["backend"].device, dtype)


def buffer(place):
    return torch.empty(ROWS, WIDTH, device=place["backend"].device)


def unit(place):
    return torch.eye(WIDTH, device=place["backend"].device)


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
    x, weight = inputs(place, dtype), inputs(place, dtype, 1).repeat(2, 1)
    graph = capture(layered(x, weight), **place)
    for seed in range(3):
        x.copy_(inputs(place, dtype, seed + 10))
        expected = layered(x, weight)()
        replayed = graph.replay()
        assert torch.equal(replayed["y"], expected["y"])
        assert torch.equal(replayed["norms"][0], expected["norms"][0])


def entry_kinds(graph):
    return ["break" if isinstance(entry, EagerBreak) else "segment" for entry in graph.entries]


def test_a_break_ends_one_segment_and_starts_the_next(place):
    """C1: the order is segment, break, segment."""
    graph = capture(layered(inputs(place), unit(place)), **place)
    assert entry_kinds(graph) == ["segment", "break", "segment"]


def test_two_breaks_in_a_row_leave_no_empty_segment_between_them(place):
    """C1, C11."""
    x, a, b = inputs(place), buffer(place), buffer(place)

    def function():
        x.add_(0)
        scale_into(x, a)
        scale_into(a, b)

    graph = capture(function, **place)
    assert entry_kinds(graph) == ["segment", "break", "break"]


def test_breaks_read_the_live_value_at_replay(place):
    """C5."""
    x, weight = inputs(place), unit(place)
    graph = capture(layered(x, weight), **place)
    Scale.value = 3.0
    try:
        replayed = graph.replay()["y"].clone()
        assert torch.equal(replayed, layered(x, weight)()["y"])
    finally:
        Scale.value = 1.0


def test_a_full_capture_captures_the_breaks_as_they_are(place):
    """C1: in FULL mode nothing breaks out."""
    x, weight = inputs(place), unit(place)
    graph = capture(layered(x, weight), breaks_are_captured=True, **place)
    assert graph.num_breaks == 0 and len(graph.segments) == 1
    x.copy_(inputs(place, seed=5))
    assert torch.equal(graph.replay()["y"], layered(x, weight)()["y"])


def test_results_are_poison_until_the_first_replay():
    """C12: operations are recorded and not run."""
    backend = HostBackend(1 << 28)
    place = {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}
    x = inputs(place)
    graph = capture(lambda: x * 2, **place)
    assert torch.isnan(graph.outputs).all()
    assert torch.equal(graph.replay(), x * 2)


def test_breaks_and_outputs_keep_no_pool_memory_alive(place, backend):
    """C3, C8: after the capture every block of the pool is free."""
    graph = capture(layered(inputs(place), unit(place)), **place)
    assert graph.num_breaks == 1
    assert live_pool_bytes(backend, place["pool"]) == 0
    assert backend.reserved_bytes(place["pool"]) > 0


def test_a_second_size_reuses_the_memory_of_the_first(place, backend):
    """C8, D5: largest first, outputs held weakly, so memory is about the largest, not the sum."""
    big = torch.randn(1 << 10, 1 << 10, device=backend.device)
    capture(lambda: (big * 2).relu(), **place)
    reserved = backend.reserved_bytes(place["pool"])
    for rows in (900, 700, 512):
        part = big[:rows]
        capture(lambda part=part: (part * 2).relu(), **place)
    assert backend.reserved_bytes(place["pool"]) == reserved


def test_a_break_that_returns_a_new_tensor_is_an_error_at_capture(place):
    """C4: the message names the function and the remedy."""
    x = inputs(place)
    with pytest.raises(CaptureError, match=r"returns_new returned a new tensor.*[Ww]rite into"):
        capture(lambda: returns_new(x * 2), **place)
    assert current_recorder() is None


def test_a_break_may_return_what_it_was_given(place):
    """C4."""
    x, out = inputs(place), buffer(place)

    @eager_break
    def fill(x, out):
        out.copy_(x)
        return out

    graph = capture(lambda: fill(x * 3, out) + 1, **place)
    assert torch.equal(graph.replay(), x * 3 + 1)


def test_a_nested_capture_is_refused_and_says_what_to_do(place):
    """C6, E5."""
    x = inputs(place)

    @eager_break
    def nests(x):
        capture(lambda: x * 2, **place)

    with pytest.raises(CaptureError, match="one after the other"):
        capture(lambda: nests(x * 2), **place)
    assert torch.equal(capture(lambda: x * 2, **place).replay(), x * 2)


def fails_in_a_segment(x):
    y = x * 2
    raise ValueError(f"in a segment of {y.shape[0]} rows")


@eager_break
def bad_break(x):
    raise ValueError("in a break")


def fails_in_a_break(x):
    bad_break(x * 2)


def fails_by_shapes(x):
    return torch.mm(x * 2, x)


@pytest.mark.parametrize(
    "function, error",
    [(fails_in_a_segment, ValueError), (fails_in_a_break, ValueError), (fails_by_shapes, RuntimeError)],
)
def test_an_error_leaves_no_trace(place, backend, function, error):
    """C7, E2: the original error is raised, memory is back, and the next capture works."""
    x = inputs(place)
    with pytest.raises(error) as caught:
        capture(lambda: function(x), **place)
    assert not isinstance(caught.value, CaptureError)
    del caught
    gc.collect()
    assert current_recorder() is None
    assert live_pool_bytes(backend, place["pool"]) == 0
    assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)


@pytest.mark.gpu
def test_a_capture_that_cuda_invalidates_leaves_no_trace():
    """C7, C10: a synchronisation inside a capture is CUDA's own error, and the next capture works."""
    from replay_sim.capture.cuda import CudaBackend

    backend = CudaBackend()
    place = {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}
    x = inputs(place)
    with pytest.raises(RuntimeError, match="capturing"):
        capture(lambda: (x * 2, torch.cuda.synchronize()), **place)
    gc.collect()
    assert live_pool_bytes(backend, place["pool"]) == 0
    assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)
    with backend.on_stream(place["stream"]):
        plain = torch.empty(1 << 25, dtype=torch.uint8, device=backend.device)
    owners = {
        tuple(segment["segment_pool_id"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] == plain.data_ptr()
    }
    assert owners == {(0, 0)}


FIRST_CAPTURE = """
import gc, weakref
import torch
from replay_sim.capture import capture

if {on_gpu}:
    from replay_sim.capture.cuda import CudaBackend
    backend = CudaBackend()
else:
    from replay_sim.capture.host import HostBackend
    backend = HostBackend(1 << 26)
x, alive = torch.ones(64, device=backend.device), []

def function():
    made = x + 1
    alive.append(weakref.ref(made))
    return made[:8] * 2

gc.disable()
capture(function, backend=backend, pool=backend.make_pool(), stream=backend.make_stream())
assert alive and alive[0]() is None, "a tensor of the first capture waits for the garbage collector"
"""


def test_a_process_keeps_no_tensor_of_its_first_capture(backend):
    """C8, C9: not in the frames of an import that PyTorch makes at the first operation in a mode either."""
    code = FIRST_CAPTURE.format(on_gpu=backend.name == "cuda")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


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

    inputs_tensor = inputs(place)
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
    "allclose": lambda x: torch.allclose(x, x),
    "repr": lambda x: repr(x),
    "format": lambda x: f"{x.sum()}",
    "tensor": lambda x: x + torch.tensor([1.0] * WIDTH, device=x.device),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cuda_forbids_is_refused_by_name(place, name):
    """C10, C12."""
    x = inputs(place)
    with pytest.raises(CaptureError) as caught:
        capture(lambda: FORBIDDEN[name](x * 1.0), **place)
    assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)
    words = {"bool": "_local_scalar_dense|__bool__", "masked_select": "nonzero|index"}.get(name, name)
    assert caught.match(words)


def test_a_repeat_of_a_given_length_can_be_captured(place):
    """C10: what is refused is a length that only the data tells."""
    x, repeats = inputs(place), torch.full((ROWS,), 2, device=place["backend"].device)
    graph = capture(lambda: torch.repeat_interleave(x, repeats, dim=0, output_size=2 * ROWS) * 1, **place)
    assert torch.equal(graph.replay(), torch.repeat_interleave(x, 2, dim=0))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_outputs_may_be_a_named_tuple(place):
    """C8: containers keep their kind."""
    x = inputs(place)
    outputs = capture(lambda: Pair(x + 1, x * 2), **place).replay()
    assert isinstance(outputs, Pair) and torch.equal(outputs.second, x * 2)


def test_an_empty_graph_is_an_error(place):
    """C11."""
    with pytest.raises(CaptureError, match="captured no operation"):
        capture(lambda: None, **place)


def test_two_threads_capture_side_by_side(backend):
    """C6, E1: one capture a thread."""
    results = {}

    def work(index):
        own = type(backend)()
        place = {"backend": own, "pool": own.make_pool(), "stream": own.make_stream()}
        x = inputs(place, seed=index)
        results[index] = (capture(lambda: (x * 2).relu(), **place).replay(), (x * 2).relu())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*results[index]) for index in range(2))


def test_warm_up_runs_until_nothing_new_is_allocated():
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
