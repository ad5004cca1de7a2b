"""The scheduler that makes steps of requests: running ones first, then waiting ones, by token budget."""

import math
from collections.abc import Callable, Iterable, Iterator

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.batch.dispatch import StepRecord
from replay_sim.batch.request import Batch
from replay_sim.workload.kv_blocks import BlockPool, BlockTable, blocks_for
from replay_sim.workload.running import RunningRequests
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

Dispatch = Callable[[Batch], StepRecord]
StepTime = Callable[[StepRecord], float]


@attrs.frozen(eq=False)
class ScheduledStep:
    """One step as it is to run: the batch, its record if dispatched, and what follows from it.

    start_s and seconds are virtual time, None where no step time is known. finished: ids of the requests that
    this step ends.
    """

    index: int
    batch: Batch
    record: StepRecord | None
    start_s: float | None
    seconds: float | None
    finished: tuple[str, ...]
    tables: tuple[BlockTable, ...]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the batch's requests, in batch order."""
        return self.batch.request_ids

    @property
    def block_tables(self) -> list[npt.NDArray[np.int32]]:
        """The KV blocks of each request, int32, as many as hold its seq_len; valid for this step alone."""
        lengths = self.batch.seq_lens.tolist()
        return [table.ids(length) for table, length in zip(self.tables, lengths, strict=True)]


class Scheduler:
    """Schedules requests first come, first served; a request that runs is never preempted.

    Each step takes the running requests in the order of their admission: a decode carries query_len_decode
    tokens and is never split, a prefill takes what the budget leaves and goes on in the next step. Then
    waiting requests are admitted while budget and max_num_seqs last and their KV blocks, the outputs'
    included, are sure to suffice. A prefill's last chunk samples the first output token; a decode emits its
    accepted draft tokens and one more.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        settings: SchedulerSettings,
        *,
        dispatch: Dispatch | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        """Take the requests in order of arrival, one at a time.

        step_time gives the seconds of a dispatched step, so it needs dispatch. Without it time is unknown:
        arrival times are ignored, and every request waits from the start.
        """
        if step_time is not None and dispatch is None:
            raise ValueError("step_time is given without dispatch: it needs the records that dispatch makes")
        self.settings = settings
        self._dispatch = dispatch
        self._step_time = step_time
        self._stream = iter(requests)
        self._next = next(self._stream, None)
        self._running = RunningRequests(settings.max_num_seqs)
        self._pool = BlockPool(settings.num_blocks, settings.block_size)
        self._promised_blocks = 0
        self._acceptance, self._logprobs = (np.random.default_rng([settings.seed, i]) for i in range(2))
        self._clock = 0.0

    def steps(self) -> Iterator[ScheduledStep]:
        """The steps until all requests have finished; ValueError for one out of order or too large."""
        index = 0
        while self._running.count or self._next is not None:
            if not self._running.count and self._next is not None:
                self._clock = max(self._clock, self._next.arrival_s)
            yield self._step(index)
            index += 1

    def _step(self, index: int) -> ScheduledStep:
        """Schedule, dispatch and account for one step."""
        running = self._running
        query_lens = self._schedule()
        count = query_lens.size
        is_decode = running.is_decode[:count]
        self._hold_blocks(query_lens)
        batch = Batch.from_columns(
            query_lens,
            running.computed[:count],
            is_decode,
            all_rows_read=running.all_rows_read[:count] & ~is_decode,
            request_ids=running.ids(count),
        )
        tables = running.tables(count)
        record = None if self._dispatch is None else self._dispatch(batch)
        start, seconds = self._pass_time(record)
        done = running.advance(query_lens, is_decode, self._accepted(is_decode))
        finished = self._finish(done) if done.any() else ()
        return ScheduledStep(index, batch, record, start, seconds, finished, tables)

    def _schedule(self) -> npt.NDArray[np.int64]:
        """The query lengths of the first requests, as many as this step takes, admitted ones included."""
        running, budget = self._running, self.settings.max_num_batched_tokens
        wanted = running.wanted(self.settings.query_len_decode)
        used = int(wanted.sum())
        if used > budget:
            return self._cut(wanted)
        admitted: list[int] = []
        while used < budget and self._admit():
            admitted.append(min(int(running.prompt[running.count - 1]), budget - used))
            used += admitted[-1]
        return np.concatenate((wanted, admitted)).astype(np.int64) if admitted else wanted

    def _cut(self, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first requests that fit the budget; one more gets the rest of it if it is a prefill."""
        budget = self.settings.max_num_batched_tokens
        ends = wanted.cumsum()
        count = int(ends.searchsorted(budget, side="right"))
        left = budget - (int(ends[count - 1]) if count else 0)
        if left and not self._running.is_decode[count]:
            wanted[count] = left
            count += 1
        return wanted[:count]

    def _admit(self) -> bool:
        """Let the next request run if it waits and there is room for it."""
        request, settings = self._next, self.settings
        if request is None or self._running.count == settings.max_num_seqs:
            return False
        if self._step_time is not None and request.arrival_s > self._clock:
            return False
        blocks = self._blocks_needed(request)
        if settings.num_blocks is not None:
            if blocks > settings.num_blocks:
                raise ValueError(
                    f"num_blocks is {settings.num_blocks}: it must be at least {blocks} for request "
                    f"{request.request_id!r}, which has {request.prompt_tokens} prompt_tokens and "
                    f"{request.output_tokens} output_tokens; a block holds {settings.block_size}"
                )
            if self._promised_blocks + blocks > settings.num_blocks:
                return False
        self._promised_blocks += blocks
        all_rows_read = self._logprobs.random() < settings.prompt_logprobs_share
        self._running.add(request, BlockTable(settings.block_size), blocks, all_rows_read)
        self._pull()
        return True

    def _pull(self) -> None:
        """Take the next request from the stream."""
        before, self._next = self._next, next(self._stream, None)
        if before is not None and self._next is not None and self._next.arrival_s < before.arrival_s:
            raise ValueError(
                f"request {self._next.request_id!r} arrives at {self._next.arrival_s} s: it must not arrive "
                f"before {before.request_id!r}, at {before.arrival_s} s"
            )

    def _blocks_needed(self, request: TraceRequest) -> int:
        """The most blocks the request ever holds; its last decode starts with the last output but one."""
        tokens = request.prompt_tokens
        if request.output_tokens > 1:
            tokens += request.output_tokens - 2 + self.settings.query_len_decode
        return blocks_for(tokens, self.settings.block_size)

    def _hold_blocks(self, query_lens: npt.NDArray[np.int64]) -> None:
        """Give the scheduled requests the blocks that their rows of this step need."""
        running = self._running
        seq_lens = running.computed[: query_lens.size] + query_lens
        for index in (seq_lens > running.capacity[: query_lens.size]).nonzero()[0].tolist():
            table = running.table(index)
            self._pool.grow(table, int(seq_lens[index]))
            running.capacity[index] = table.num_blocks * self.settings.block_size

    def _accepted(self, is_decode: npt.NDArray[np.bool_]) -> int | npt.NDArray[np.int64]:
        """Tokens that each decode emits: its draft tokens up to the first that misses, and one."""
        drafts, rate = self.settings.num_speculative_tokens, self.settings.acceptance_rate
        if not drafts or rate == 1:
            return drafts + 1
        hits = self._acceptance.random((is_decode.size, drafts)) < rate
        return 1 + np.logical_and.accumulate(hits, axis=1).sum(axis=1)

    def _pass_time(self, record: StepRecord | None) -> tuple[float | None, float | None]:
        """Start and length of the step in virtual time, which moves on; None where it is unknown."""
        if self._step_time is None or record is None:
            return None, None
        start, seconds = self._clock, self._step_time(record)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"step_time is {seconds} s: it must be finite and at least 0")
        self._clock += seconds
        return start, seconds

    def _finish(self, done: npt.NDArray[np.bool_]) -> tuple[str, ...]:
        """Take the finished requests out and their blocks back; their ids."""
        for index in done.nonzero()[0].tolist():
            self._pool.release(self._running.table(index))
            self._promised_blocks -= int(self._running.promised[index])
        return self._running.remove(done)
