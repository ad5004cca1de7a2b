"""Recording by shapes alone: every operation allocates and frees as on a GPU, and none is computed or kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.capture.backend import CaptureError
from replay_sim.capture.breakable_graph import tensors_in
from replay_sim.capture.guard import check_operation
from replay_sim.capture.host_tape import ALLOCATE_ONLY, decomposed, is_view, result_shapes, written_arguments

if TYPE_CHECKING:
    from replay_sim.capture.host import HostBackend


@attrs.frozen
class Scratch:
    """Memory that an operation's GPU implementation allocates beside its results: what it is for, and its bytes.

    It is freed when the operation ends, or with `kept` once for each stream by the library that uses it, and never.
    """

    name: str
    nbytes: int
    kept: bool = False


AllocationOrder = Callable[[Any, tuple], "tuple[int | Scratch, ...] | None"]
"""What an operation's GPU implementation allocates for its arguments, in order: a result by its index, or scratch.
None if that is its results alone, in their order."""


NewTensor = tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype, int]
"""Shape, strides or None if contiguous, dtype, bytes."""


@attrs.frozen
class ShapeRule:
    """What an operation does on arguments of certain shapes.

    `fresh` are its new tensors and `order` is that of allocation; `returned` holds an index into `fresh` for each
    result, or None for a written argument.
    """

    fresh: tuple[NewTensor, ...]
    order: tuple[int | Scratch, ...]
    returned: tuple[int | None, ...]
    launches: bool


@attrs.frozen
class ShapeSegment:
    """A recorded stretch of which only the number of operations is known."""

    num_operations: int

    def replay(self) -> None:
        """Raises CaptureError: there is nothing to run."""
        raise CaptureError("a graph recorded by shapes alone cannot run: capture it with shapes_only=False")


class ShapeRecorder(TorchDispatchMode):
    """Gives every operation's results memory of `pool` on `stream`, uninitialised, and runs none but views.

    With `forbids`, what a graph cannot hold raises CaptureError (C10). Rules are kept in the backend by operation
    and shapes, so that equal layers cost little.
    """

    def __init__(self, backend: HostBackend, pool: int | None, stream: int, *, forbids: bool) -> None:
        super().__init__()
        self._backend, self._pool, self._stream, self._forbids = backend, pool, stream, forbids
        self.supports_higher_order_operators = forbids
        self.num_operations = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allocate one operation's results."""
        kwargs = kwargs or {}
        if self._forbids:
            check_operation(operation, args, kwargs)
        with torch._C.DisableTorchFunction():
            result = decomposed(self, operation, args, kwargs)
            if result is not NotImplemented:
                return result
            if is_view(operation):
                return operation(*args, **kwargs)
            key = (operation, *map(_key, args), *((name, _key(kwargs[name])) for name in kwargs))
            rule = self._backend.shape_rules.get(key)
            if rule is None:
                rule = self._backend.shape_rules[key] = self._make_rule(operation, args, kwargs)
            self.num_operations += rule.launches
            return self._apply(rule, operation, args, kwargs)

    def _make_rule(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> ShapeRule:
        shapes = result_shapes(operation, args, kwargs)
        returned: list[int | None] = []
        fresh: list[torch.Tensor] = []
        values = shapes if isinstance(shapes, tuple) else (shapes,)
        for value, declared in zip(values, operation._schema.returns, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                returned.append(None)
            elif isinstance(value, torch.Tensor):
                returned.append(len(fresh))
                fresh.append(value)
            elif tensors_in(value):
                raise CaptureError(f"{operation} returns a list of new tensors, which has no shape rule")
        order = self._backend.allocation_order(operation, args) or tuple(range(len(fresh)))
        return ShapeRule(
            tuple((tuple(t.shape), _strides(t), t.dtype, t.untyped_storage().nbytes()) for t in fresh),
            order,
            tuple(returned),
            operation not in ALLOCATE_ONLY,
        )

    def _apply(self, rule: ShapeRule, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        made: dict[int, torch.Tensor] = {}
        scratch = []
        for step in rule.order:
            if isinstance(step, int):
                made[step] = self._make_tensor(rule.fresh[step])
            elif not step.kept:
                scratch.append(self._backend.allocate_bytes(step.nbytes, self._pool, self._stream))
            elif (step, self._stream) not in self._backend.kept:
                made_now = self._backend.allocate_bytes(step.nbytes, self._pool, self._stream)
                self._backend.kept[step, self._stream] = made_now
        written = written_arguments(operation, args, kwargs) if None in rule.returned else []
        results = tuple(written.pop(0) if index is None else made[index] for index in rule.returned)
        if len(operation._schema.returns) > 1:
            return results
        return results[0] if results else None

    def _make_tensor(self, like: NewTensor) -> torch.Tensor:
        shape, stride, dtype, nbytes = like
        if nbytes == 0:
            return torch.empty_strided(shape, stride or (1,) * len(shape), dtype=dtype)
        flat = torch.frombuffer(self._backend.allocate_bytes(nbytes, self._pool, self._stream), dtype=dtype)
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def _strides(meta: torch.Tensor) -> tuple[int, ...] | None:
    dense = meta.is_contiguous() and meta.untyped_storage().nbytes() == math.prod(meta.shape) * meta.dtype.itemsize
    return None if dense and meta.numel() else meta.stride()


def _key(value: Any) -> Any:
    """A hashable stand-in for an argument in which a tensor is its shape, strides and dtype."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, tuple | list) else value
