"""Movement of rows against a row-by-row oracle: gather, clear the pads, scatter, zero the rest."""

import pytest
import torch
from torch import Tensor

from replay_sim.replay.movement import gather_into, gather_rows, scatter_into

TOKENS, BUFFER_ROWS = 11, 8
SHAPES = {"wide": (3,), "scalar": (), "matrix": (2, 2), "ids": ()}
DTYPES = {"wide": torch.bfloat16, "scalar": torch.int64, "matrix": torch.float32, "ids": torch.int32}
KEPT = {
    "no rows": [],
    "one row": [10],
    "the last rows of two requests": [2, 3, 4, 9, 10],
    "as many rows as the buffer": [0, 1, 2, 4, 6, 7, 9, 10],
}
every_mix = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


@pytest.fixture
def device(backend) -> torch.device:
    return backend.device


def random_rows(rows: int, device: torch.device, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn((rows, *shape), generator=generator) * 100 for name, shape in SHAPES.items()}
    return {name: value.to(DTYPES[name]).to(device) for name, value in drawn.items()}


def poisoned(rows: int, device: torch.device) -> dict[str, Tensor]:
    values = {name: torch.full((rows, *shape), 77.0).to(DTYPES[name]) for name, shape in SHAPES.items()}
    for value in values.values():
        if value.is_floating_point():
            value[::2] = torch.nan
            value[1::2] = torch.inf
    return {name: value.to(device) for name, value in values.items()}


def index(kept: list[int], device: torch.device) -> Tensor:
    return torch.tensor(kept, dtype=torch.int64, device=device)


@every_mix
def test_gathered_rows_are_the_inputs_rows_in_order(device, kept: list[int]) -> None:
    """L5."""
    inputs = random_rows(TOKENS, device, 0)
    gathered = gather_rows(index(kept, device), inputs)
    for name, value in inputs.items():
        got = gathered[name]
        assert got is not None and got.dtype == value.dtype
        assert got.tolist() == [value[row].tolist() for row in kept]


def test_an_absent_input_stays_absent(device) -> None:
    """L5."""
    inputs = random_rows(TOKENS, device, 0) | {"ids": None}
    assert gather_rows(index([4], device), inputs)["ids"] is None


@every_mix
@pytest.mark.parametrize("padded", [BUFFER_ROWS, BUFFER_ROWS - 1, 5, 1])
def test_a_gather_fills_the_kept_rows_and_clears_the_pads(device, kept: list[int], padded: int) -> None:
    """B2, U2: whatever an earlier batch left, also NaN and infinities; rows beyond the graph's are not touched."""
    if len(kept) > padded:
        pytest.skip("more rows than the graph")
    inputs, buffers, before = (
        random_rows(TOKENS, device, 1),
        poisoned(BUFFER_ROWS, device),
        poisoned(BUFFER_ROWS, device),
    )
    gather_into(index(kept, device), inputs, buffers, padded)
    for name, buffer in buffers.items():
        zero = torch.zeros(SHAPES[name]).tolist()
        rows = [inputs[name][row].tolist() for row in kept]
        assert buffer[:padded].tolist() == rows + [zero] * (padded - len(kept)), name
        assert torch.equal(buffer[padded:].nan_to_num(nan=5.0), before[name][padded:].nan_to_num(nan=5.0))


def test_a_smaller_batch_after_a_larger_one_leaves_none_of_its_rows(device) -> None:
    """B2, U2: batch A of 8 rows with NaN in row 6, then batch B of 3 in the same graph."""
    buffers = {name: value.zero_() for name, value in poisoned(BUFFER_ROWS, device).items()}
    first = random_rows(TOKENS, device, 2)
    first["matrix"][6] = torch.nan
    gather_into(index(list(range(8)), device), first, buffers, BUFFER_ROWS)
    second = random_rows(TOKENS, device, 3)
    gather_into(index([0, 4, 5], device), second, buffers, BUFFER_ROWS)
    for name, buffer in buffers.items():
        assert torch.equal(buffer[:3], second[name][[0, 4, 5]]) and not bool(buffer[3:].any())
    assert torch.equal(buffers["matrix"].amax(), second["matrix"][[0, 4, 5]].amax().clamp(min=0))


def test_a_gather_leaves_the_inputs_as_they_are_and_the_buffers_where_they_are(device) -> None:
    """B1, U13: rows are gathered to separate storage."""
    inputs, copies = random_rows(TOKENS, device, 4), random_rows(TOKENS, device, 4)
    buffers = poisoned(BUFFER_ROWS, device)
    addresses = [buffer.data_ptr() for buffer in buffers.values()]
    gather_into(index([1, 2, 7], device), inputs, buffers, BUFFER_ROWS)
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert [buffer.data_ptr() for buffer in buffers.values()] == addresses


def test_the_buffer_of_an_absent_input_keeps_nothing_of_an_earlier_batch(device) -> None:
    """B2."""
    buffers = poisoned(BUFFER_ROWS, device)
    gather_into(index([0, 1], device), random_rows(TOKENS, device, 5) | {"ids": None}, buffers, 4)
    assert buffers["ids"].tolist() == [0] * 4 + [77] * 4


def test_more_rows_than_the_graph_holds_are_refused_before_anything_is_written(device) -> None:
    """B3, G3."""
    buffers = {name: value.zero_() for name, value in poisoned(BUFFER_ROWS, device).items()}
    with pytest.raises(ValueError, match="3 rows .* of 2 rows"):
        gather_into(index([0, 1, 2], device), random_rows(TOKENS, device, 6), buffers, 2)
    assert not any(bool(buffer.any()) for buffer in buffers.values())


@pytest.mark.parametrize("wrong", [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]]), torch.ones(2)])
def test_a_row_index_that_is_not_a_list_of_int64_is_refused(device, wrong: Tensor) -> None:
    """G8, S2: one index dtype, checked on the graph path and on the eager one."""
    inputs = random_rows(TOKENS, device, 7)
    for gather in (
        lambda: gather_rows(wrong.to(device), inputs),
        lambda: gather_into(wrong.to(device), inputs, poisoned(BUFFER_ROWS, device), BUFFER_ROWS),
    ):
        with pytest.raises(ValueError, match="rows must be int64"):
            gather()


@every_mix
def test_a_scatter_puts_the_outputs_at_their_rows_and_zeros_everywhere_else(device, kept: list[int]) -> None:
    """L6: a trimmed row is zero, whatever the target held."""
    outputs, targets = random_rows(len(kept), device, 8), poisoned(TOKENS, device)
    scatter_into(index(kept, device), list(outputs.values()), list(targets.values()))
    for name, target in targets.items():
        expected = [torch.zeros(SHAPES[name]).tolist()] * TOKENS
        for place, row in enumerate(kept):
            expected[row] = outputs[name][place].tolist()
        assert target.tolist() == expected, name


def test_a_scatter_of_one_output_too_few_is_an_error(device) -> None:
    """L5."""
    outputs, targets = random_rows(1, device, 9), poisoned(TOKENS, device)
    with pytest.raises(ValueError):
        scatter_into(index([4], device), list(outputs.values())[:-1], list(targets.values()))


@every_mix
def test_a_scatter_after_a_gather_gives_the_kept_rows_back(device, kept: list[int]) -> None:
    """L5, L6."""
    inputs, targets = random_rows(TOKENS, device, 10), poisoned(TOKENS, device)
    gathered = gather_rows(index(kept, device), inputs)
    scatter_into(index(kept, device), [gathered[name] for name in targets], list(targets.values()))
    trimmed = [row for row in range(TOKENS) if row not in kept]
    for name, target in targets.items():
        assert torch.equal(target[kept], inputs[name][kept]) and not bool(target[trimmed].any())
