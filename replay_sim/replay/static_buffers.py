"""Static row buffers: tensors at addresses that never change, which graphs read and breaks write (B1-B4, L4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replay_sim.batch.addresses import FixedAddresses
from replay_sim.replay.row_tensors import RowTensors, RowTensorSpec


class StaticBuffers:
    """One buffer for each spec, `max_rows` rows, zeroed when made and never re-allocated (B1)."""

    def __init__(self, specs: Sequence[RowTensorSpec], max_rows: int, device: torch.device) -> None:
        self.specs = tuple(specs)
        self.max_rows = max_rows
        self.tensors = {
            spec.name: torch.zeros((max_rows, *spec.row_shape), dtype=spec.dtype, device=device) for spec in specs
        }
        self._addresses = FixedAddresses(self.tensors, "static buffer ")

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(spec.row_bytes for spec in self.specs) * self.max_rows

    def view(self, rows: int) -> dict[str, torch.Tensor]:
        """The first `rows` rows of every buffer (B2)."""
        self.check_rows(rows)
        return {name: tensor[:rows] for name, tensor in self.tensors.items()}

    def check_rows(self, rows: int) -> None:
        """Raises ValueError if the buffers are shorter than `rows` (L4)."""
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows asked of static buffers of {self.max_rows} rows, which a plan sizes")

    def check(self, values: RowTensors) -> None:
        """Raises ValueError, naming the tensor, for wrong names, count, shape, dtype or device (B3, L8)."""
        names = {spec.name for spec in self.specs}
        if set(values) != names:
            raise ValueError(
                f"replay tensors must be the {len(names)} of the contract: missing {sorted(names - set(values))}, "
                f"unknown {sorted(set(values) - names)}"
            )
        rows = {tensor.shape[0] for tensor in values.values() if isinstance(tensor, torch.Tensor) and tensor.dim()}
        for spec in self.specs:
            value = values[spec.name]
            if value is None and spec.optional:
                continue
            if value is None:
                raise ValueError(f"{spec.name} is absent: of the contract only optional tensors may be")
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{spec.name} is a deferred {type(value).__name__}, not a tensor: finalise it before the replay "
                    "layers, whose rows are gathered from it"
                )
            if tuple(value.shape[1:]) != spec.row_shape or value.dim() == 0:
                raise ValueError(f"{spec.name} has shape {tuple(value.shape)}, allowed is {('rows', *spec.row_shape)}")
            if value.dtype != spec.dtype:
                raise ValueError(f"{spec.name} is {value.dtype}, its buffer is {spec.dtype}")
            if value.device != self.tensors[spec.name].device:
                raise ValueError(f"{spec.name} is on {value.device}, its buffer on {self.tensors[spec.name].device}")
        if len(rows) > 1:
            raise ValueError(f"replay tensors differ in their number of rows: {sorted(rows)}")

    def check_addresses(self) -> None:
        """Raises RuntimeError naming a buffer that is not where its graphs were captured to read it (B4)."""
        self._addresses.check(self.tensors)
