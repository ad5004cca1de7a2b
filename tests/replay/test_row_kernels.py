"""The kernels that move rows, and the operations' plain twins on a CPU, against a row-by-row oracle."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from replay_sim.replay import row_kernels, row_ops
from replay_sim.replay.row_layout import MOST_TILE_ROWS, TILE_WORDS, RowLayout

TOKENS, BUFFER_ROWS = 70, 40
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
# Row shapes and dtypes: the contract's at a usual width, at widths of no power of two, and more or fewer tensors.
CONTRACTS = {
    "the seven inputs": [
        ((64,), BF16),
        ((), I64),
        ((), I32),
        ((4,), F32),
        ((4, 1), F32),
        ((4, 4), F32),
        ((4, 64), BF16),
    ],
    "hidden size 65, ids of int64": [((65,), BF16), ((), I64), ((), I64), ((3,), F32), ((3, 65), BF16)],
    "hidden size 5 in float32": [((5,), F32), ((), I64), ((2, 5), F32)],
    "one tensor": [((3,), BF16)],
    "rows wider than a tile": [((TILE_WORDS * 4 + 20,), F32), ((1280, 4), BF16), ((2,), F32)],
}
KEPT = {
    "no rows": [],
    "one row": [69],
    "the last rows of two requests": [*range(12, 20), *range(60, 70)],
    "as many rows as the buffer": list(range(3, 3 + BUFFER_ROWS)),
}
PLAIN = SimpleNamespace(
    store_addresses_=torch.ops.replay_sim.store_addresses_.default,
    gather_rows_=torch.ops.replay_sim.gather_rows_.default,
    scatter_rows_=torch.ops.replay_sim.scatter_rows_.default,
)
every_contract = pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
# Under compute-sanitizer one mix with every contract: as many rows as the graph, and fewer.
every_mix = pytest.mark.parametrize(
    "kept",
    [
        pytest.param(kept, id=mix, marks=[pytest.mark.sanitizer] if mix == "the last rows of two requests" else [])
        for mix, kept in KEPT.items()
    ],
)


@pytest.fixture(params=["kernel", "plain"])
def moves(request) -> SimpleNamespace:
    """The three functions, and the device that they run on."""
    if request.param == "plain":
        return SimpleNamespace(**vars(PLAIN), device="cpu")
    names = ("store_addresses_", "gather_rows_", "scatter_rows_")
    return SimpleNamespace(**{name: getattr(row_kernels, name) for name in names}, device=DEVICE)


def random_rows(contract: list, rows: int, seed: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn((rows, *shape), generator=generator) * 100 + 0.5).to(dtype).to(device) for shape, dtype in contract
    ]


def filled(contract: list, rows: int, value: float, device: str) -> list[Tensor]:
    return [torch.full((rows, *shape), value).to(dtype).to(device) for shape, dtype in contract]


def poisoned(contract: list, rows: int, device: str) -> list[Tensor]:
    """Rows of NaN and infinities, of 77 where there are none."""
    tensors = filled(contract, rows, 77, device)
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor[::2], tensor[1::2] = torch.nan, torch.inf
    return tensors


def gather(moves, inputs: list[Tensor | None], buffers: list[Tensor], kept: list[int], padded: int) -> None:
    """The gather of a step: the index has a pad of -1 after the kept rows, as the metadata does."""
    table = torch.full((len(inputs),), 3, dtype=I64, device=moves.device)
    moves.store_addresses_(table, inputs)
    rows = torch.tensor(kept + [-1] * (BUFFER_ROWS - len(kept)), dtype=I64, device=moves.device)
    moves.gather_rows_(buffers, table, rows, torch.tensor([len(kept)], dtype=I32, device=moves.device), padded)


@every_mix
@every_contract
def test_a_gather_fills_the_kept_rows_clears_the_pads_and_touches_nothing_else(moves, contract, kept) -> None:
    """B2: whatever the buffers held, also NaN and infinities, in rows below and beyond the graph's."""
    inputs = random_rows(contract, TOKENS, 0, moves.device)
    for padded in sorted({len(kept), min(len(kept) + 1, BUFFER_ROWS), BUFFER_ROWS} - {0}):
        buffers = poisoned(contract, BUFFER_ROWS, moves.device)
        before = [buffer.clone() for buffer in buffers]
        gather(moves, list(inputs), buffers, kept, padded)
        for value, buffer, old in zip(inputs, buffers, before, strict=True):
            assert torch.equal(buffer[: len(kept)], value[kept])
            assert not bool(buffer[len(kept) : padded].any())
            assert buffer[padded:].view(torch.uint8).tolist() == old[padded:].view(torch.uint8).tolist()


@pytest.mark.sanitizer
@pytest.mark.parametrize("absent", [0, 2, 6])
def test_the_buffer_of_an_absent_input_is_cleared(moves, absent: int) -> None:
    """L5, B2."""
    contract = CONTRACTS["the seven inputs"]
    inputs: list[Tensor | None] = list(random_rows(contract, TOKENS, 1, moves.device))
    inputs[absent] = None
    buffers = poisoned(contract, BUFFER_ROWS, moves.device)
    gather(moves, inputs, buffers, [5, 6, 7], 8)
    for index, (value, buffer) in enumerate(zip(inputs, buffers, strict=True)):
        assert value is None or torch.equal(buffer[:3], value[5:8])
        assert not bool(buffer[0 if index == absent else 3 : 8].any())


def index(kept: list[int], length: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A step's index with pads of -1, its length, and its inverse over `length` rows."""
    rows = torch.tensor(kept + [-1] * (BUFFER_ROWS - len(kept)), dtype=I64)
    places = torch.full((length,), -1, dtype=I32)
    places[kept] = torch.arange(len(kept), dtype=I32)
    return rows.to(device), torch.tensor([len(kept)], dtype=I32, device=device), places.to(device)


@pytest.mark.sanitizer
@every_contract
def test_scatters_one_after_the_other_leave_the_last_ones_rows_and_zeros(moves, contract) -> None:
    """L6: mixes that grow, shrink, move and end in nothing; the map may be longer than the targets."""
    targets = filled(contract, TOKENS, 0, moves.device)
    written = torch.zeros((len(targets), TOKENS), dtype=torch.uint8, device=moves.device)
    for seed, kept in enumerate([*KEPT.values(), KEPT["one row"], [0], []]):
        outputs = random_rows(contract, BUFFER_ROWS, seed, moves.device)
        moves.scatter_rows_(targets, written, outputs, *index(kept, TOKENS + 9, moves.device))
        for target, output in zip(targets, outputs, strict=True):
            expected = torch.zeros_like(target)
            expected[kept] = output[: len(kept)]
            assert torch.equal(target, expected)
        expected_flags = [int(row in kept) for row in range(TOKENS)]
        assert written.tolist() == [expected_flags] * len(targets)


@pytest.mark.sanitizer
def test_a_scatter_touches_no_row_that_its_flags_call_zero(moves) -> None:
    """L6: 8,192 rows are not cleared a step; a planted value in a row that nobody wrote stays."""
    contract = CONTRACTS["one tensor"]
    (target,) = targets = filled(contract, TOKENS, 0, moves.device)
    written = torch.zeros((1, TOKENS), dtype=torch.uint8, device=moves.device)
    target[30], target[31], written[0, 31] = 9, 9, 1
    moves.scatter_rows_(
        targets, written, random_rows(contract, 2, 0, moves.device), *index([4, 5], TOKENS, moves.device)
    )
    assert (
        bool((target[30] == 9).all())
        and not bool(target[31].any())
        and written[0].nonzero().flatten().tolist() == [4, 5]
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_targets_of_any_number_of_rows_are_scattered_whole(moves, rows: int) -> None:
    """L6: no multiple of what a program takes."""
    contract = CONTRACTS["hidden size 65, ids of int64"]
    targets = filled(contract, rows, 0, moves.device)
    outputs = random_rows(contract, rows, 3, moves.device)
    written = torch.zeros((len(targets), rows), dtype=torch.uint8, device=moves.device)
    moves.scatter_rows_(targets, written, outputs, *index(list(range(rows)), rows, moves.device))
    assert all(torch.equal(*pair) for pair in zip(targets, outputs, strict=True))


@pytest.mark.sanitizer
@every_contract
def test_an_outputs_pads_and_rows_beyond_the_targets_are_not_scattered(moves, contract) -> None:
    """L6: outputs as long as the graph's size, poisoned beyond the kept rows; rows beyond the targets."""
    targets = filled(contract, 20, 0, moves.device)
    written = torch.zeros((len(targets), 20), dtype=torch.uint8, device=moves.device)
    kept, outputs = [3, 7, 25], poisoned(contract, BUFFER_ROWS, moves.device)
    for output, values in zip(outputs, random_rows(contract, 3, 5, moves.device), strict=True):
        output[:3] = values
    rows, count, places = index(kept, TOKENS, moves.device)
    moves.scatter_rows_(targets, written, outputs, rows, count, places)
    for target, output in zip(targets, outputs, strict=True):
        expected = torch.zeros_like(target)
        expected[3], expected[7] = output[0], output[1]
        assert torch.equal(target, expected)
    assert written.tolist() == [[int(row in kept) for row in range(20)]] * len(targets)


@pytest.mark.parametrize("row_bytes", [2, 4, 8, 10, 16, 64, 130, 520, 1024, 8192, 10240, 40960, 16464])
def test_tiles_cover_a_row_once(row_bytes: int) -> None:
    """Every word lies in one tile, words fill the row, and a tile is no more than a program holds."""
    layout = RowLayout.of(row_bytes)
    assert layout.word_bytes * layout.words == row_bytes and layout.word_bytes in (2, 4, 8)
    assert (layout.tiles - 1) * layout.columns < layout.words <= layout.tiles * layout.columns
    assert layout.columns & (layout.columns - 1) == 0 < layout.rows
    assert layout.columns * layout.rows <= TILE_WORDS
    assert layout.words * layout.rows >= TILE_WORDS // 2 or layout.rows == MOST_TILE_ROWS or layout.tiles > 1
    for rows in (0, 1, layout.rows, layout.rows + 1):
        blocks = [range(first, first + layout.rows) for first in range(0, rows, layout.rows)]
        assert layout.programs(rows) == layout.tiles * len(blocks)


@pytest.mark.parametrize("row_bytes", [0, 1, 5])
def test_a_row_of_an_odd_number_of_bytes_is_refused(row_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"a row of {row_bytes} bytes cannot be moved"):
        RowLayout.of(row_bytes)


def test_an_input_that_the_kernel_cannot_read_is_named() -> None:
    """B3: before anything is stored."""
    table = torch.full((1,), 5)
    with pytest.raises(ValueError, match="residual has strides"):
        row_ops.store_addresses(table, {"residual": torch.zeros(4, 6)[:, ::2]})
    with pytest.raises(ValueError, match="pre_mix lies at 0x.* 16 aligned bytes"):
        row_ops.store_addresses(table, {"pre_mix": torch.zeros(8)[1:5]})
    with pytest.raises(ValueError, match="table is torch.int32"):
        row_ops.store_addresses(table.int(), {"pre_mix": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"table is .* must be contiguous torch.int64 of shape \(2,\)"):
        row_ops.store_addresses(table, {"pre_mix": torch.zeros(4), "residual": None})
    assert table.tolist() == [5]


ONE, TWO, FINE = [(6, 4)], [(6, 4), (6, 4)], torch.ones(2, 4)
ASKEW = torch.ones(9)[1:].view(2, 4)


@pytest.mark.parametrize(
    ("shapes", "outputs", "message"),
    [
        (ONE, [FINE, FINE], "2 outputs for 1 targets"),
        ([], [], "0 outputs for 0 targets: one for each, at least one"),
        ([(6, 4), (5, 4)], [FINE, FINE], "target 1 has 5 rows, target 0 has 6"),
        (ONE, [FINE.double()], "output 0 is torch.float64"),
        (ONE, [torch.ones(2, 5)], "output 0 is .* shape"),
        (ONE, [torch.ones(4, 2).t()], "output 0 has strides"),
        (ONE, [torch.ones(400, 4)], "rows has .* entries for outputs of 400 rows"),
        (ONE, [ASKEW], "output 0 lies at 0x.*: its rows are read in 16 aligned bytes"),
        (TWO, [FINE, ASKEW], "output 1 lies at 0x.*: its rows are read in 16 aligned bytes"),
        (TWO, [FINE, FINE[:1]], "output 1 has 1 rows, output 0 has 2"),
        (TWO, [FINE, torch.ones(3, 4)], "output 1 has 3 rows, output 0 has 2"),
    ],
)
def test_outputs_that_do_not_fit_their_targets_are_refused_before_anything_is_written(shapes, outputs, message) -> None:
    """B3."""
    targets, (rows, count, places) = [torch.zeros(shape) for shape in shapes], index([1], 6, "cpu")
    written = torch.zeros(len(targets), 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        row_ops.scatter_rows(targets, written, outputs, rows, count, places)
    assert not any(bool(tensor.any()) for tensor in (*targets, written))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("targets", lambda _: [torch.zeros(4, 6).t()], "target 0 has strides"),
        ("targets", lambda _: [torch.zeros(25)[1:].view(6, 4)], "target 0 lies at 0x"),
        ("written", lambda value: value.bool(), "written is torch.bool"),
        (
            "written",
            lambda value: value.repeat(2, 1),
            r"written is .* must be contiguous torch.uint8 of shape \(1, 6\)",
        ),
        ("written", lambda _: torch.zeros(1, 12, dtype=torch.uint8)[:, ::2], "written is .* strides"),
        ("rows", lambda value: value.int(), "rows is torch.int32 .* must be contiguous torch.int64"),
        ("rows", lambda value: value.unsqueeze(0), r"rows is torch.int64 of shape \(1, "),
        ("rows", lambda value: value.repeat(2)[::2], "rows is .* strides"),
        ("num_rows", lambda value: value.repeat(3), r"num_rows is .* of shape \(3,\)"),
        ("output_row_of", lambda value: value.long(), "output_row_of is torch.int64 .* must be contiguous torch.int32"),
        ("output_row_of", lambda value: value[:5], "output_row_of has 5 rows, the targets 6"),
    ],
)
def test_what_a_scatters_kernel_would_misread_is_refused(name: str, change, message: str) -> None:
    """B3, G8."""
    rows, count, places = index([1], 6, "cpu")
    given = {
        "targets": [torch.zeros(6, 4)],
        "written": torch.zeros(1, 6, dtype=torch.uint8),
        "outputs": [FINE],
        "rows": rows,
        "num_rows": count,
        "output_row_of": places,
    }
    with pytest.raises(ValueError, match=message):
        row_ops.scatter_rows(**(given | {name: change(given[name])}))
    assert not given["targets"][0].any()


def test_a_gather_beyond_its_buffers_is_refused() -> None:
    """B3."""
    with pytest.raises(ValueError, match="padded is 9: the buffers have 8 rows"):
        row_ops.gather_by_address(
            [torch.zeros(8, 2)], torch.zeros(1, dtype=I64), torch.zeros(20, dtype=I64), torch.zeros(1, dtype=I32), 9
        )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("buffers", [torch.zeros(2, 8).t()], "buffer 0 has strides"),
        ("buffers", [torch.zeros(17)[1:].view(8, 2)], "buffer 0 lies at 0x"),
        ("addresses", torch.zeros(2, dtype=I64), "addresses is"),
        ("rows", torch.zeros(20, dtype=I32), "rows is torch.int32"),
        ("num_rows", torch.zeros(0, dtype=I32), "num_rows is"),
    ],
)
def test_what_a_gathers_kernel_would_misread_is_refused(name: str, value, message: str) -> None:
    """B3, G8."""
    given = {
        "buffers": [torch.zeros(8, 2)],
        "addresses": torch.zeros(1, dtype=I64),
        "rows": torch.zeros(20, dtype=I64),
        "num_rows": torch.zeros(1, dtype=I32),
    }
    with pytest.raises(ValueError, match=message):
        row_ops.gather_by_address(**(given | {name: value}), padded=8)
