"""Which tensors flow into and out of the replay layers, per row: names, shapes and dtypes (system.md, The idea)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch

RowTensors = Mapping[str, torch.Tensor | None]


@attrs.frozen
class RowTensorSpec:
    """One tensor of the replay contract: `row_shape` without the leading row dimension; absent only if `optional`."""

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    optional: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize


def input_specs(
    hidden_size: int, hc_mult: int, dtype: torch.dtype, input_ids_dtype: torch.dtype = torch.int32
) -> tuple[RowTensorSpec, ...]:
    """The seven tensors that flow into the replay layers; int64 ids where the MoE backend wants them."""
    return (
        RowTensorSpec("hidden_states", (hidden_size,), dtype),
        RowTensorSpec("positions", (), torch.int64),
        RowTensorSpec("input_ids", (), input_ids_dtype, optional=True),
        RowTensorSpec("pre_mix", (hc_mult,), torch.float32),
        RowTensorSpec("post_mix", (hc_mult, 1), torch.float32),
        RowTensorSpec("res_mix", (hc_mult, hc_mult), torch.float32),
        RowTensorSpec("residual", (hc_mult, hidden_size), dtype),
    )


def output_specs(
    hidden_size: int, hc_mult: int, dtype: torch.dtype, num_late_aux: int = 0
) -> tuple[RowTensorSpec, ...]:
    """The tensors that flow out: merged streams, pre_mix, then one (h,) state for each late aux layer."""
    return (
        RowTensorSpec("hidden_states", (hc_mult, hidden_size), dtype),
        RowTensorSpec("pre_mix", (hc_mult,), torch.float32),
        *(RowTensorSpec(f"late_aux_{index}", (hidden_size,), dtype) for index in range(num_late_aux)),
    )
