"""The rotary, cache and attention kernels against float64 loops, compiled on a GPU and interpreted without one."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from replay_sim.decoder.ops import cuda as ops

Q_LORA, DIM, ROPE, HEADS = 40, 24, 8, 3
MAX_POSITION, RMS_EPS = 512, 1e-6
WINDOW, TOPK, BLOCK_SIZE, BLOCKS = 8, 11, 7, 96
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
# (request, position, first window position): a first row, short and full windows, a start above p - window + 1
# (S4), positions around topk, and long contexts of no multiple of it
PLACES = [(0, 0, 0), (0, 5, 0), (0, 10, 3), (0, 11, 4), (1, 12, 12), (1, 40, 35), (1, 100, 93), (2, 221, 216)]

pytestmark = pytest.mark.sanitizer
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def normal(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def cos_sin() -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).float().to(DEVICE)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x (T, ..., d) in float64 with its last ROPE values rotated by its row's position."""
    table = cos_sin().double()[positions].reshape(-1, *[1] * (x.dim() - 2), ROPE)
    cos, sin = table.chunk(2, -1)
    plain, a, b = x.double().split([x.shape[-1] - ROPE, ROPE // 2, ROPE // 2], -1)
    return torch.cat((plain, a * cos - b * sin, b * cos + a * sin), -1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_the_query_latent_is_normalised_and_the_kv_latent_rotated(dtype: torch.dtype, rows: int) -> None:
    """decoder.md, attention."""
    qkv_a, weight = normal(0, rows, Q_LORA + DIM, dtype=dtype), normal(1, Q_LORA, dtype=dtype)
    positions = torch.arange(rows, device=DEVICE) * 13
    qn, kv = ops.q_norm_kv_rope(qkv_a, weight, positions, cos_sin(), Q_LORA, RMS_EPS)
    q = qkv_a[:, :Q_LORA].double()
    assert_close(qn, q / (q.square().mean(1, keepdim=True) + RMS_EPS).sqrt() * weight.double())
    assert_close(kv, rotated(qkv_a[:, Q_LORA:], positions))
    assert torch.equal(kv[:, : DIM - ROPE], qkv_a[:, Q_LORA : Q_LORA + DIM - ROPE])


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_rope_turns_the_last_values_of_each_head_in_place(dtype: torch.dtype, rows: int) -> None:
    """decoder.md, attention."""
    x = normal(0, rows, HEADS, DIM, dtype=dtype)
    positions = torch.arange(rows, device=DEVICE) * 13
    expected = rotated(x, positions)
    ops.rope_(x, positions, cos_sin())
    assert_close(x, expected)


def test_a_position_outside_the_table_reads_nothing_outside_it() -> None:
    """S8: what pads hold as positions is harmless."""
    x = normal(0, 2, HEADS, DIM)
    expected = rotated(x, torch.tensor([0, MAX_POSITION - 1], device=DEVICE))
    ops.rope_(x, torch.tensor([-(10**12), 10**12], device=DEVICE), cos_sin())
    assert_close(x, expected)


@dtypes
def test_each_row_is_written_to_its_slot_and_a_slot_of_minus_one_writes_nothing(dtype: torch.dtype) -> None:
    """S8."""
    cache, kv = normal(0, 20, DIM, dtype=dtype), normal(1, 5, DIM, dtype=dtype)
    kv[3:] = float("nan")
    slots = torch.tensor([7, 0, 19, -1, -1], device=DEVICE)
    expected = cache.clone()
    expected[slots[:3]] = kv[:3]
    ops.write_kv_(cache, kv, slots)
    assert torch.equal(cache, expected)


class Paged:
    """Caches whose every slot that no key of PLACES uses holds NaN, and the arguments of a call."""

    def __init__(self, dtype: torch.dtype, shared: bool, heads: int = HEADS, dim: int = DIM) -> None:
        generator = torch.Generator().manual_seed(3)
        self.block_table = torch.randperm(BLOCKS, generator=generator).reshape(3, -1).int().to(DEVICE)
        self.q = normal(0, len(PLACES), heads, dim, dtype=dtype)
        slots = BLOCKS * BLOCK_SIZE
        self.window_cache = torch.full((slots, dim), float("nan"), dtype=dtype, device=DEVICE)
        self.shared_cache = torch.full_like(self.window_cache, float("nan")) if shared else None
        for request, position, start in PLACES:
            window = [self.slot(request, p) for p in range(start, position + 1)]
            self.window_cache[window] = normal(request, len(window), dim, dtype=dtype)
            if self.shared_cache is not None:
                chosen = [self.slot(request, p) for p in self.shared_positions(position)]
                self.shared_cache[chosen] = normal(position, len(chosen), dim, dtype=dtype)
        self.request, self.position, self.start = (torch.tensor(c, device=DEVICE) for c in zip(*PLACES, strict=True))

    def slot(self, request: int, position: int) -> int:
        block, offset = divmod(position, BLOCK_SIZE)
        return int(self.block_table[request, block]) * BLOCK_SIZE + offset

    @staticmethod
    def shared_positions(position: int) -> list[int]:
        count = min(TOPK, position + 1)
        return [i * (position + 1) // count for i in range(count)]

    def attend(self, out: Tensor, rows: slice = slice(None)) -> None:
        ops.attend_(
            out, self.q[rows], self.window_cache, self.shared_cache, self.position[rows],
            self.request[rows].int(), self.start[rows], self.block_table, BLOCK_SIZE, WINDOW, TOPK, 0.3,
        )  # fmt: skip

    def expected(self, row: int) -> Tensor:
        request, position, start = PLACES[row]
        keys = [self.window_cache[self.slot(request, p)] for p in range(start, position + 1)]
        if self.shared_cache is not None:
            keys += [self.shared_cache[self.slot(request, p)] for p in self.shared_positions(position)]
        latents = torch.stack(keys).double()
        return (self.q[row].double() @ latents.T * 0.3).softmax(-1) @ latents


@dtypes
@pytest.mark.parametrize("shared", [True, False])
def test_a_row_attends_its_window_and_its_shared_entries_and_nothing_else(dtype: torch.dtype, shared: bool) -> None:
    """decoder.md, attention; S4. Every slot that is not a key holds NaN."""
    paged = Paged(dtype, shared)
    out = torch.full_like(paged.q, float("nan"))
    paged.attend(out)
    for row in range(len(PLACES)):
        assert_close(out[row], paged.expected(row))


@dtypes
def test_heads_and_widths_of_a_power_of_two_attend_alike(dtype: torch.dtype) -> None:
    """decoder.md, attention, with the head count padded to a tensor core's rows and the width not padded."""
    paged = Paged(dtype, shared=True, heads=8, dim=64)
    out = torch.empty_like(paged.q)
    paged.attend(out)
    for row in range(len(PLACES)):
        assert_close(out[row], paged.expected(row))


@dtypes
def test_a_row_of_no_request_writes_nothing_and_changes_no_bit_of_another(dtype: torch.dtype) -> None:
    """S8, G5."""
    paged = Paged(dtype, shared=True)
    clean = torch.empty_like(paged.q)
    paged.attend(clean)
    paged.q[5:] = 1e30
    paged.request[5:], paged.position[5:], paged.start[5:] = -1, 10**12, -(10**12)
    out = torch.full_like(paged.q, 7.0)
    paged.attend(out)
    assert torch.equal(out[:5], clean[:5])
    assert (out[5:] == 7.0).all()


@dtypes
def test_a_row_attends_to_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    """G5."""
    paged = Paged(dtype, shared=True)
    together, alone = torch.empty_like(paged.q), torch.empty_like(paged.q)
    paged.attend(together)
    for row in range(len(PLACES)):
        paged.attend(alone[row : row + 1], slice(row, row + 1))
    assert torch.equal(together, alone)
