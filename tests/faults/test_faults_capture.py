"""Known faults of capturing: other threads, errors midway, the garbage collector, nesting, state of the process."""

import gc
import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from faults.helpers import live_pool_bytes, place_of
from faults.table import fault
from replay.fake_model import FakeModel

from replay_sim.capture import CaptureError, capture, eager_break
from replay_sim.capture.eager_break import current_recorder

WIDTH = 64


@pytest.fixture
def x(backend) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).to(backend.device)


@contextmanager
def copying(device: torch.device):
    """Another thread that copies on the device until the block ends."""
    stop, turns = threading.Event(), []

    def work() -> None:
        source, target = torch.ones(1 << 12, device=device), torch.zeros(1 << 12, device=device)
        while not stop.is_set():
            target.copy_(source)
            turns.append(float(target[0]))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield turns
    finally:
        stop.set()
        thread.join()


@fault("E1", "captures are thread-local: other threads' work neither breaks nor enters them; a sync names itself")
def test_E1_a_thread_that_copies_in_the_background_changes_no_capture(place, backend, x) -> None:
    def function() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = (y * 2).relu() / 2
        return y

    with copying(backend.device) as turns:
        while not turns:
            pass
        before = len(turns)
        graphs = [capture(function, **place) for _ in range(5)]
        while len(turns) == before:
            pass
    assert {graph.num_operations for graph in graphs} == {60}
    assert torch.equal(graphs[-1].replay(), function())


@fault("E1")
@pytest.mark.gpu
def test_E1_a_synchronisation_inside_a_capture_is_an_error_that_names_the_cause() -> None:
    from replay_sim.capture.cuda import CudaBackend

    place = place_of(CudaBackend())
    x = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError, match="capturing"):
        capture(lambda: (x * 2, torch.cuda.synchronize()), **place)
    assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)


@eager_break
def raises(x: torch.Tensor) -> None:
    raise ValueError("no such request")


@fault("E2", "an error ends the segment and drops what it made; the caller sees the error itself")
def test_E2_a_break_that_raises_leaves_the_next_capture_working(place, backend, x) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="no such request") as caught:
            capture(lambda: raises(x * 2), **place)
        assert caught.type is ValueError and current_recorder() is None
        del caught
        gc.collect()
        assert live_pool_bytes(backend, place["pool"]) == 0
        assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)


class Cycle:
    """Garbage that only the collector finds, and that says when it goes."""

    def __init__(self, held: object, gone: list[bool]) -> None:
        self.held, self.gone, self.me = held, gone, self

    def __del__(self) -> None:
        self.gone.append(gc.isenabled())


@pytest.fixture
def low_threshold():
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@fault("E3", "collected before, off inside, restored after, also on an error; a block that dies in the allocator waits")
@pytest.mark.parametrize("fails", [False, True])
def test_E3_garbage_that_holds_a_graph_is_collected_before_and_never_inside(
    place, backend, x, low_threshold, fails: bool
) -> None:
    earlier, inside = [], []
    Cycle(capture(lambda: x * 2, **place), earlier)

    def function() -> torch.Tensor:
        assert earlier, "what was garbage before is gone"
        Cycle([x + 1], inside)
        made = [[index] for index in range(100)]
        y = x * len(made)
        assert not inside, "the collector is off"
        if fails:
            raise ValueError("stop")
        return y

    try:
        graph = capture(function, **place)
    except ValueError:
        assert fails
    else:
        assert torch.equal(graph.replay(), x * 100)
    assert gc.isenabled()
    gc.collect()
    assert inside and live_pool_bytes(backend, place["pool"]) == 0


@fault("E3")
def test_E3_threads_that_capture_side_by_side_keep_the_collector_off_until_the_last_is_done(backend) -> None:
    """Its kind: the first to finish must not switch it on in the middle of the other's capture."""
    first_is_inside, first_may_end, seen = threading.Event(), threading.Event(), []

    def first() -> torch.Tensor:
        first_is_inside.set()
        assert first_may_end.wait(30)
        return ones + 1

    def second() -> torch.Tensor:
        first_may_end.set()
        thread.join()
        seen.append(gc.isenabled())
        return ones + 2

    places = [place_of(type(backend)()) for _ in range(2)]
    ones = torch.ones(4, device=backend.device)
    thread = threading.Thread(target=capture, args=(first,), kwargs=places[0])
    thread.start()
    assert first_is_inside.wait(30)
    graph = capture(second, **places[1])
    assert seen == [False] and gc.isenabled()
    assert torch.equal(graph.replay(), ones + 2)


@fault("E5", "refused by thread and by backend, with what to do instead; graphs are captured in turn")
def test_E5_replay_graphs_captured_inside_a_model_capture_are_refused(place, backend, x) -> None:
    model = FakeModel(backend.device)
    graphs = model.graphs(place, model.buffers())

    def model_graph() -> torch.Tensor:
        doubled = x * 2
        graphs.capture([4])
        return doubled

    with pytest.raises(CaptureError, match="while another capture runs in this thread: capture the graphs one after"):
        capture(model_graph, **place)
    assert torch.equal(capture(lambda: x * 2, **place).replay(), x * 2)
    graphs.capture([4])
    assert graphs.sizes == (4,)


@eager_break
def scale_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 3)


@fault("E8", "breaks ask at the call whether a capture runs; no module holds a stream; the default stream is refused")
def test_E8_a_break_made_at_import_works_in_and_out_of_any_capture_of_the_process(backend, x) -> None:
    out = torch.empty_like(x)
    scale_into(x, out)
    assert torch.equal(out, x * 3)
    for place in (place_of(backend), place_of(type(backend)())):
        graph = capture(lambda: (x + 0, scale_into(x, out), out + 1)[2], **place)
        assert graph.num_breaks == 1
        assert torch.equal(graph.replay(), x * 3 + 1)


@fault("E8")
def test_E8_the_default_stream_is_refused_with_the_remedy(place, backend, x) -> None:
    default = 0 if backend.name == "host" else torch.cuda.default_stream(backend.device)
    with pytest.raises(CaptureError, match=r"default stream cannot capture.*make_stream\(\)"):
        capture(lambda: x + 1, backend=backend, pool=place["pool"], stream=default)
    assert torch.equal(capture(lambda: x + 1, **place).replay(), x + 1)


IMPORT_ALL = """
import gc, importlib, json, pkgutil, torch
import replay_sim
before, absent = {id(one) for one in gc.get_objects()}, []
for module in pkgutil.walk_packages(replay_sim.__path__, "replay_sim."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name == "cuda" and not torch.cuda.is_available(), error
        absent.append(module.name)
from replay_sim.capture import CaptureBackend
kinds = CaptureBackend, torch.Tensor, torch.cuda.Stream, torch.cuda.CUDAGraph, torch.cuda.MemPool
held = [str(type(one)) for one in gc.get_objects() if issubclass(type(one), kinds) and id(one) not in before]
print(json.dumps([held, absent]))
"""


@fault("E8")
def test_E8_no_import_of_any_module_makes_a_backend_a_stream_or_a_tensor() -> None:
    """Wherever it would be kept; without a GPU all but the two modules that need its driver's bindings."""
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    held, absent = json.loads(run.stdout)
    assert held == [] and set(absent) <= {"replay_sim.capture.cuda", "replay_sim.capture.kernel_nodes"}
