"""Builds a step's forward context and replay batch on the device, for real steps and dummy ones alike (D4, G1, L5)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.metadata import AttentionMetadata, BatchMetadataBuffers, BlockTables, ReplayMetadataBuffers
from replay_sim.batch.request import Batch
from replay_sim.decoder.layer import WINDOW_KEY
from replay_sim.replay.context import ForwardContext, ReplayBatch
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.layers import ReplaySpec


class StepContextBuilder:
    """Owns the metadata buffers of one model, whose replay layers are `spec`'s, and writes each step into them.

    `max_rows` bounds padded tokens, `max_num_seqs` requests, `max_blocks` blocks of one request.
    """

    def __init__(
        self,
        spec: ReplaySpec,
        *,
        max_rows: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.batch = BatchMetadataBuffers(
            max_rows=max_rows,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            block_size=block_size,
            window=spec.window,
            device=device,
        )
        self.replay = ReplayMetadataBuffers(max_rows=max_rows, max_num_seqs=max_num_seqs, device=device)
        self._graph_metadata: dict[int, dict[str, AttentionMetadata]] = {}
        self._one_launch_batches: dict[int, ReplayBatch] = {}

    def build(
        self,
        batch: Batch,
        block_tables: BlockTables,
        input_ids: npt.NDArray[np.int32],
        record: StepRecord,
        form: ReplayForm = ReplayForm.BREAKABLE,
    ) -> ForwardContext:
        """Write the batch as `record` says that it runs, and return its forward context.

        `form` is that of the replay graphs. Raises ValueError naming the bound that a batch exceeds.
        """
        metadata = self.batch.write(batch, block_tables, input_ids, record.padded_tokens)
        replay_batch = None
        if record.replay_mode is not None:
            replay_batch = self.replay_batch(batch, record.replay_rows, record.padded_rows, record.replay_mode, form)
        return ForwardContext(
            mode=record.mode,
            num_tokens=record.num_tokens,
            padded_tokens=record.padded_tokens,
            metadata={key: metadata for key in (WINDOW_KEY, *self.spec.metadata_keys)},
            num_rows=self.batch.num_rows,
            replay_batch=replay_batch,
        )

    def replay_batch(
        self,
        batch: Batch,
        rows: int,
        padded_rows: int,
        mode: CudagraphMode,
        form: ReplayForm = ReplayForm.BREAKABLE,
    ) -> ReplayBatch:
        """The replay batch of the batch written last: `rows` kept rows, padded to `padded_rows` (S2-S4, S8).

        A replay graph of the form ONE_LAUNCH writes what it holds, so that all its batches are one; for all else it is
        written here.
        """
        if mode is CudagraphMode.PIECEWISE and form is ReplayForm.ONE_LAUNCH:
            self.replay.check(rows, padded_rows)
            made = self._one_launch_batches.get(padded_rows)
            if made is None:
                made = self._one_launch_batches[padded_rows] = self._replay_batch(padded_rows, padded_rows, mode)
            return made
        self.replay.write(batch, self.batch, padded_rows)
        return self._replay_batch(rows, padded_rows, mode)

    def _replay_batch(self, rows: int, padded_rows: int, mode: CudagraphMode) -> ReplayBatch:
        metadata = self._metadata_of_graph if mode is CudagraphMode.PIECEWISE else self._metadata
        context = ForwardContext(
            mode=mode,
            num_tokens=rows,
            padded_tokens=padded_rows,
            metadata=metadata(padded_rows),
            num_rows=self.replay.num_rows,
            first_layer_kv_written=True,
        )
        return ReplayBatch(self.replay.rows[:rows], context, self.replay.output_row_of)

    def _metadata(self, padded_rows: int) -> dict[str, AttentionMetadata]:
        """Views of the replay buffers by key."""
        first = self.replay.metadata(padded_rows, self.batch, first_layer=True)
        rest = self.replay.metadata(padded_rows, self.batch, first_layer=False)
        return {key: first if key == self.spec.first_window_key else rest for key in self.spec.metadata_keys}

    def _metadata_of_graph(self, padded_rows: int) -> dict[str, AttentionMetadata]:
        """The same, made once for each size of a graph, as the buffers never move."""
        if padded_rows not in self._graph_metadata:
            self._graph_metadata[padded_rows] = self._metadata(padded_rows)
        return self._graph_metadata[padded_rows]
