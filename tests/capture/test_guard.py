"""What a capture refuses before it runs, and the name of an operation that fails inside one, on any backend."""

import pytest
import torch
from torch import Tensor

from replay_sim.capture import CaptureError
from replay_sim.capture.guard import HostAccessGuard, OperationGuard, check_innermost

VALUES = (-1.0, 0.0, 2.0)
REFUSED = {
    "a device value read on the host": (lambda x: torch.equal(x, x), "aten.equal.* reads a device value on the host"),
    "a shape that depends on data": (lambda x: torch.nonzero(x), "aten.nonzero.* depends on data"),
    "a mask as an index": (lambda x: x[x > 0], "aten.index.* with a mask"),
    "a mask to write through": (lambda x: x.index_put((x > 0,), x[0]), "aten.index_put.* with a mask"),
    "a copy to another kind of device": (lambda x: x.to("meta"), "aten._to_copy.* copies between cpu and meta"),
    "a copy from another kind of device": (lambda x: x.copy_(x.new_empty(3, device="meta")), "copies between"),
}
ALLOWED = {
    "repeats with the size given": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), output_size=3),
    "an index of rows": lambda x: x[torch.tensor([2, 0])],
    "a write through rows": lambda x: x.index_put((torch.tensor([1]),), x[0]),
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


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_a_tensor_made_of_host_data_is_refused(make) -> None:
    """C10."""
    with pytest.raises(CaptureError, match=f"torch.{make.__name__} copies host data"), HostAccessGuard():
        make([1.0, 2.0])


def test_a_break_inside_a_mode_of_the_captured_function_is_refused() -> None:
    """C1: the mode would hold across segments."""
    with HostAccessGuard() as guard, OperationGuard() as recorder:
        check_innermost(recorder, guard)
        with pytest.raises(CaptureError, match="inside `with OperationGuard`"), OperationGuard():
            check_innermost(recorder, guard)
        with pytest.raises(CaptureError, match="inside `with HostAccessGuard`"), HostAccessGuard():
            check_innermost(recorder, guard)
