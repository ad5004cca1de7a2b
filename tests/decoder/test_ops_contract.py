"""What all ops promise: shapes on meta tensors, one dispatched call, and real rows that pads cannot reach."""

from typing import Any

import pytest
import torch
from decoder import op_cases as cases
from decoder.op_cases import CASES, make_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.decoder import ops
from replay_sim.decoder.ops.library import SCHEMAS

DTYPES = [torch.float32, torch.bfloat16]
POISON = [torch.nan, torch.inf, -torch.inf, 1e30]
# Arguments by row, results by row; "pairs" instead where they run over the pairs up to offs[-1].
ROW_ARGUMENTS = {
    "boundary": (0, 1, 2, 3, 4),
    "merge": (0, 1, 2, 3),
    "collapse": (0, 1),
    "q_norm_kv_rope": (0, 2),
    "rope_": (0, 1),
    "write_kv_": (1,),
    "attend_": (1, 4, 6),
    "route": (0,),
    "moe_gather": (0,),
    "moe_combine": (2, 3),
}
PAIR_ARGUMENTS = {"grouped_matmul": (0,), "swiglu": (0,), "moe_combine": (0,)}
PAIR_RESULTS = {"moe_gather": (0,), "grouped_matmul": (0,), "swiglu": (0,), "route": (0,)}
WHOLE_RESULTS = {"route": (2,)}

every_op = pytest.mark.parametrize("name", CASES)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def call(name: str, args: list[Any]) -> tuple[Tensor, ...]:
    """The op's results, or the tensor that it wrote."""
    result = getattr(ops, name)(*args)
    if name.endswith("_"):
        assert result is None
        return (args[0],)
    return result if isinstance(result, tuple) else (result,)


def to_meta(args: list[Any]) -> list[Any]:
    return [value.to("meta") if isinstance(value, Tensor) else value for value in args]


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(SCHEMAS)


@every_op
@both_dtypes
def test_meta_results_have_the_shape_of_the_cpu_results(name: str, dtype: torch.dtype) -> None:
    """C12: the host backend takes result shapes from meta tensors."""
    args = make_case(name, dtype)
    for meta, real in zip(call(name, to_meta(args)), call(name, args), strict=True):
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
        assert meta.is_contiguous()


class Dispatched(TorchDispatchMode):
    """Lists what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@every_op
def test_an_op_is_one_dispatched_call(name: str) -> None:
    """C12: a capture records it as one operation."""
    args = make_case(name, torch.float32)
    with Dispatched() as dispatched:
        call(name, args)
    assert dispatched.names == [f"replay_sim.{name}.default"]


@every_op
@both_dtypes
def test_inference_mode_changes_no_bit_and_neither_does_a_second_run(name: str, dtype: torch.dtype) -> None:
    expected = call(name, make_case(name, dtype))
    with torch.inference_mode():
        again = call(name, make_case(name, dtype))
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def poisoned(name: str, dtype: torch.dtype, poison: float) -> list[Any]:
    args = make_case(name, dtype)
    pairs = pair_count(args)
    for first, indices in ((cases.REAL, ROW_ARGUMENTS.get(name, ())), (pairs, PAIR_ARGUMENTS.get(name, ()))):
        for index in indices:
            args[index][first:] = poison if args[index].is_floating_point() else 2**40
    return args


def pair_count(args: list[Any]) -> int:
    """The pairs of `cases.make_case`, from offs or from the places."""
    for value in args:
        if isinstance(value, Tensor) and value.shape == (cases.LOCAL_EXPERTS,):
            return int(value[-1])
        if isinstance(value, Tensor) and value.shape == (cases.ROWS, cases.TOP_K) and value.dtype == torch.int32:
            return int(value.max()) + 1
    return 0


def real_part(name: str, index: int, result: Tensor, pairs: int) -> Tensor:
    if name == "write_kv_" or index in WHOLE_RESULTS.get(name, ()):
        return result
    return result[:pairs] if index in PAIR_RESULTS.get(name, ()) else result[: cases.REAL]


@every_op
@both_dtypes
@pytest.mark.parametrize("poison", POISON)
def test_pads_change_no_bit_of_a_real_row(name: str, dtype: torch.dtype, poison: float) -> None:
    """G5, S8."""
    clean = make_case(name, dtype)
    expected, actual = call(name, clean), call(name, poisoned(name, dtype, poison))
    pairs = int(expected[2][-1]) if name == "route" else pair_count(clean)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        real = real_part(name, index, one, pairs)
        assert real.numel() > 0
        assert torch.equal(real, real_part(name, index, other, pairs))


def test_cache_entries_that_no_row_attends_change_no_bit() -> None:
    """S4: what lies below a window's start, or in another request's blocks, is not read."""
    clean, dirty = make_case("attend_", torch.float32), make_case("attend_", torch.float32)
    table = clean[7].tolist()
    read = {
        (request, at)
        for (request, p), start in zip(cases.ROW_PLACES, cases.WINDOW_STARTS, strict=True)
        for at in range(start, p + 1)
    }
    slots = {table[r][at // cases.BLOCK_SIZE] * cases.BLOCK_SIZE + at % cases.BLOCK_SIZE for r, at in read}
    unread = [slot for slot in range(cases.BLOCKS * cases.BLOCK_SIZE) if slot not in slots]
    assert unread
    dirty[2][unread] = torch.nan
    ops.attend_(*clean)
    ops.attend_(*dirty)
    assert torch.equal(clean[0], dirty[0])


def test_registering_a_module_that_lacks_an_op_is_an_error() -> None:
    with pytest.raises(AttributeError, match="boundary"):
        ops.library.register("CPU", torch.linalg)
