"""The plain reference for which rows of a batch the replay layers keep (S1-S7)."""

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.batch.request import Batch


@attrs.frozen(eq=False)
class ReplayRows:
    """The kept rows of a batch of R requests.

    rows: int64 (num_rows), ascending, the kept rows of each request in batch order (S2). query_start_loc:
    int32 (R + 1), the cumulative kept length (S3). window_starts: int64 (R), the lowest position whose window
    KV a request holds in the replay layers after the first (S4). num_rows counts no pads (S8). trims: some
    request keeps fewer rows than it has.
    """

    rows: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    window_starts: npt.NDArray[np.int64]
    num_rows: int
    trims: bool


def kept_lengths(batch: Batch, window: int) -> npt.NDArray[np.int64]:
    """How many of its last rows each request keeps, int64 (R), by S1; ValueError if the window is below 1."""
    if window < 1:
        raise ValueError(f"window is {window}: it must be at least 1")
    lengths = batch.query_lens.astype(np.int64)
    trimmable = ~(batch.is_decode | batch.all_rows_read)
    return np.where(trimmable, np.minimum(lengths, window), lengths)


def select_rows(batch: Batch, window: int) -> ReplayRows:
    """The rows that the replay layers keep, by S1-S4 and S7; ValueError if the window is below 1."""
    kept = kept_lengths(batch, window)
    query_start_loc = np.zeros(batch.num_reqs + 1, np.int64)
    query_start_loc[1:] = kept.cumsum()
    num_rows = int(query_start_loc[-1])
    shifts = batch.query_start_loc[1:] - query_start_loc[1:]
    rows = np.arange(num_rows, dtype=np.int64) + np.repeat(shifts, kept)
    trimmed = kept < batch.query_lens
    window_starts = np.where(trimmed, np.maximum(batch.window_starts, batch.seq_lens - window), batch.window_starts)
    return ReplayRows(rows, query_start_loc.astype(np.int32), window_starts, num_rows, bool(trimmed.any()))
