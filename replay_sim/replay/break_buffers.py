"""The break buffers: where the replay layers' outputs land for the next segment, zero in every trimmed row (L4, L6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replay_sim.replay.row_ops import scatter_rows
from replay_sim.replay.row_tensors import RowTensorSpec
from replay_sim.replay.static_buffers import StaticBuffers


class BreakBuffers(StaticBuffers):
    """Static buffers of the outputs that stay zero but for the rows that the last scatter wrote.

    `written` uint8 (buffers, max_rows) says which rows hold something: where it is 0 the row is zero. Nothing but
    `scatter` writes the buffers, on any path, so that clearing costs what the step before wrote and not all rows.
    """

    def __init__(self, specs: Sequence[RowTensorSpec], max_rows: int, device: torch.device) -> None:
        super().__init__(specs, max_rows, device)
        self.written = torch.zeros((len(specs), max_rows), dtype=torch.uint8, device=device)

    def scatter(
        self, outputs: Sequence[torch.Tensor], rows: torch.Tensor, num_rows: torch.Tensor, output_row_of: torch.Tensor
    ) -> None:
        """Write this step's outputs, and clear what the step before wrote beside them (L6); one launch on a GPU.

        The index `rows` int64 (at least the outputs' rows,), its length `num_rows` int32 (1,) and its inverse
        `output_row_of` int32 (at least max_rows,) are those of the replay metadata. Raises ValueError for outputs that
        do not fit.
        """
        scatter_rows(tuple(self.tensors.values()), self.written, outputs, rows, num_rows, output_row_of)
