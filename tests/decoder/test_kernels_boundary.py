"""The boundary kernels against float64 products written out, compiled on a GPU and interpreted without one."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from replay_sim.decoder.ops import cuda as ops

HIDDEN = 80  # no power of two, and less than one split
WIDE = 300  # three splits, the last one partial
HC, ITERS, RMS_EPS, HC_EPS, ALPHA = 4, 20, 1e-6, 1e-5, 1.5
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # poison, interpreted by NumPy
    pytest.mark.sanitizer,
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def draw(rows: int, hidden: int, dtype: torch.dtype, hc: int = HC, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    mixes = 2 * hc + hc * hc
    inputs = {
        "x": normal(rows, hidden).to(dtype),
        "residual": normal(rows, hc, hidden).to(dtype),
        "pre": normal(rows, hc).sigmoid(),
        "post": normal(rows, hc, 1).sigmoid(),
        "res": normal(rows, hc, hc).softmax(-1),
        "norm_weight": normal(hidden).to(dtype),
        "mix_weight": normal(hc * hidden, mixes) / (hc * hidden) ** 0.5,
        "mix_scale": normal(3),
        "mix_bias": normal(mixes),
    }
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def run_boundary(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return ops.boundary(**inputs, sinkhorn_iters=ITERS, rms_eps=RMS_EPS, hc_eps=HC_EPS, alpha=ALPHA)


def merged(inputs: dict[str, Tensor]) -> Tensor:
    x, residual, post, res = (inputs[name].double() for name in ("x", "residual", "post", "res"))
    return torch.einsum("tij,tjh->tih", res, residual) + post * x[:, None, :]


def collapsed(streams: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    value = (inputs["pre"].double()[:, :, None] * streams.double()).sum(1)
    return value / (value.square().mean(1, keepdim=True) + RMS_EPS).sqrt() * inputs["norm_weight"].double()


def mixed(streams: Tensor, inputs: dict[str, Tensor], hc: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = streams.double().flatten(1)
    flat = flat / (flat.square().mean(1, keepdim=True) + RMS_EPS).sqrt()
    mix, scale, bias = flat @ inputs["mix_weight"].double(), inputs["mix_scale"].double(), inputs["mix_bias"].double()
    pre = (mix[:, :hc] * scale[0] + bias[:hc]).sigmoid() + HC_EPS
    post = ALPHA * (mix[:, hc : 2 * hc] * scale[1] + bias[hc : 2 * hc]).sigmoid()
    res = (mix[:, 2 * hc :] * scale[2] + bias[2 * hc :]).exp().reshape(-1, hc, hc)
    for _ in range(ITERS):
        res = res / res.sum(2, keepdim=True)
        res = res / res.sum(1, keepdim=True)
    return pre, post[:, :, None], res


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize(
    ("rows", "hidden", "hc"),
    [(1, HIDDEN, HC), (37, HIDDEN, HC), (5, WIDE, HC), *((5, HIDDEN, hc) for hc in (1, 2, 3, 5))],
)
def test_a_boundary_merges_collapses_and_mixes(dtype: torch.dtype, rows: int, hidden: int, hc: int) -> None:
    """decoder.md, boundary steps 1 to 3; collapse and mix read the merged streams as they are stored."""
    inputs = draw(rows, hidden, dtype, hc)
    residual, u, pre, post, res = run_boundary(inputs)
    assert_close(residual, merged(inputs), TOLERANCE[dtype])
    assert_close(u, collapsed(residual, inputs), TOLERANCE[dtype])
    for actual, expected in zip((pre, post, res), mixed(residual, inputs, hc), strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, expected, 2e-4)
    assert_close(res.sum(1), torch.ones_like(res.sum(1), dtype=torch.float64), 1e-5)


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_merge_and_collapse_alone_equal_their_formulas(dtype: torch.dtype, rows: int) -> None:
    """decoder.md: the merge after the last layer, and the head's collapse."""
    inputs = draw(rows, HIDDEN, dtype)
    streams = ops.merge(inputs["x"], inputs["residual"], inputs["post"], inputs["res"])
    assert_close(streams, merged(inputs), TOLERANCE[dtype])
    u = ops.collapse(inputs["residual"], inputs["pre"], inputs["norm_weight"], RMS_EPS)
    assert_close(u, collapsed(inputs["residual"], inputs), TOLERANCE[dtype])


@dtypes
def test_a_row_has_the_same_bits_however_many_rows_stand_beside_it(dtype: torch.dtype) -> None:
    """G5: row-wise functions are bit for bit the same for any number of rows."""
    inputs = draw(37, WIDE, dtype)
    whole = run_boundary(inputs)
    for rows in (1, 16):
        first = run_boundary({n: t[:rows] if t.shape[0] == 37 else t for n, t in inputs.items()})
        for alone, together in zip(first, whole, strict=True):
            assert torch.equal(alone, together[:rows])


@dtypes
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_pads_hold_changes_no_bit_of_a_real_row(dtype: torch.dtype, poison: float) -> None:
    """G5, S8."""
    inputs = draw(5, HIDDEN, dtype)
    clean = run_boundary(inputs)
    for name in ("x", "residual", "pre", "post", "res"):
        inputs[name][3:] = poison
    for poisoned, expected in zip(run_boundary(inputs), clean, strict=True):
        assert torch.equal(poisoned[:3], expected[:3])


def test_a_tensor_that_is_not_contiguous_is_refused_by_name() -> None:
    inputs = draw(4, HIDDEN, torch.float32)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        ops.merge(inputs["x"], inputs["residual"].mT.contiguous().mT, inputs["post"], inputs["res"])
