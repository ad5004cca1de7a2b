"""Arguments for every op of the decoder: small, seeded, the first REAL of ROWS rows real, the others pads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROWS, REAL = 11, 8
HIDDEN, HC, HEADS, HEAD_DIM, ROPE, Q_LORA = 64, 4, 4, 32, 8, 48
EXPERTS, FIRST_EXPERT, LOCAL_EXPERTS, TOP_K, INTER = 8, 2, 4, 3, 16
MAX_POSITION, WINDOW, TOPK, BLOCK_SIZE, BLOCKS = 64, 8, 5, 4, 10
RMS_EPS, HC_EPS, SINKHORN_ITERS, ALPHA, SCALING, LIMIT = 1e-6, 1e-6, 20, 2.0, 1.5, 0.7
# (request, position) of the real rows: a short request, one longer than the window, one as long as topk.
ROW_PLACES = [(0, 0), (0, 1), (1, 17), (1, 18), (1, 19), (1, 20), (2, 3), (2, 4)]
WINDOW_STARTS = [0, 0, 12, 12, 12, 13, 0, 1]


class Draw:
    """Seeded tensors."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def act(self, *size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=self.generator) * std).to(self.dtype)

    def f32(self, *size: int, std: float = 1.0) -> Tensor:
        return torch.randn(size, generator=self.generator) * std

    def mixes(self) -> tuple[Tensor, Tensor, Tensor]:
        res = self.f32(ROWS, HC, HC).exp()
        return (
            self.f32(ROWS, HC).sigmoid(),
            self.f32(ROWS, HC, 1).sigmoid() * 2,
            res / res.sum(2, keepdim=True),
        )


def cos_sin_table() -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def positions() -> Tensor:
    return torch.tensor([p for _, p in ROW_PLACES] + [0] * (ROWS - REAL))


def block_table() -> Tensor:
    return torch.tensor([[7, 3, 9, 0, 5, 1], [2, 8, 4, 6, 9, 7], [1, 5, 0, 3, 2, 4]], dtype=torch.int32)


def boundary(draw: Draw) -> list[Any]:
    mixes = 2 * HC + HC * HC
    weights = [
        draw.act(HIDDEN),
        draw.f32(HC * HIDDEN, mixes, std=(HC * HIDDEN) ** -0.5),
        draw.f32(3),
        draw.f32(mixes),
    ]
    return [
        draw.act(ROWS, HIDDEN),
        draw.act(ROWS, HC, HIDDEN),
        *draw.mixes(),
        *weights,
        SINKHORN_ITERS,
        RMS_EPS,
        HC_EPS,
        ALPHA,
    ]


def merge(draw: Draw) -> list[Any]:
    _, post, res = draw.mixes()
    return [draw.act(ROWS, HIDDEN), draw.act(ROWS, HC, HIDDEN), post, res]


def collapse(draw: Draw) -> list[Any]:
    return [draw.act(ROWS, HC, HIDDEN), draw.mixes()[0], draw.act(HIDDEN), RMS_EPS]


def q_norm_kv_rope(draw: Draw) -> list[Any]:
    return [
        draw.act(ROWS, Q_LORA + HEAD_DIM),
        draw.act(Q_LORA),
        positions(),
        cos_sin_table(),
        Q_LORA,
        RMS_EPS,
    ]


def rope_(draw: Draw) -> list[Any]:
    return [draw.act(ROWS, HEADS, HEAD_DIM), positions(), cos_sin_table()]


def write_kv_(draw: Draw) -> list[Any]:
    slots = torch.tensor([31, 2, 17, 4, -1, 9, 0, 39] + [-1] * (ROWS - REAL))
    return [draw.act(BLOCKS * BLOCK_SIZE, HEAD_DIM), draw.act(ROWS, HEAD_DIM), slots]


def attend_(draw: Draw, shared: bool = True) -> list[Any]:
    pads = ROWS - REAL
    return [
        draw.act(ROWS, HEADS, HEAD_DIM),
        draw.act(ROWS, HEADS, HEAD_DIM),
        draw.act(BLOCKS * BLOCK_SIZE, HEAD_DIM),
        draw.act(BLOCKS * BLOCK_SIZE, HEAD_DIM) if shared else None,
        positions(),
        torch.tensor([r for r, _ in ROW_PLACES] + [-1] * pads, dtype=torch.int32),
        torch.tensor(WINDOW_STARTS + [0] * pads),
        block_table(),
        BLOCK_SIZE,
        WINDOW,
        TOPK,
        HEAD_DIM**-0.5,
    ]


def route(draw: Draw) -> list[Any]:
    num_rows = torch.tensor([REAL], dtype=torch.int32)
    return [draw.act(ROWS, EXPERTS), num_rows, FIRST_EXPERT, LOCAL_EXPERTS, TOP_K, SCALING]


def _routed(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs by a plain walk in (expert, row) order; each row takes experts row, row + 1, row + 2."""
    pair_pos = torch.full((ROWS, TOP_K), -1, dtype=torch.int32)
    tokens, offs = [], []
    for expert in range(FIRST_EXPERT, FIRST_EXPERT + LOCAL_EXPERTS):
        for row in range(REAL):
            place = (expert - row) % EXPERTS
            if place < TOP_K:
                pair_pos[row, place] = len(tokens)
                tokens.append(row)
        offs.append(len(tokens))
    tokens += [2**30] * (ROWS * TOP_K - len(tokens))
    weights = draw.f32(ROWS, TOP_K).sigmoid()
    return (
        torch.tensor(tokens, dtype=torch.int32),
        pair_pos,
        torch.tensor(offs, dtype=torch.int32),
        weights,
    )


def moe_gather(draw: Draw) -> list[Any]:
    pair_token, _, offs, _ = _routed(draw)
    return [draw.act(ROWS, HIDDEN), pair_token, offs]


def grouped_matmul(draw: Draw) -> list[Any]:
    _, _, offs, _ = _routed(draw)
    return [
        draw.act(ROWS * TOP_K, HIDDEN),
        draw.act(LOCAL_EXPERTS, HIDDEN, 2 * INTER, std=HIDDEN**-0.5),
        offs,
    ]


def swiglu(draw: Draw) -> list[Any]:
    _, _, offs, _ = _routed(draw)
    return [draw.act(ROWS * TOP_K, 2 * INTER), LIMIT, offs]


def moe_combine(draw: Draw) -> list[Any]:
    _, pair_pos, _, weights = _routed(draw)
    return [draw.act(ROWS * TOP_K, HIDDEN), pair_pos, weights, draw.act(ROWS, HIDDEN)]


CASES: dict[str, Callable[[Draw], list[Any]]] = {
    builder.__name__: builder
    for builder in (
        boundary,
        merge,
        collapse,
        q_norm_kv_rope,
        rope_,
        write_kv_,
        attend_,
        route,
        moe_gather,
        grouped_matmul,
        swiglu,
        moe_combine,
    )
}


def make_case(name: str, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """The arguments of op `name`, the same for the same seed."""
    return CASES[name](Draw(dtype, seed))
