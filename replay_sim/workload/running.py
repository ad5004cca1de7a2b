"""The running requests of a scheduler, held as columns in the order of their admission."""

import numpy as np
import numpy.typing as npt

from replay_sim.workload.kv_blocks import BlockTable
from replay_sim.workload.trace import TraceRequest

COLUMNS = ("prompt", "computed", "left", "capacity", "promised", "all_rows_read")


class RunningRequests:
    """At most `max_num_seqs` requests. Columns int64, of which the first `count` entries are in use.

    prompt: prompt tokens. computed: tokens computed so far. left: output tokens still to sample. capacity:
    tokens that the held KV blocks can take. promised: the most blocks that the request may come to hold.
    all_rows_read: 0 or 1.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.count = 0
        self._columns = np.zeros((len(COLUMNS), max_num_seqs), np.int64)
        self.prompt, self.computed, self.left, self.capacity, self.promised, self.all_rows_read = self._columns
        self._ids: list[str] = []
        self._tables: list[BlockTable] = []
        self._shared: dict[int, tuple[tuple[str, ...], tuple[BlockTable, ...]]] = {}

    @property
    def is_decode(self) -> npt.NDArray[np.bool_]:
        """Whether each request has computed its prompt, bool (count)."""
        return self.computed[: self.count] >= self.prompt[: self.count]

    def wanted(self, query_len_decode: int) -> npt.NDArray[np.int64]:
        """Tokens that each request would take of a step without a budget, int64 (count)."""
        rest = self.prompt[: self.count] - self.computed[: self.count]
        return np.where(rest > 0, rest, query_len_decode)

    def add(self, request: TraceRequest, table: BlockTable, promised: int, all_rows_read: bool) -> None:
        """Append a request of which nothing is computed."""
        self._columns[:, self.count] = (
            request.prompt_tokens,
            0,
            request.output_tokens,
            0,
            promised,
            all_rows_read,
        )
        self._ids.append(request.request_id)
        self._tables.append(table)
        self.count += 1
        self._shared.clear()

    def ids(self, count: int) -> tuple[str, ...]:
        """The ids of the first `count` requests."""
        return self._first(count)[0]

    def tables(self, count: int) -> tuple[BlockTable, ...]:
        """The block tables of the first `count` requests."""
        return self._first(count)[1]

    def table(self, index: int) -> BlockTable:
        """The block table of one request."""
        return self._tables[index]

    def advance(
        self,
        query_lens: npt.NDArray[np.int64],
        is_decode: npt.NDArray[np.bool_],
        accepted: int | npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Account for a step of the first requests; whether each of them has finished, bool.

        A decode computes and samples the accepted tokens. A prefill computes its chunk, and its last one
        samples one.
        """
        count = query_lens.size
        self.computed[:count] += np.where(is_decode, accepted, query_lens)
        prompt_done = self.computed[:count] >= self.prompt[:count]
        self.left[:count] -= np.where(is_decode, accepted, prompt_done)
        return prompt_done & (self.left[:count] <= 0)

    def remove(self, done: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        """Take out those of the first requests that are done, keeping the order; their ids."""
        keep = np.ones(self.count, np.bool_)
        keep[: done.size] = ~done
        kept = self._columns[:, : self.count][:, keep]
        removed = tuple(name for name, stays in zip(self._ids, keep.tolist(), strict=True) if not stays)
        self._ids = [name for name, stays in zip(self._ids, keep.tolist(), strict=True) if stays]
        self._tables = [table for table, stays in zip(self._tables, keep.tolist(), strict=True) if stays]
        self.count = kept.shape[1]
        self._columns[:, : self.count] = kept
        self._shared.clear()
        return removed

    def _first(self, count: int) -> tuple[tuple[str, ...], tuple[BlockTable, ...]]:
        """Ids and tables of the first requests, shared by the steps in which these do not change."""
        if count not in self._shared:
            self._shared = {count: (tuple(self._ids[:count]), tuple(self._tables[:count]))}
        return self._shared[count]
