"""The expert kernels against plain loops, compiled on a GPU and interpreted without one."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from replay_sim.decoder.ops import cuda as ops

EXPERTS, FIRST, LOCAL, TOP_K, SCALING = 10, 3, 4, 3, 1.5
HIDDEN, INTER, LIMIT = 80, 20, 0.7
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # poison, interpreted by NumPy
pytestmark = pytest.mark.sanitizer
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def normal(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def count(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def chosen_experts(scores: list[float]) -> list[int]:
    return sorted(range(EXPERTS), key=lambda e: (-scores[e], e))[:TOP_K]


def pairs_of(chosen: list[list[int]]) -> list[tuple[int, int, int]]:
    """(expert, token, choice) of the local experts' pairs, sorted by expert, then token."""
    pairs = [(e, t, j) for t, experts in enumerate(chosen) for j, e in enumerate(experts)]
    return sorted(pair for pair in pairs if FIRST <= pair[0] < FIRST + LOCAL)


def assert_pairs(routed: tuple[Tensor, ...], chosen: list[list[int]], tokens: int) -> None:
    pair_token, pair_pos, offs, _ = routed
    pairs = pairs_of(chosen)
    expected_pos = torch.full((tokens, TOP_K), -1, dtype=torch.int32)
    for index, (_, token, choice) in enumerate(pairs):
        expected_pos[token, choice] = index
    assert pair_token[: len(pairs)].tolist() == [token for _, token, _ in pairs]
    assert torch.equal(pair_pos.cpu(), expected_pos)
    assert offs.tolist() == [sum(e <= FIRST + local for e, _, _ in pairs) for local in range(LOCAL)]
    assert {t.dtype for t in (pair_token, pair_pos, offs)} == {torch.int32}


@dtypes
@pytest.mark.parametrize(("tokens", "real"), [(1, 1), (5, 3), (37, 37), (37, 0)])
def test_pairs_of_the_local_experts_are_sorted_by_expert_and_token(dtype: torch.dtype, tokens: int, real: int) -> None:
    """decoder.md, experts; pads are routed nowhere (S8)."""
    logits = normal(0, tokens, EXPERTS, dtype=dtype)
    routed = ops.route(logits, count(real), FIRST, LOCAL, TOP_K, SCALING)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()[:real]
    chosen = [chosen_experts(row) for row in scores.tolist()]
    assert_pairs(routed, chosen, tokens)
    index = torch.tensor(chosen, dtype=torch.int64, device=DEVICE).reshape(real, TOP_K)
    picked = scores.gather(1, index)
    assert_close(routed[3][:real], picked / picked.sum(1, keepdim=True) * SCALING)


def test_equal_scores_go_to_the_lower_expert() -> None:
    """decoder.md, experts."""
    logits = torch.zeros(2, EXPERTS, device=DEVICE)
    logits[1, [9, 4]] = 1.0
    routed = ops.route(logits, count(2), FIRST, LOCAL, TOP_K, SCALING)
    assert_pairs(routed, [[0, 1, 2], [4, 9, 0]], 2)


def test_scores_of_very_negative_logits_keep_their_order() -> None:
    logits = torch.tensor([[-40.0 + e for e in range(EXPERTS)]], device=DEVICE)
    routed = ops.route(logits, count(1), FIRST, LOCAL, TOP_K, SCALING)
    assert_pairs(routed, [[9, 8, 7]], 1)
    picked = torch.tensor([[-31.0, -32.0, -33.0]], dtype=torch.float64, device=DEVICE).exp().log1p().sqrt()
    assert_close(routed[3], picked / picked.sum() * SCALING)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_pads_hold_changes_no_bit_of_the_routing(poison: float) -> None:
    """G5, S8."""
    logits = normal(0, 9, EXPERTS)
    clean = ops.route(logits, count(6), FIRST, LOCAL, TOP_K, SCALING)
    logits[6:] = poison
    poisoned = ops.route(logits, count(6), FIRST, LOCAL, TOP_K, SCALING)
    live = int(clean[2][-1])
    assert torch.equal(poisoned[0][:live], clean[0][:live])
    for after, before in zip(poisoned[1:], clean[1:], strict=True):
        assert torch.equal(after, before)


def test_a_row_of_nan_is_routed_to_experts_that_exist() -> None:
    routed = ops.route(torch.full((3, EXPERTS), float("nan"), device=DEVICE), count(3), 0, LOCAL, TOP_K, SCALING)
    assert routed[2].tolist() == [3, 6, 9, 9]
    assert routed[0].tolist() == [0, 1, 2] * 3


@dtypes
@pytest.mark.parametrize("tokens", [1, 5, 37])
def test_rows_move_to_their_experts_and_back(dtype: torch.dtype, tokens: int) -> None:
    """decoder.md, experts: gather, grouped product and weighted sum, each against a loop over pairs."""
    logits, u = normal(0, tokens, EXPERTS), normal(1, tokens, HIDDEN, dtype=dtype)
    w = normal(2, LOCAL, HIDDEN, INTER, dtype=dtype) / HIDDEN**0.5
    back = normal(3, LOCAL, INTER, HIDDEN, dtype=dtype) / INTER**0.5
    pair_token, pair_pos, offs, weights = ops.route(logits, count(tokens), FIRST, LOCAL, TOP_K, SCALING)
    live = int(offs[-1])
    xs = ops.moe_gather(u, pair_token, offs)
    assert torch.equal(xs[:live], u[pair_token[:live].long()])

    expert = torch.bucketize(torch.arange(live), offs.cpu(), right=True).to(DEVICE)
    ys = ops.grouped_matmul(xs, w, offs)
    assert_close(ys[:live], torch.einsum("ph,phn->pn", xs[:live].double(), w[expert].double()))
    ys = ops.grouped_matmul(ys, back, offs)
    ys[live:] = float("nan")
    shared = normal(4, tokens, HIDDEN, dtype=dtype)
    combined = ops.moe_combine(ys, pair_pos, weights, shared)
    expected = shared.double()
    for token, choice in (pair_pos >= 0).nonzero().tolist():
        expected[token] += weights[token, choice].double() * ys[pair_pos[token, choice]].double()
    assert_close(combined, expected)


@dtypes
def test_a_grouped_product_of_whole_16_bytes_skips_experts_of_no_rows(dtype: torch.dtype) -> None:
    """decoder.md, experts: on a GPU in bfloat16 this is the framework's own product."""
    xs, w = normal(0, 40, 64, dtype=dtype), normal(1, LOCAL, 64, 48, dtype=dtype) / 8
    offs = torch.tensor([0, 17, 17, 35], dtype=torch.int32, device=DEVICE)
    ys = ops.grouped_matmul(xs, w, offs)
    assert_close(ys[:17], xs[:17].double() @ w[1].double())
    assert_close(ys[17:35], xs[17:35].double() @ w[3].double())


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_swiglu_clamps_gate_from_above_and_up_on_both_sides(dtype: torch.dtype, rows: int) -> None:
    """decoder.md, experts."""
    x = normal(0, rows, 2 * INTER, dtype=dtype)
    gate, up = x.double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    assert_close(ops.swiglu(x, LIMIT, None), expected)
    offs = torch.tensor([0, (rows + 1) // 2], dtype=torch.int32, device=DEVICE)
    assert_close(ops.swiglu(x, LIMIT, offs)[: (rows + 1) // 2], expected[: (rows + 1) // 2])
