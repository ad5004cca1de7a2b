"""The replay batch's metadata as an operation, `torch.ops.replay_sim.replay_metadata_`, plain on a CPU (S3, S4, S9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from replay_sim.batch.metadata import BatchMetadataBuffers, ReplayMetadataBuffers

_library = torch.library.Library("replay_sim", "FRAGMENT")
_library.define(
    "replay_metadata_(Tensor query_start_loc, Tensor computed, Tensor window_start, Tensor keeps_all,"
    " Tensor slot_mapping, Tensor(a!) rows, Tensor(b!) positions, Tensor(c!) slots, Tensor(d!) request_of_row,"
    " Tensor(e!) window_start_first, Tensor(f!) window_start_rest, Tensor(g!) output_row_of,"
    " Tensor(h!) replay_query_start_loc, Tensor(i!) num_rows, int num_reqs, int window, int padded) -> ()"
)


def metadata_tensors(target: ReplayMetadataBuffers, source: BatchMetadataBuffers) -> tuple[Tensor, ...]:
    """The operation's tensors, in its order."""
    return (
        source.query_start_loc,
        source.computed,
        source.request_window_start,
        source.keeps_all,
        source.slot_mapping,
        target.rows,
        target.positions,
        target.slot_mapping,
        target.request_of_row,
        target.window_start_first,
        target.window_start_rest,
        target.output_row_of,
        target.query_start_loc,
        target.num_rows,
    )


def write_replay_metadata(
    target: ReplayMetadataBuffers, source: BatchMetadataBuffers, num_reqs: int, padded: int
) -> None:
    """Fill `target`'s first `padded` rows from the batch of at most `num_reqs` requests in `source` (S1 to S4, S8, S9).

    Requests beyond the batch's have no rows, so that max_num_seqs serves every batch, as in a captured call. `padded`
    is at least the number of kept rows. One launch on a GPU, no wait.
    """
    tensors = metadata_tensors(target, source)
    torch.ops.replay_sim.replay_metadata_.default(*tensors, num_reqs, source.window, padded)


def replay_metadata_plainly(
    query_start_loc: Tensor, computed: Tensor, window_start: Tensor, keeps_all: Tensor, slot_mapping: Tensor,
    rows: Tensor, positions: Tensor, slots: Tensor, request_of_row: Tensor, window_start_first: Tensor,
    window_start_rest: Tensor, output_row_of: Tensor, replay_query_start_loc: Tensor, num_rows: Tensor,
    num_reqs: int, window: int, padded: int,
) -> None:  # fmt: skip
    """The plain reference that the kernel must equal exactly (S9)."""
    begins, lengths = query_start_loc[:num_reqs], query_start_loc[: num_reqs + 1].diff()
    kept = torch.where(keeps_all[:num_reqs] != 0, lengths, lengths.clamp(max=window))
    ends = kept.cumsum(0)
    r = int(kept.sum())
    owner = torch.arange(num_reqs).repeat_interleave(kept)
    offset = lengths[owner] - ends[owner] + torch.arange(r)
    source = begins[owner] + offset
    position = computed[owner] + offset
    trimmed_start = torch.maximum(window_start[:num_reqs], computed[:num_reqs] + lengths - window)
    start_rest = torch.where(kept < lengths, trimmed_start, window_start[:num_reqs])
    lowest = position - window + 1
    for buffer, values, pad in (
        (rows, source, -1),
        (positions, position, 0),
        (slots, slot_mapping[source], -1),
        (request_of_row, owner, -1),
        (window_start_first, torch.maximum(window_start[owner], lowest), 0),
        (window_start_rest, torch.maximum(start_rest[owner], lowest), 0),
    ):
        buffer[:r] = values
        buffer[r:padded] = pad
    output_row_of.fill_(-1)
    mapped = source < output_row_of.shape[0]
    output_row_of[source[mapped]] = torch.arange(r, dtype=torch.int32)[mapped]
    replay_query_start_loc.fill_(r)
    replay_query_start_loc[:num_reqs] = ends - kept
    num_rows.fill_(r)


def _writes_in_place(*_: object) -> None:
    """The shape rule: it returns nothing."""


_library.impl("replay_metadata_", replay_metadata_plainly, "CPU")
_library.impl("replay_metadata_", _writes_in_place, "Meta")
if torch.cuda.is_available():
    from replay_sim.batch.rows_kernel import replay_metadata_

    _library.impl("replay_metadata_", replay_metadata_, "CUDA")
