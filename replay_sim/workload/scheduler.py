"""The scheduler that makes steps of requests: running ones first, then waiting ones, by token budget."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from replay_sim.batch.dispatch import StepRecord
from replay_sim.batch.request import Batch
from replay_sim.workload.kv_blocks import BlockPool, BlockTable, blocks_for
from replay_sim.workload.prefix_cache import PrefixCache, computed_after_hit
from replay_sim.workload.request_times import RequestTimes
from replay_sim.workload.running import RunningRequest, RunningRequests
from replay_sim.workload.scheduled_step import ScheduledStep
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

Dispatch = Callable[[Batch], StepRecord]
StepTime = Callable[[StepRecord], float]


class Scheduler:
    """Schedules requests first come, first served; a request that runs is never preempted.

    Each step takes the running requests in the order of their admission: a decode carries query_len_decode
    tokens and is never split, a prefill takes what the budget leaves and goes on in the next step. Then
    waiting requests are admitted while budget and max_num_seqs last and there are KV blocks for all that they
    will ever hold, which they then own. A prefill's last chunk samples the first output token; a decode emits
    its accepted draft tokens and one more.

    With a prefix cache a request starts from the longest prefix that earlier steps computed and the cache still
    holds, less the window that is computed again; one whose prompt rows are all read starts from 0. Blocks of
    the prefix cache are counted apart from num_blocks.
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

        dispatch is asked once for all steps of as many decodes and nothing else. step_time gives the seconds of a
        dispatched step, the same for the same record, so it needs dispatch. Without it time is unknown: arrival
        times are ignored, and every request waits from the start.
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
        self._prefixes = PrefixCache(settings.prefix_cache_blocks) if settings.prefix_cache_blocks else None
        self._acceptance, self._logprobs = (np.random.default_rng([settings.seed, i]) for i in range(2))
        self._all_accepted = not settings.num_speculative_tokens or settings.acceptance_rate == 1
        self._decode_lens = np.full(settings.max_num_seqs, settings.query_len_decode, np.int64)
        self._decode_flags = np.ones(settings.max_num_seqs, np.bool_)
        self._decode_records: dict[int, tuple[StepRecord | None, float | None]] = {}
        self._clock = 0.0

    def steps(self) -> Iterator[ScheduledStep]:
        """The steps until all requests have finished; ValueError for one out of order or too large."""
        running, index = self._running, 0
        while running.count or self._next is not None:
            if not running.count and self._next is not None:
                self._clock = max(self._clock, self._next.arrival_s)
            until = self._next_admission()
            if self._only_decodes and until > self._clock:
                for step in self._decode(index, until):
                    yield step
                    index += 1
            else:
                yield self._step(index)
                index += 1

    @property
    def _only_decodes(self) -> bool:
        """Whether all requests that run are decodes, and fit a step together."""
        running, budget = self._running, self.settings.max_num_batched_tokens
        return not running.num_prefills and 0 < running.count * self.settings.query_len_decode <= budget

    def _next_admission(self) -> float:
        """From when on the next request can be admitted beside decodes alone; infinity if not before one finishes."""
        running, settings = self._running, self.settings
        if running.count * settings.query_len_decode >= settings.max_num_batched_tokens:
            return math.inf
        if self._next is None or not self._has_room(self._next):
            return math.inf
        return -math.inf if self._step_time is None else self._next.arrival_s

    def _step(self, index: int) -> ScheduledStep:
        """Schedule, dispatch and account for one step."""
        running = self._running
        query_lens, cached_tokens = self._schedule()
        is_decode = running.is_decode[: query_lens.size]
        columns = running.columns(query_lens, is_decode, any_prefill=True)
        record = None if self._dispatch is None else self._dispatch(columns.batch())
        start, seconds = self._clock, self._seconds(record)
        self._clock += seconds or 0.0
        done = running.advance(query_lens, is_decode, self._accepted(is_decode.size))
        self._end_chunks((~is_decode).nonzero()[0].tolist())
        ids, times = self._finish(done) if done.any() else ((), ())
        began = None if seconds is None else start
        return ScheduledStep(index, columns, record, began, seconds, 0, ids, times, cached_tokens)

    def _decode(self, index: int, until: float) -> Iterator[ScheduledStep]:
        """The steps of decodes alone, all alike: to the end of the first of them, or until the next admission.

        They are accounted for before the first of them is handed out.
        """
        running, emitted = self._running, self.settings.query_len_decode
        count, start = running.count, self._clock
        columns = running.columns(self._decode_lens[:count], self._decode_flags[:count], any_prefill=False)
        if count not in self._decode_records:
            record = None if self._dispatch is None else self._dispatch(columns.batch())
            self._decode_records[count] = record, self._seconds(record)
        record, seconds = self._decode_records[count]
        num_steps = self._num_alike(until, seconds)
        running.decode(num_steps * emitted if self._all_accepted else self._accepted(count))
        done = running.left[:count] <= 0
        ids, times = self._finish(done) if done.any() else ((), ())
        began = None if seconds is None else start
        for step in range(num_steps - 1):
            yield ScheduledStep(index + step, columns, record, began, seconds, step * emitted)
            began = None if seconds is None or began is None else began + seconds
        last = num_steps - 1
        yield ScheduledStep(index + last, columns, record, began, seconds, last * emitted, ids, times)

    def _num_alike(self, until: float, seconds: float | None) -> int:
        """How many steps of decodes alone follow one another, at least one; the clock moves on to their end."""
        most = -(-self._running.least_left // self.settings.query_len_decode) if self._all_accepted else 1
        if seconds is None:
            return most
        count = 0
        while count < most and (self._clock < until or not count):
            self._clock += seconds
            count += 1
        return count

    def _schedule(self) -> tuple[npt.NDArray[np.int64], int]:
        """The query lengths of the first requests, as many as this step takes, admitted ones included.

        And the tokens that those admitted need not compute.
        """
        running, budget = self._running, self.settings.max_num_batched_tokens
        wanted = running.wanted(self.settings.query_len_decode)
        used = int(wanted.sum())
        if used > budget:
            return self._cut(wanted), 0
        admitted: list[int] = []
        cached_tokens = 0
        while used < budget and (request := self._admissible()) is not None:
            computed = self._admit(request)
            cached_tokens += computed
            admitted.append(min(request.prompt_tokens - computed, budget - used))
            used += admitted[-1]
        lengths = np.concatenate((wanted, admitted)).astype(np.int64) if admitted else wanted
        return lengths, cached_tokens

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

    def _admissible(self) -> TraceRequest | None:
        """The next request if it waits and there is room for it."""
        request = self._next
        if request is None or (self._step_time is not None and request.arrival_s > self._clock):
            return None
        return request if self._has_room(request) else None

    def _has_room(self, request: TraceRequest) -> bool:
        """Whether a seat and KV blocks are free for the request; ValueError if there never can be."""
        settings, free = self.settings, self._pool.num_free
        if self._running.count == settings.max_num_seqs:
            return False
        if free is None or settings.num_blocks is None:
            return True
        blocks = blocks_for(self._most_tokens(request), settings.block_size)
        if blocks > settings.num_blocks:
            raise ValueError(
                f"num_blocks is {settings.num_blocks}: it must be at least {blocks} for request "
                f"{request.request_id!r}, which has {request.prompt_tokens} prompt_tokens and "
                f"{request.output_tokens} output_tokens; a block holds {settings.block_size}"
            )
        return blocks <= free

    def _admit(self, request: TraceRequest) -> int:
        """Let the next request run, and take the one after it from the stream; the tokens that it starts from."""
        kept = RunningRequest(request, BlockTable(self.settings.block_size))
        self._pool.grow(kept.table, self._most_tokens(request))
        share = self.settings.prompt_logprobs_share
        all_rows_read = share > 0 and bool(self._logprobs.random() < share)
        computed = 0
        if self._prefixes is not None and not all_rows_read:
            hit = self._prefixes.hit(request.prefix_hashes, request.prompt_tokens)
            computed = computed_after_hit(hit, self.settings.window)
            if computed:
                kept.held_blocks = self._prefixes.hold(request.prefix_hashes, 0, hit)
        self._running.add(kept, computed, all_rows_read)
        self._next = next(self._stream, None)
        if self._next is not None and self._next.arrival_s < request.arrival_s:
            raise ValueError(
                f"request {self._next.request_id!r} arrives at {self._next.arrival_s} s: it must not arrive "
                f"before {request.request_id!r}, at {request.arrival_s} s"
            )
        return computed

    def _most_tokens(self, request: TraceRequest) -> int:
        """The most tokens whose KV the request ever holds; its last decode starts with the last output but one."""
        if request.output_tokens < 2:
            return request.prompt_tokens
        return request.prompt_tokens + request.output_tokens - 2 + self.settings.query_len_decode

    def _accepted(self, count: int) -> int | npt.NDArray[np.int64]:
        """Tokens that each decode emits: its draft tokens up to the first that misses, and one."""
        drafts = self.settings.num_speculative_tokens
        if self._all_accepted:
            return drafts + 1
        hits = self._acceptance.random((count, drafts)) < self.settings.acceptance_rate
        return 1 + np.logical_and.accumulate(hits, axis=1).sum(axis=1)

    def _seconds(self, record: StepRecord | None) -> float | None:
        """The step's length in virtual time, None where it is unknown."""
        if self._step_time is None or record is None:
            return None
        seconds = self._step_time(record)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"step_time is {seconds} s: it must be finite and at least 0")
        return seconds

    def _end_chunks(self, prefills: list[int]) -> None:
        """Note the first tokens that these prefills sampled, and cache the blocks that they have computed."""
        for index in prefills:
            kept, computed = self._running[index], int(self._running.computed[index])
            if computed >= kept.request.prompt_tokens and kept.request.output_tokens:
                kept.first_token_s = self._clock
            if self._prefixes is not None:
                kept.held_blocks = self._prefixes.hold(kept.request.prefix_hashes, kept.held_blocks, computed)

    def _finish(self, done: npt.NDArray[np.bool_]) -> tuple[tuple[str, ...], tuple[RequestTimes, ...]]:
        """Take the finished requests out, and their blocks back; their ids, and their times if time is known."""
        finished = self._running.remove(done)
        for kept in finished:
            self._pool.release(kept.table)
            if self._prefixes is not None:
                self._prefixes.release(kept.request.prefix_hashes, kept.held_blocks)
        ids = tuple(kept.request.request_id for kept in finished)
        return ids, () if self._step_time is None else tuple(map(self._times, finished))

    def _times(self, kept: RunningRequest) -> RequestTimes:
        """The times of a request that finishes now."""
        request = kept.request
        return RequestTimes(
            request.request_id, request.arrival_s, kept.first_token_s, self._clock, request.output_tokens
        )
