"""Faults injected into captures and steps: after each the error is the original, memory is back, and the next is right.

Every place of a capture in turn: warm-up, each operation, each break, each allocation, the user's interrupt; and around
it: another thread, garbage that holds a graph, a missing context, a mode left on.
"""

import ast
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from faults.helpers import live_pool_bytes, place_of
from faults.injection import KINDS, Fuse, Injected
from replay.fake_model import FakeModel
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import replay_sim.capture
from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture import CaptureError, capture, eager_break, warm_up
from replay_sim.capture.caching_allocator import OutOfMemoryError
from replay_sim.capture.eager_break import current_recorder
from replay_sim.capture.host import HostBackend
from replay_sim.replay.context import has_forward_context, use_forward_context

PIECEWISE = CudagraphMode.PIECEWISE


@eager_break
def scale_into(x: torch.Tensor, out: torch.Tensor, spend: Callable[[], None]) -> None:
    spend()
    out.copy_(x * 3)
    spend()


def layered(x: torch.Tensor, out: torch.Tensor, spend: Callable[[], None]) -> torch.Tensor:
    """Two segments around a break, with a place to fail before and after every operation."""
    spend()
    y = x * 2
    spend()
    y = y.relu()
    spend()
    scale_into(y, out, spend)
    spend()
    z = out + y
    spend()
    return z.sum(1)


def nothing() -> None:
    """Spends nothing."""


PLACES = 7


def assert_clean(place: dict, x: torch.Tensor, out: torch.Tensor) -> None:
    """No capture runs, the pool has no block in use, the collector is on; the next capture and replay are right."""
    gc.collect()
    assert current_recorder() is None and not has_forward_context()
    assert gc.isenabled()
    assert live_pool_bytes(place["backend"], place["pool"]) == 0
    graph = capture(lambda: layered(x, out, nothing), **place)
    assert (graph.num_breaks, len(graph.segments)) == (1, 2)
    x.add_(1)
    expected = layered(x, torch.empty_like(out), nothing)
    assert torch.equal(graph.replay(), expected)


@pytest.fixture
def tensors(backend, place) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a break's buffer, after a warm-up on the capture stream."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(backend.device)
    out = torch.empty_like(x)
    with backend.on_stream(place["stream"]):
        warm_up(lambda: layered(x, out, nothing), backend)
    return x, out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(1, PLACES + 1))
def test_an_error_at_any_place_of_a_capture_leaves_no_trace(place, tensors, at: int, kind) -> None:
    """C7."""
    x, out = tensors
    reserved = place["backend"].reserved_bytes()
    fuse = Fuse(at, kind)
    with pytest.raises(kind, match=f"injected at call {at}") as caught:
        capture(lambda: layered(x, out, fuse.spend), **place)
    assert caught.type is kind and caught.value.__cause__ is None
    del caught
    gc.collect()
    assert live_pool_bytes(place["backend"], place["pool"]) == 0
    assert place["backend"].reserved_bytes() - reserved <= 2 << 20
    assert_clean(place, x, out)


def test_there_is_no_other_place(place, tensors) -> None:
    fuse = Fuse(0, Injected)
    capture(lambda: layered(*tensors, fuse.spend), **place)
    assert fuse.spent == PLACES


FOLDER = Path(replay_sim.capture.__file__).parent
PUT_BACK = ("abort", "abort_segment", "_stop", "set_current_recorder", "allocate_bytes")


def put_back_lines(path: Path) -> set[int]:
    """The lines of a file that put things back: what an interrupt there would leave is Python's to say."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Try):
            for part in (*node.finalbody, *node.handlers):
                lines.update(range(part.lineno, part.end_lineno + 1))
        if isinstance(node, ast.With):
            lines.update(item.context_expr.lineno for item in node.items)
        if isinstance(node, ast.FunctionDef) and node.name in PUT_BACK:
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


class LineFuse:
    """Interrupts at the `at`-th line that runs in the files of capture, those that put things back not counted."""

    FILES = ("backend.py", "breakable_graph.py", "eager_break.py", "host.py", "host_tape.py")
    PUT_BACK: ClassVar = {str(FOLDER / name): put_back_lines(FOLDER / name) for name in FILES}

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.before = at, 0, sys.gettrace()

    def __enter__(self) -> "LineFuse":
        sys.settrace(lambda frame, event, _: self.trace if frame.f_code.co_filename in self.PUT_BACK else None)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        if event == "line" and frame.f_lineno not in self.PUT_BACK[frame.f_code.co_filename]:
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def test_an_interrupt_at_any_line_of_a_capture_leaves_no_trace(host_place, monkeypatch) -> None:
    """C7: the user's interrupt comes when it comes."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # hundreds of captures
    x, out = torch.ones(4, 4), torch.empty(4, 4)

    def function() -> torch.Tensor:
        scale_into(x * 2, out, nothing)
        return out + 1

    at, interrupted = 0, True
    while interrupted:
        at += 1
        with LineFuse(at) as fuse:
            try:
                graph = capture(function, **host_place)
                interrupted = False
            except KeyboardInterrupt:
                pass
        assert current_recorder() is None and gc.isenabled()
        assert _get_current_dispatch_mode() is None and _get_current_function_mode() is None
        assert live_pool_bytes(host_place["backend"], host_place["pool"]) == 0
    assert at > 100 and fuse.lines == at - 1
    x.add_(1)
    assert torch.equal(graph.replay(), x * 6 + 1)


class FailingMalloc:
    """An allocator's malloc that has no memory at its `at`-th call."""

    def __init__(self, backend: HostBackend, at: int) -> None:
        self.allocator, self.at, self.calls = backend.arena.allocator, at, 0
        self.malloc = self.allocator.malloc

    def __enter__(self) -> "FailingMalloc":
        def malloc(nbytes: int, stream: int = 0, pool: int | None = None) -> int:
            self.calls += 1
            if self.calls == self.at:
                raise OutOfMemoryError(nbytes, nbytes, 0, 0, 0)
            return self.malloc(nbytes, stream, pool)

        self.allocator.malloc = malloc  # type: ignore[method-assign]
        return self

    def __exit__(self, *_) -> None:
        del self.allocator.malloc


@pytest.fixture
def host_place() -> dict:
    return place_of(HostBackend(1 << 30))


def test_out_of_memory_at_each_allocation_of_a_capture_leaves_no_trace(host_place) -> None:
    """C7."""
    backend = host_place["backend"]
    x, out = torch.randn(8, 64), torch.empty(8, 64)
    with FailingMalloc(backend, 0) as counted:
        capture(lambda: layered(x, out, nothing), **host_place)
    assert counted.calls == 4  # each operation outside of the break
    for at in range(1, counted.calls + 1):
        with FailingMalloc(backend, at), pytest.raises(OutOfMemoryError) as caught:
            capture(lambda: layered(x, out, nothing), **host_place)
        assert caught.type is OutOfMemoryError
        del caught
        assert_clean(host_place, x, out)


@pytest.mark.parametrize("kind", [Injected, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(1, 8))
def test_an_error_at_any_run_of_the_replay_layers_marks_its_size_and_the_next_capture_is_right(
    place, backend, at: int, kind
) -> None:
    """G3, C7: in the warm-up and in the capture of each of three sizes."""
    model = FakeModel(backend.device)
    fuse, run_layers = Fuse(at, kind), model.run_layers

    def failing(inputs):
        fuse.spend()
        return run_layers(inputs)

    graphs = model.graphs(place, model.buffers(), failing)
    sizes = (8, 4, 2)
    try:
        graphs.capture(sizes)
    except kind as error:
        assert str(error) == f"injected at call {at}"
        (failed,) = graphs.failed
        assert graphs.failed[failed] == f"{kind.__name__}: injected at call {at}"
        assert graphs.sizes == tuple(sorted(sizes[: sizes.index(failed)]))
        del error
    else:
        assert at > fuse.spent
    gc.collect()
    assert live_pool_bytes(backend, place["pool"]) == 0 and not has_forward_context()
    graphs.capture([size for size in sizes if size not in graphs.sizes])
    assert graphs.sizes == (2, 4, 8) and graphs.failed == {}
    for size in sizes:
        batch, inputs = model.replay_batch([1, 5], size, PIECEWISE, 3), model.inputs(9, size)
        with use_forward_context(batch.context):
            hidden, _ = graphs.run(batch.rows, inputs)
        assert [row.tolist() for row in hidden] == [
            model.expected(inputs, row, 3 + i)[0] for i, row in enumerate((1, 5))
        ]


def test_a_second_thread_on_the_same_backend_is_refused_and_both_work_after(place, tensors) -> None:
    """C6: with the remedy, whichever of the two is first, in a segment or in a break."""
    x, out = tensors
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            capture(lambda: x + 1, **place)
        except BaseException as error:
            errors.append(error)

    def spend() -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    graph = capture(lambda: layered(x, out, spend), name="the first", **place)
    assert len(errors) == PLACES
    for error in errors:
        assert isinstance(error, CaptureError)
        assert "another thread captures 'the first' on this backend: give each thread a backend" in str(error)
    x.add_(1)
    assert torch.equal(graph.replay(), layered(x, torch.empty_like(out), nothing))
    errors.clear()
    spend()
    assert errors == []
    assert_clean(place, x, out)


class Mode(TorchDispatchMode):
    """Runs what it is asked to."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    """Calls what it is asked to."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make_mode", [Mode, FunctionMode])
def test_a_break_inside_a_mode_of_the_captured_function_is_refused(place, tensors, make_mode) -> None:
    """Its segment cannot end there: the recorder is not the innermost mode."""
    x, out = tensors

    def function() -> torch.Tensor:
        with make_mode():
            return layered(x, out, nothing)

    with pytest.raises(CaptureError, match="an eager break inside `with .*` of the captured function.*Leave it before"):
        capture(function, **place)
    assert_clean(place, x, out)

    def without_a_break() -> torch.Tensor:
        with make_mode():
            return x * 2 + 1

    assert torch.equal(capture(without_a_break, **place).replay(), x * 2 + 1)
    with make_mode():
        graph = capture(lambda: layered(x, out, nothing), **place)
    assert torch.equal(graph.replay(), layered(x, torch.empty_like(out), nothing))


def test_a_block_that_dies_inside_the_allocator_is_freed_once_that_is_left(host_place, monkeypatch) -> None:
    """E3: a collection in the middle of an allocation, on any thread, finds a graph's block in a garbage cycle."""
    backend, pool = host_place["backend"], host_place["pool"]
    allocator = backend.arena.allocator
    doomed = [backend.allocate_bytes(1 << 20, pool, 1)]
    split, seen = allocator._split, []

    def collecting(node, size: int) -> None:
        held = allocator._pools[pool].allocated
        thread = threading.Thread(target=doomed.clear)
        thread.start()
        thread.join()
        seen.append(allocator._pools[pool].allocated == held)
        split(node, size)

    monkeypatch.setattr(allocator, "_split", collecting)
    block = backend.allocate_bytes(1 << 19, pool, 1)
    assert seen == [True], "nothing is freed in the middle of an allocation"
    assert allocator.allocated_bytes(pool) == 1 << 19
    del block
    assert allocator.allocated_bytes(pool) == 0
