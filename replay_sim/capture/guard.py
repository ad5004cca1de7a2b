"""What a capture refuses before it runs: host reads of device values and shapes that depend on data (C10)."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from replay_sim.capture.backend import CaptureError

aten = torch.ops.aten

_HOST_READS = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.allclose,
    aten._linalg_check_errors,
}
_DATA_SHAPES = {
    aten.nonzero,
    aten.masked_select,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.unique_dim_consecutive,
    aten.repeat_interleave,
    aten.bincount,
}
_READ_REMEDY = "keep the value on the device, or move the read into an eager break"
_SHAPE_REMEDY = "pad to a fixed shape and mask, or move it into an eager break"
_DATA_REMEDY = "which a replay would not see change: make the tensor before the capture"

_HOST_READ_METHODS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.item,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
}
_HOST_WRITES = {torch.tensor, torch.as_tensor, torch.asarray}
_NOT_DATA = {torch.Tensor.new_tensor: (torch.Tensor,), torch.Tensor.new: (torch.Tensor, torch.Size, numbers.Integral)}
"""Methods that make a tensor of host data, and what they may be given instead: a tensor, or sizes."""


def check_operation(operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises CaptureError, naming the operation and the remedy, if the dispatched operation cannot be captured."""
    if not isinstance(operation, OpOverload):
        raise CaptureError(f"{operation} runs functions that it is given: call them instead, or use an eager break")
    packet = operation.overloadpacket
    if packet in _HOST_READS:
        raise CaptureError(f"{operation} reads a device value on the host, which no graph can replay: {_READ_REMEDY}")
    if packet in _DATA_SHAPES and kwargs.get("output_size") is None:
        raise CaptureError(f"the result shape of {operation} depends on data: {_SHAPE_REMEDY}")
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            raise CaptureError(f"{operation} with a mask has a shape that depends on data: {_SHAPE_REMEDY}")
    if packet in (aten._to_copy, aten.copy_):
        devices = {tensor.device.type for tensor in args if isinstance(tensor, torch.Tensor)}
        devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
        if len(devices) > 1:
            raise CaptureError(f"{operation} copies between {' and '.join(sorted(devices))}: {_READ_REMEDY}")
    if packet is aten.lift_fresh:
        _check_lifted(operation, args[0])
    elif packet is not aten.fill_ and any(map(_holds_host_number, (*args, *kwargs.values()))):
        raise CaptureError(
            f"{operation} takes a number from the host, whose value a replay would not see change: fill a slice, use "
            "index_fill_ or masked_fill_, or make it a tensor before the capture"
        )


def _check_lifted(operation: OpOverload, made: torch.Tensor) -> None:
    """Refuses a tensor that the host has just made, but for a number, which is marked as one.

    A GPU fills a slice with a number that is assigned to it; any other operation copies that number from the host, or
    is launched with its value.
    """
    if made.dim():
        raise CaptureError(f"{operation} copies host data, such as a list, into the capture, {_DATA_REMEDY}")
    made._is_host_number = True  # type: ignore[attr-defined]


def _holds_host_number(arg: Any) -> bool:
    """Whether an argument is a marked number or a list with one, deeper than which no operation's arguments are."""
    return any(map(_holds_host_number, arg)) if isinstance(arg, list | tuple) else hasattr(arg, "_is_host_number")


class OperationGuard(TorchDispatchMode):
    """Refuses what cannot be captured before it runs, and names the operation on any other error inside a capture."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation if it can be captured."""
        check_operation(operation, args, kwargs or {})
        try:
            return operation(*args, **(kwargs or {}))
        except Exception as error:
            error.add_note(f"while capturing {operation}")
            raise


class HostAccessGuard(TorchFunctionMode):
    """Refuses Tensor methods that read on the host without dispatching an operation, and tensors made of host data.

    `check_operation` refuses those that call no function seen here, such as torch.from_numpy and torch.Tensor([1.0]).
    torch.frombuffer and torch.from_dlpack, which dispatch no operation either, go unseen.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises CaptureError for a host read or a host write, otherwise calls `function`."""
        if function in _HOST_READ_METHODS:
            raise CaptureError(
                f"Tensor.{function.__name__} reads a device value on the host, which no graph replays: {_READ_REMEDY}"
            )
        if function in _HOST_WRITES:
            raise CaptureError(f"torch.{function.__name__} copies host data into the capture, {_DATA_REMEDY}")
        if function in _NOT_DATA and not all(isinstance(value, _NOT_DATA[function]) for value in _given(args, kwargs)):
            raise CaptureError(f"Tensor.{function.__name__} copies host data into the capture, {_DATA_REMEDY}")
        return function(*args, **(kwargs or {}))


def _given(args: tuple, kwargs: dict[str, Any] | None) -> tuple:
    """What a method of a tensor makes another one of."""
    return (*args[1:], *([kwargs["data"]] if kwargs and "data" in kwargs else []))


@functools.cache
def enter_guards_once() -> None:
    """Run an operation in both guards, once a process.

    PyTorch imports modules of its compiler at the first operation in a mode. In a capture that import would leave its
    frames to the garbage collector, which is off (C9), and with them the capture's tensors and their pool's memory.
    """
    with OperationGuard(), HostAccessGuard():
        torch.empty(1).view(1)


def check_innermost(recorder: TorchDispatchMode, guard: TorchFunctionMode) -> None:
    """Raises CaptureError if the captured function is inside a mode of its own, which would outlive the segment."""
    for own, innermost in ((recorder, _get_current_dispatch_mode()), (guard, _get_current_function_mode())):
        if innermost is not own:
            raise CaptureError(
                f"an eager break inside `with {type(innermost).__name__}` of the captured function: the mode would "
                "hold across segments. Leave it before the break, or enter it around the whole capture"
            )
