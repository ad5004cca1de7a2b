"""What a capture refuses before it runs, and the name of an operation that fails inside one, on any backend."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from replay_sim.capture import CaptureError, capture
from replay_sim.capture.function_check import check_function
from replay_sim.capture.guard import HostAccessGuard, OperationGuard, check_innermost, check_operation
from replay_sim.capture.host import HostBackend

VALUES = (-1.0, 0.0, 2.0)
PLACES, COUNTS, ONE = torch.tensor([2, 0]), torch.tensor([1, 0, 2]), torch.tensor([1])
REFUSED = {
    "a device value read on the host": (lambda x: torch.equal(x, x), "aten.equal.* reads a device value on the host"),
    "a shape that depends on data": (lambda x: torch.nonzero(x), "aten.nonzero.* depends on data"),
    "a mask as an index": (lambda x: x[x > 0], "aten.index.* with a mask"),
    "a mask to write through": (lambda x: x.index_put((x > 0,), x[0]), "aten.index_put.* with a mask"),
    "a function of functions": (
        lambda x: torch.ops.higher_order.cond(x[0] > 0, torch.neg, torch.abs, (x,)),
        "cond runs functions that it is given: call them instead",
    ),
    "a copy to another kind of device": (lambda x: x.to("meta"), "aten._to_copy.* copies between cpu and meta"),
    "a copy from another kind of device": (lambda x: x.copy_(x.new_empty(3, device="meta")), "copies between"),
}
ALLOWED = {
    "repeats with the size given": lambda x: x.repeat_interleave(COUNTS, output_size=3),
    "an index of rows": lambda x: x[PLACES],
    "a write through rows": lambda x: x.index_put((ONE,), x[0]),
    "a copy to another dtype": lambda x: x.to(torch.float64),
    "a copy on one device": lambda x: torch.empty(3).copy_(x),
}


@pytest.fixture
def x() -> Tensor:
    return torch.tensor(VALUES)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_captured_is_refused_before_it_runs(x, what: str) -> None:
    """C10: the error names the operation."""
    call, message = REFUSED[what]
    with pytest.raises(CaptureError, match=message), OperationGuard():
        call(x)
    assert x.tolist() == list(VALUES)


@pytest.mark.parametrize("what", ALLOWED)
def test_what_a_graph_can_hold_runs_as_it_is(x, what: str) -> None:
    """C10: its close relatives are not refused."""
    call = ALLOWED[what]
    with OperationGuard():
        guarded = call(x)
    assert torch.equal(guarded, call(x))


def test_an_index_given_by_keyword_is_looked_at(x) -> None:
    """C10."""
    index = torch.ops.aten.index.Tensor
    check_operation(index, (x,), {"indices": [PLACES]})
    with pytest.raises(CaptureError, match="aten.index.* with a mask"):
        check_operation(index, (x,), {"indices": [None, x > 0]})


def test_a_number_given_by_keyword_is_looked_at(x) -> None:
    """C10."""
    with pytest.raises(CaptureError, match="aten.add.* takes a number"), OperationGuard():
        given = number(2.0)
        check_operation(torch.ops.aten.add.Tensor, (x,), {"other": given})


def test_an_operation_that_fails_inside_a_capture_is_named_beside_its_own_error(x) -> None:
    """C7, C10: the original error is what the caller sees."""
    with pytest.raises(RuntimeError) as raised, OperationGuard():
        torch.mm(x, x)
    assert not isinstance(raised.value, CaptureError) and "aten.mm" in raised.value.__notes__[0]


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__repr__, Tensor.numpy])
def test_a_method_that_reads_on_the_host_is_refused_by_its_name(x, read) -> None:
    """C10: also where it dispatches no operation."""
    with pytest.raises(CaptureError, match=f"Tensor.{read.__name__} reads a device value"), HostAccessGuard():
        read(x[:1])


def number(value: float) -> Tensor:
    return torch.from_numpy(np.array(value, dtype=np.float32 if isinstance(value, float) else np.int64))


HOST_DATA = {
    "torch.tensor": (lambda x: torch.tensor(VALUES), "torch.tensor copies host data"),
    "torch.as_tensor": (lambda x: torch.as_tensor(VALUES), "torch.as_tensor copies host data"),
    "torch.asarray": (lambda x: torch.asarray(VALUES), "torch.asarray copies host data"),
    "torch.from_numpy": (lambda x: torch.from_numpy(np.ones(3)), "aten.lift_fresh.* copies host data"),
    "Tensor.new_tensor": (lambda x: x.new_tensor(VALUES), "Tensor.new_tensor copies host data"),
    "Tensor.new_tensor of a number": (lambda x: x.new_tensor(2.0), "Tensor.new_tensor copies host data"),
    "Tensor.new_tensor by keyword": (lambda x: x.new_tensor(data=VALUES), "Tensor.new_tensor copies host data"),
    "Tensor.new": (lambda x: torch.Tensor.new(x, [1.0, 2.0, 3.0]), "Tensor.new copies host data"),
    "Tensor.new of a tuple": (lambda x: x.new((1, 2, 3)), "Tensor.new copies host data"),
    "torch.Tensor": (lambda x: torch.Tensor([1.0, 2.0, 3.0]), "aten.lift_fresh.* copies host data"),
    "torch.FloatTensor": (lambda x: torch.FloatTensor([1.0, 2.0, 3.0]), "aten.lift_fresh.* copies host data"),
    "a list as an index": (lambda x: x[[2, 0, 1]], "aten.lift_fresh.* copies host data, such as a list"),
    "Tensor.new of an array": (lambda x: x.new(np.ones(3)), "Tensor.new copies host data"),
    "a number in one element": (lambda x: x.clone().__setitem__(0, 2.0), "aten.copy_.* takes a number from the host"),
    "a number in rows": (lambda x: x.clone().__setitem__(PLACES, 2.0), "aten.index_put_.* takes a number"),
    "a number of NumPy as a tensor": (lambda x: x * number(2.0), "aten.mul.* takes a number from the host, whose valu"),
    "a number of NumPy where a mask is": (lambda x: x.masked_fill(x > 0, number(2.0)), "aten.masked_fill.* takes a n"),
    "a number of NumPy among tensors": (lambda x: torch.stack([number(2.0), x[0]]), "aten.stack.* takes a number"),
    "a number of NumPy as an index": (lambda x: x.index_put((number(1),), x[0]), "aten.index_put.* takes a number"),
}


@pytest.mark.parametrize("what", HOST_DATA)
def test_a_tensor_made_of_host_data_is_refused(x, what: str) -> None:
    """C10: a GPU would wait for a copy of memory that no replay reads again."""
    make, message = HOST_DATA[what]
    with pytest.raises(CaptureError, match=message), OperationGuard(), HostAccessGuard():
        make(x)


@pytest.mark.parametrize("what", HOST_DATA)
def test_a_function_that_makes_a_tensor_of_host_data_is_found_unsafe(x, what: str) -> None:
    """C10, C12: on a CPU, where the copy itself would be none."""
    make, message = HOST_DATA[what]
    (finding,) = check_function(lambda x: (x + 1, make(x)), (x,)).findings
    assert finding.kind == "forbidden" and re.match(message, finding.message)
    assert finding.source is not None and finding.source.path == __file__


def test_by_shapes_alone_host_data_and_a_function_of_functions_are_refused_too(x) -> None:
    """C10, C12: also where an operation on a tensor of the same shapes was recorded before."""
    backend = HostBackend(1 << 30, shapes_only=True)
    place = {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}
    zero = torch.zeros(())
    capture(lambda: x.clone()[0].copy_(zero), **place)
    refused = {**{what: HOST_DATA[what] for what in ("torch.Tensor", "a number in one element")}, **REFUSED}
    for what in ("torch.Tensor", "a number in one element", "a function of functions"):
        make, message = refused[what]
        with pytest.raises(CaptureError, match=message):
            capture(lambda make=make: make(x), **place)


NO_DATA = {
    "a number in a slice": (lambda x: fill(x.clone(), slice(0, 2)), [5.0, 5.0, 2.0]),
    "a number everywhere": (lambda x: fill(x.clone(), ...), [5.0, 5.0, 5.0]),
    "a number by index_fill": (lambda x: x.index_fill(0, PLACES, 5.0), [5.0, 0.0, 5.0]),
    "memory by its size": (lambda x: x.new(3).copy_(x), list(VALUES)),
    "memory by a size of NumPy": (lambda x: x.new(np.int64(3)).copy_(x), list(VALUES)),
    "memory by its shape": (lambda x: x.new(torch.Size((3,))).copy_(x), list(VALUES)),
    "memory of the default type": (lambda x: torch.Tensor(3).copy_(x), list(VALUES)),
    "a new tensor of a tensor": (lambda x: x.new_tensor(x) + 1, [0.0, 1.0, 3.0]),
}


def fill(tensor: Tensor, where: object) -> Tensor:
    tensor[where] = 5.0
    return tensor


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("what", NO_DATA)
def test_memory_alone_and_a_number_that_fills_it_are_no_host_data(x, what: str) -> None:
    """C10: a GPU is given the number with the launch."""
    make, expected = NO_DATA[what]
    with OperationGuard(), HostAccessGuard():
        made = make(x)
    assert made.tolist() == expected
    assert check_function(make, (x,)).is_safe


def test_a_break_inside_a_mode_of_the_captured_function_is_refused() -> None:
    """C1: the mode would hold across segments."""
    with HostAccessGuard() as guard, OperationGuard() as recorder:
        check_innermost(recorder, guard)
        with pytest.raises(CaptureError, match="inside `with OperationGuard`"), OperationGuard():
            check_innermost(recorder, guard)
        with pytest.raises(CaptureError, match="inside `with HostAccessGuard`"), HostAccessGuard():
            check_innermost(recorder, guard)
