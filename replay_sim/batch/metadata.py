"""Attention metadata on the device: of a whole batch, and of its replay batch (S3, S4, S8)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from replay_sim.batch.addresses import FixedAddresses
from replay_sim.batch.metadata_op import write_replay_metadata
from replay_sim.batch.request import Batch
from replay_sim.batch.rows import kept_lengths
from replay_sim.batch.staging import HostArrays, Staging

BlockTables = Sequence[npt.NDArray[np.int32]]

PAD_SLOT = -1
PAD_REQUEST = -1


@attrs.frozen
class AttentionMetadata:
    """What attention and KV writes read, one value a row; a row is real or a pad (slot -1, request -1).

    `positions` int64 (n,), `slot_mapping` int64 (n,), `request_of_row` int32 (n,), `window_start` int64 (n,) the
    first position that the row may attend in its layer's window, `block_table` int32 (max_num_seqs, max_blocks).
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    request_of_row: torch.Tensor
    window_start: torch.Tensor
    block_table: torch.Tensor
    block_size: int


class BatchMetadataBuffers:
    """Device buffers at fixed addresses for the metadata of any batch that fits.

    `max_rows` bounds padded tokens, `max_num_seqs` requests, `max_blocks` blocks of one request.
    """

    def __init__(
        self, *, max_rows: int, max_num_seqs: int, max_blocks: int, block_size: int, window: int, device: torch.device
    ) -> None:
        self.window, self.block_size = window, block_size
        self.max_rows, self.max_num_seqs, self.max_blocks = max_rows, max_num_seqs, max_blocks

        row, request = (max_rows,), (max_num_seqs,)
        self._staging = Staging(
            {
                "positions": (row, torch.int64),
                "slot_mapping": (row, torch.int64),
                "window_start": (row, torch.int64),
                "request_of_row": (row, torch.int32),
                "input_ids": (row, torch.int32),
                "num_rows": ((1,), torch.int32),
                "query_start_loc": ((max_num_seqs + 1,), torch.int32),
                "computed": (request, torch.int64),
                "request_window_start": (request, torch.int64),
                "keeps_all": (request, torch.int32),
                "block_table": ((max_num_seqs, max_blocks), torch.int32),
            },
            device,
        )
        tensors = self._staging.tensors
        self.positions, self.slot_mapping = tensors["positions"], tensors["slot_mapping"]
        self.window_start, self.request_of_row = tensors["window_start"], tensors["request_of_row"]
        self.input_ids, self.block_table = tensors["input_ids"], tensors["block_table"]
        self.num_rows, self.query_start_loc = tensors["num_rows"], tensors["query_start_loc"]
        self.computed, self.request_window_start = tensors["computed"], tensors["request_window_start"]
        self.keeps_all = tensors["keeps_all"]
        self._written_reqs = 0
        self._addresses = FixedAddresses(_tensors_of(self), f"{type(self).__name__}.")

    def write(
        self, batch: Batch, block_tables: BlockTables, input_ids: np.ndarray, padded_tokens: int
    ) -> AttentionMetadata:
        """Write one batch, padded to `padded_tokens` rows, and return its metadata (S8).

        `block_tables` holds each request's block ids, enough for its seq_len; `input_ids` int32 (num_tokens,). Pads
        take position 0, slot -1, request -1, id 0. Beyond the batch's requests lengths are zero: offsets repeat the
        last one (B8), and block tables of the batch before are cleared (C7). Raises ValueError naming the bound that a
        batch exceeds, RuntimeError naming a buffer that moved (B4).
        """
        self._addresses.check(vars(self))
        self._check(batch, block_tables, input_ids, padded_tokens)
        # The larger count stands until all is written, so that an interrupted step's tables are cleared too.
        self._written_reqs = table_rows = max(batch.num_reqs, self._written_reqs)
        with self._staging.step() as host:
            self._fill_requests(host, batch, block_tables, table_rows)
            self._fill_rows(host, batch, input_ids, padded_tokens)
            self._staging.copy_each(("positions", "slot_mapping", "window_start"), padded_tokens)
            self._staging.copy_each(("request_of_row", "input_ids"), padded_tokens)
            self._staging.copy_all("num_rows", "block_table", table_rows)
        self._written_reqs = batch.num_reqs
        return self.metadata(padded_tokens)

    def _fill_requests(self, host: HostArrays, batch: Batch, block_tables: BlockTables, table_rows: int) -> None:
        """What has an entry a request, pads included, and the first `table_rows` block tables."""
        count = batch.num_reqs
        host["num_rows"][0] = batch.num_tokens
        host["query_start_loc"][: count + 1] = batch.query_start_loc
        host["query_start_loc"][count + 1 :] = batch.num_tokens
        for name, values in (
            ("computed", batch.computed),
            ("request_window_start", batch.window_starts),
            ("keeps_all", batch.is_decode | batch.all_rows_read),
        ):
            host[name][:count] = values
            host[name][count:] = 0
        tables = host["block_table"][:table_rows]
        for row, table in zip(tables, block_tables, strict=False):
            row[: len(table)] = table
            row[len(table) :] = 0
        tables[count:] = 0

    def _fill_rows(self, host: HostArrays, batch: Batch, input_ids: np.ndarray, padded: int) -> None:
        """What has an entry a row, pads included."""
        count = batch.num_tokens
        owner = np.repeat(np.arange(batch.num_reqs), batch.query_lens)
        positions = batch.positions
        block = positions // self.block_size
        table_entry = host["block_table"].reshape(-1).take(owner * self.max_blocks + block)
        slots, start = host["slot_mapping"][:count], host["window_start"][:count]
        np.subtract(table_entry, block, out=slots)  # slot = table entry * block size + position % block size
        slots *= self.block_size
        slots += positions
        np.subtract(positions, self.window - 1, out=start)
        np.maximum(start, batch.window_starts.take(owner), out=start)
        host["positions"][:count], host["request_of_row"][:count] = positions, owner
        host["input_ids"][:count] = input_ids
        for name in ("positions", "window_start", "input_ids"):
            host[name][count:padded] = 0
        host["slot_mapping"][count:padded], host["request_of_row"][count:padded] = PAD_SLOT, PAD_REQUEST

    def metadata(self, padded_tokens: int) -> AttentionMetadata:
        """The buffers' first `padded_tokens` rows."""
        n = padded_tokens
        return AttentionMetadata(
            self.positions[:n],
            self.slot_mapping[:n],
            self.request_of_row[:n],
            self.window_start[:n],
            self.block_table,
            self.block_size,
        )

    def _check(self, batch: Batch, block_tables: BlockTables, input_ids: np.ndarray, padded_tokens: int) -> None:
        if not batch.num_tokens <= padded_tokens <= self.max_rows:
            raise ValueError(
                f"padded_tokens {padded_tokens} must be at least the batch's {batch.num_tokens} tokens and at most "
                f"the {self.max_rows} rows of the buffers"
            )
        if batch.num_reqs > self.max_num_seqs:
            raise ValueError(f"batch of {batch.num_reqs} requests exceeds max_num_seqs {self.max_num_seqs}")
        if len(block_tables) != batch.num_reqs:
            raise ValueError(f"{len(block_tables)} block_tables for a batch of {batch.num_reqs} requests: one for each")
        if len(input_ids) != batch.num_tokens:
            raise ValueError(f"{len(input_ids)} input_ids for a batch of {batch.num_tokens} tokens: one for each")
        lengths = np.fromiter(map(len, block_tables), np.int64, batch.num_reqs)
        needed = -(-batch.seq_lens // self.block_size)
        misfits = np.flatnonzero((lengths < needed) | (lengths > self.max_blocks))
        if misfits.size:
            index = misfits[0]
            raise ValueError(
                f"block table of request {index} has {lengths[index]} blocks: its seq_len {batch.seq_lens[index]} "
                f"needs {needed[index]} of block_size {self.block_size}, and at most {self.max_blocks} fit: raise "
                "max_blocks, or limit max_model_len to what it holds"
            )


def _tensors_of(buffers: BatchMetadataBuffers | ReplayMetadataBuffers) -> dict[str, torch.Tensor]:
    """The tensors that are attributes of `buffers`."""
    return {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}


class ReplayMetadataBuffers:
    """Device buffers at fixed addresses for the metadata of any replay batch of a step of at most `max_rows` rows.

    `output_row_of` int32 (max_rows,) is the index map of the scatter: for each row of the step the replay batch's row
    that lands there, or -1 (L6); rows beyond the step's tokens have -1.
    """

    def __init__(self, *, max_rows: int, max_num_seqs: int, device: torch.device) -> None:
        self.max_rows, self.max_num_seqs = max_rows, max_num_seqs
        self.rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.request_of_row = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.window_start_first = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.window_start_rest = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.output_row_of = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.num_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._addresses = FixedAddresses(_tensors_of(self), f"{type(self).__name__}.")

    def write(self, batch: Batch, source: BatchMetadataBuffers, padded_rows: int) -> None:
        """Fill the buffers from the batch written last into `source`: in one launch on a GPU, plainly on a CPU (S9).

        `query_start_loc` repeats its last offset beyond the batch's requests (B8). Raises ValueError if `padded_rows`
        is less than the batch's kept rows or more than the buffers hold, RuntimeError naming a buffer that moved (B4).
        """
        self._addresses.check(vars(self))
        self.check(int(kept_lengths(batch, source.window).sum()), padded_rows)
        write_replay_metadata(self, source, batch.num_reqs, padded_rows)

    def check(self, kept: int, padded_rows: int) -> None:
        """Raises ValueError as `write` does: for a graph that writes the `kept` rows itself."""
        if not kept <= padded_rows <= self.max_rows:
            raise ValueError(
                f"padded_rows {padded_rows} must be at least the {kept} rows that the batch keeps and at most the "
                f"{self.max_rows} rows of the replay metadata buffers"
            )

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The buffers, by names for a check of their addresses before a step (B4)."""
        return {f"ReplayMetadataBuffers.{name}": getattr(self, name) for name in self._addresses.names}

    def write_captured(self, source: BatchMetadataBuffers, padded_rows: int) -> None:
        """As `write`, of whatever batch is in `source` when it runs: what a graph captures of it."""
        write_replay_metadata(self, source, self.max_num_seqs, padded_rows)

    def metadata(self, padded_rows: int, source: BatchMetadataBuffers, *, first_layer: bool) -> AttentionMetadata:
        """The first rows, for the first replay layer, which keeps the batch's window starts, or the rest (S4)."""
        n = padded_rows
        start = self.window_start_first if first_layer else self.window_start_rest
        return AttentionMetadata(
            self.positions[:n],
            self.slot_mapping[:n],
            self.request_of_row[:n],
            start[:n],
            source.block_table,
            source.block_size,
        )
