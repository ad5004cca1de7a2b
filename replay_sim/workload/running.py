"""The running requests of a scheduler, held as columns in the order of their admission."""

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.workload.kv_blocks import BlockTable
from replay_sim.workload.scheduled_step import BatchColumns
from replay_sim.workload.trace import TraceRequest

COLUMNS = ("prompt", "computed", "left", "window_start", "all_rows_read")


@attrs.define(eq=False)
class RunningRequest:
    """What is kept of a running request beside its columns.

    held_blocks: the blocks of the prefix cache that it holds, the first ones of its prompt. first_token_s: when
    its first output token was sampled, None before that and where time is unknown.
    """

    request: TraceRequest
    table: BlockTable
    held_blocks: int = 0
    first_token_s: float | None = None


class RunningRequests:
    """At most `max_num_seqs` requests. Columns int64, of which the first `count` entries are in use.

    prompt: prompt tokens. computed: tokens computed so far, those of a prefix hit included. left: output tokens
    still to sample. window_start: the lowest position whose window KV the request holds. all_rows_read: 0 or 1.
    num_prefills: requests whose prompt is not computed.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.count = 0
        self.num_prefills = 0
        self._columns = np.zeros((len(COLUMNS), max_num_seqs), np.int64)
        self.prompt, self.computed, self.left, self.window_start, self.all_rows_read = self._columns
        self._requests: list[RunningRequest] = []
        self._shared: dict[int, tuple[tuple[str, ...], tuple[BlockTable, ...]]] = {}

    def __getitem__(self, index: int) -> RunningRequest:
        return self._requests[index]

    @property
    def is_decode(self) -> npt.NDArray[np.bool_]:
        """Whether each request has computed its prompt, bool (count)."""
        return self.computed[: self.count] >= self.prompt[: self.count]

    @property
    def least_left(self) -> int:
        """The fewest output tokens that a request has still to sample."""
        return int(self.left[: self.count].min())

    def wanted(self, query_len_decode: int) -> npt.NDArray[np.int64]:
        """Tokens that each request would take of a step without a budget, int64 (count)."""
        rest = self.prompt[: self.count] - self.computed[: self.count]
        rest[rest <= 0] = query_len_decode
        return rest

    def add(self, running: RunningRequest, computed: int, all_rows_read: bool) -> None:
        """Append a request that starts from `computed` tokens, and holds no window KV below them."""
        request = running.request
        column = (request.prompt_tokens, computed, request.output_tokens, computed, all_rows_read)
        self._columns[:, self.count] = column
        self._requests.append(running)
        self.count += 1
        self.num_prefills += 1
        self._shared.clear()

    def columns(
        self, query_lens: npt.NDArray[np.int64], is_decode: npt.NDArray[np.bool_], any_prefill: bool
    ) -> BatchColumns:
        """The columns of a step of the first requests, which stay as they are when these advance."""
        count = query_lens.size
        return BatchColumns(
            query_lens,
            self.computed[:count].copy(),
            is_decode,
            self.all_rows_read[:count] > is_decode if any_prefill else None,
            self.window_start[:count].copy(),
            *self._first(count),
        )

    def advance(
        self,
        query_lens: npt.NDArray[np.int64],
        is_decode: npt.NDArray[np.bool_],
        accepted: int | npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Account for a step of the first requests; which of them have finished, bool.

        A decode computes and samples the accepted tokens. A prefill computes its chunk, and its last one
        samples one.
        """
        count = query_lens.size
        self.computed[:count] += np.where(is_decode, accepted, query_lens)
        prompt_done = self.computed[:count] >= self.prompt[:count]
        self.left[:count] -= np.where(is_decode, accepted, prompt_done)
        self.num_prefills -= int(np.count_nonzero(prompt_done > is_decode))
        return prompt_done & (self.left[:count] <= 0)

    def decode(self, num_tokens: int | npt.NDArray[np.int64]) -> None:
        """Account for steps of all requests in which each is a decode that emits so many tokens in sum."""
        self.computed[: self.count] += num_tokens
        self.left[: self.count] -= num_tokens

    def remove(self, done: npt.NDArray[np.bool_]) -> tuple[RunningRequest, ...]:
        """Take out those of the first requests that are done, keeping the order; what was kept of them."""
        leaving = done.nonzero()[0].tolist()
        removed = tuple(self._requests[index] for index in leaving)
        for index in reversed(leaving):
            del self._requests[index]
            self._columns[:, index : self.count - 1] = self._columns[:, index + 1 : self.count]
            self.count -= 1
        self._shared.clear()
        return removed

    def _first(self, count: int) -> tuple[tuple[str, ...], tuple[BlockTable, ...]]:
        """Ids and tables of the first requests, shared by the steps in which these do not change."""
        if count not in self._shared:
            first = self._requests[:count]
            self._shared = {count: (tuple(r.request.request_id for r in first), tuple(r.table for r in first))}
        return self._shared[count]
