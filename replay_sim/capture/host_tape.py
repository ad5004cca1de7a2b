"""The host backend's tape: dispatched operations recorded over tensors that own nothing, and run again at replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.capture.backend import CaptureError
from replay_sim.capture.breakable_graph import map_tensors
from replay_sim.capture.guard import check_operation
from replay_sim.capture.source_line import SourceLine, calling_line

if TYPE_CHECKING:
    from replay_sim.capture.host import HostBackend
    from replay_sim.capture.ledger import Allocation, Ledger

aten = torch.ops.aten

# Share their input's storage although their schema does not say so.
_UNDECLARED_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default}
ALLOCATE_ONLY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def is_view(operation: Any) -> bool:
    """Whether the operation returns its input's memory, or changes how its input sees it, and reads no data."""
    return operation.is_view or operation in _UNDECLARED_VIEWS or torch.Tag.inplace_view in operation.tags


def decomposed(mode: TorchDispatchMode, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operation run under `mode` as the operations that it is composed of; NotImplemented if of none.

    In inference mode, unlike outside, composed operations are dispatched as they are; some of them, such as reshape,
    return a view or a copy.
    """
    if not torch.is_inference_mode_enabled():
        return NotImplemented
    with mode:
        return operation.decompose(*args, **kwargs)


@attrs.frozen
class Call:
    """One recorded operation; `results` are the tensors at fixed addresses that its fresh results go to.

    A result is None where the operation leaves it undefined. `source` is the line that called it, where a ledger is
    kept.
    """

    operation: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor | None, ...]
    source: SourceLine | None = None

    def run(self) -> None:
        """Run the operation on its recorded addresses."""
        returned = self.operation(*self.args, **self.kwargs)
        if self.results:
            for target, value in zip(self.results, _tensors_or_none(returned), strict=True):
                if target is None or value is None:
                    continue
                if target.shape != value.shape:
                    raise CaptureError(
                        f"{self.operation} gives {tuple(value.shape)} on a CPU, where its shape rule on meta tensors "
                        f"says {tuple(target.shape)}: run it in an eager break"
                    )
                target.copy_(value)


def _tensors_or_none(value: Any) -> list[torch.Tensor | None]:
    """The tensors in an operation's result, in order, and None where one is undefined."""
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors_or_none(item)]
    return [value] if value is None or isinstance(value, torch.Tensor) else []


@attrs.frozen
class Claim:
    """The place in a tape where an allocation was made: from there on its block is its own."""

    ledger: Ledger
    allocation: Allocation

    @property
    def source(self) -> SourceLine | None:
        """The line that made the allocation."""
        return self.allocation.source

    def run(self) -> None:
        """Enter the claim in the ledger."""
        self.ledger.claim(self.allocation)


class HostTape:
    """Recorded operations in order, and claims between them where a ledger is kept; `name` is the graph's.

    `source` is the line that the operation of a replay under way comes from.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: list[Call | Claim] = []
        self.source: SourceLine | None = None

    def __len__(self) -> int:
        return sum(isinstance(entry, Call) for entry in self.entries)

    def replay(self) -> None:
        """Run all operations in order."""
        with torch.no_grad():
            for entry in self.entries:
                self.source = entry.source
                entry.run()


class TapeRecorder(TorchDispatchMode):
    """Records every dispatched operation and hands out tensors of the right shape with no result in them.

    Shapes come from meta tensors. Views run for real, as they read no data. Raises CaptureError for operations that
    a graph cannot hold (C10).
    """

    supports_higher_order_operators = True

    def __init__(self, backend: HostBackend, pool: int, stream: int) -> None:
        super().__init__()
        self.tape = HostTape(backend.capture_name)
        self._backend, self._pool, self._stream = backend, pool, stream

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record one operation and return its results' tensors."""
        kwargs = kwargs or {}
        check_operation(operation, args, kwargs)
        with torch._C.DisableTorchFunction():
            result = decomposed(self, operation, args, kwargs)
            if result is not NotImplemented:
                return result
            with torch.inference_mode(False), torch.no_grad():
                return self._record(operation, args, kwargs)

    def _record(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if is_view(operation):
            return operation(*args, **kwargs)
        shapes = result_shapes(operation, args, kwargs)

        def allocate(like: torch.Tensor) -> torch.Tensor:
            return self._backend.allocate(like, self._pool, self._stream, self.tape, str(operation))

        if operation in ALLOCATE_ONLY:
            return allocate(shapes)
        written = written_arguments(operation, args, kwargs)
        returns = operation._schema.returns
        fresh: list[torch.Tensor | None] = []
        results: list[Any] = []
        for value, declared in zip(_as_tuple(shapes), returns, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                results.append(_of_same_shape(written.pop(0), value, operation))
            else:
                made = map_tensors(allocate, value)
                fresh.extend(_tensors_or_none(made))
                results.append(made)
        weak_ref = self._backend.weak_ref
        self.tape.entries.append(
            Call(
                operation,
                map_tensors(weak_ref, args),
                map_tensors(weak_ref, kwargs),
                tuple(None if tensor is None else weak_ref(tensor) for tensor in fresh),
                calling_line() if self._backend.ledger is not None else None,
            )
        )
        if not returns:
            return None
        return results[0] if len(returns) == 1 else tuple(results)


def _of_same_shape(written: torch.Tensor, meta: torch.Tensor, operation: Any) -> torch.Tensor:
    """`written`, which the operation writes; CaptureError if it would be resized to the shape of `meta`."""
    if isinstance(meta, torch.Tensor) and written.shape != meta.shape:
        raise CaptureError(
            f"{operation} resizes the tensor of shape {tuple(written.shape)} that it writes to {tuple(meta.shape)}: "
            "give it a tensor of its result's shape"
        )
    return written


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def result_shapes(operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operation's results on meta tensors; a shape error is the operation's own, as it would be eagerly."""
    meta_kwargs = map_tensors(_meta, kwargs)
    if "device" in meta_kwargs or any(argument.name == "device" for argument in operation._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
        meta_kwargs.pop("pin_memory", None)
    try:
        return operation(*map_tensors(_meta, args), **meta_kwargs)
    except NotImplementedError as error:
        raise CaptureError(f"{operation} has no shape rule on meta tensors: run it in an eager break") from error


def written_arguments(operation: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operation writes, in schema order."""
    written = []
    for index, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs[argument.name])
    return written
