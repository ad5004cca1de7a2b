"""One step as the scheduler hands it out: the batch, how it was dispatched, and what follows from it."""

import functools

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.batch.dispatch import StepRecord
from replay_sim.batch.request import Batch
from replay_sim.workload.kv_blocks import BlockTable
from replay_sim.workload.request_times import RequestTimes


@attrs.frozen(eq=False)
class BatchColumns:
    """The columns of a batch that need not be made, and the block tables of its requests; nobody writes to them.

    query_lens, computed and window_starts int64, is_decode and all_rows_read bool, one entry a request.
    """

    query_lens: npt.NDArray[np.int64]
    computed: npt.NDArray[np.int64]
    is_decode: npt.NDArray[np.bool_]
    all_rows_read: npt.NDArray[np.bool_] | None
    window_starts: npt.NDArray[np.int64]
    request_ids: tuple[str, ...]
    tables: tuple[BlockTable, ...]

    def batch(self, advance: int = 0) -> Batch:
        """The batch, each request `advance` tokens further; that of the first step is made once."""
        return self._batch(advance) if advance else self._first_batch

    @functools.cached_property
    def _first_batch(self) -> Batch:
        return self._batch(0)

    def _batch(self, advance: int) -> Batch:
        return Batch.from_columns(
            self.query_lens,
            self.computed + advance,
            self.is_decode,
            all_rows_read=self.all_rows_read,
            window_starts=self.window_starts,
            request_ids=self.request_ids,
        )


@attrs.frozen(eq=False)
class ScheduledStep:
    """One step as it is to run: the batch, its record if dispatched, and what follows from it.

    columns, advance: the batch is that of `columns`, each request `advance` tokens further; steps alike share them
    and their record. start_s and seconds are virtual time, None where no step time is known. finished: ids of the
    requests that this step ends, and times: their times if known. cached_tokens: prompt tokens that the requests
    admitted in this step need not compute, by the prefix cache.
    """

    index: int
    columns: BatchColumns
    record: StepRecord | None
    start_s: float | None
    seconds: float | None
    advance: int = 0
    finished: tuple[str, ...] = ()
    times: tuple[RequestTimes, ...] = ()
    cached_tokens: int = 0

    @functools.cached_property
    def batch(self) -> Batch:
        """The batch of this step, made when first asked for."""
        return self.columns.batch(self.advance)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the batch's requests, in batch order."""
        return self.columns.request_ids

    @property
    def block_tables(self) -> list[npt.NDArray[np.int32]]:
        """The KV blocks of each request, int32, as many as hold its seq_len; valid for this step alone."""
        lengths = self.batch.seq_lens.tolist()
        return [table.ids(length) for table, length in zip(self.columns.tables, lengths, strict=True)]
