"""A workload run through scheduler and dispatch, without a device: what would be dispatched, and when if known."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import attrs

from replay_sim.batch.dispatch import DispatchTable, StepRecord, dispatch_step
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.workload.request_times import RequestTimes, TimeHistogram
from replay_sim.workload.scheduled_step import ScheduledStep
from replay_sim.workload.scheduler import Dispatch


def planned_dispatch(plan: CapturePlan) -> Dispatch:
    """Dispatch as it is when every planned size was captured."""
    return partial(
        dispatch_step,
        plan=plan,
        model_sizes=frozenset(plan.model_sizes),
        full_sizes=frozenset(plan.full_sizes),
        replay_sizes=frozenset(plan.replay_sizes),
    )


@attrs.define(eq=False)
class Simulation:
    """What the steps so far add up to, their dispatch table, and histograms of times where a step time is known.

    tokens and replay_rows are real ones; pads are the rows added to fill graphs. trimmed_rows: rows that the
    replay layers did not run on, of the steps with a replay batch. cached_tokens: prompt tokens that prefix hits
    saved.
    """

    table: DispatchTable = attrs.field(factory=DispatchTable)
    steps: int = 0
    tokens: int = 0
    token_pads: int = 0
    cached_tokens: int = 0
    requests_finished: int = 0
    replay_steps: int = 0
    replay_rows: int = 0
    replay_pads: int = 0
    trimmed_rows: int = 0
    step_times: TimeHistogram = attrs.field(factory=TimeHistogram)
    ttft: TimeHistogram = attrs.field(factory=TimeHistogram)
    time_per_output_token: TimeHistogram = attrs.field(factory=TimeHistogram)

    def watch(self, steps: Iterable[ScheduledStep]) -> Iterator[ScheduledStep]:
        """Pass the dispatched steps through and count them; ValueError for one without a record.

        Steps alike are counted together: the counts are complete when the iteration has ended.
        """
        record, seconds, count = None, None, 0
        try:
            for step in steps:
                if step.record is None:
                    raise ValueError(f"step {step.index} has no record: the scheduler needs a dispatch")
                if step.record is not record or step.seconds != seconds:
                    self._add(record, seconds, count)
                    record, seconds, count = step.record, step.seconds, 0
                count += 1
                self.cached_tokens += step.cached_tokens
                if step.finished:
                    self.requests_finished += len(step.finished)
                    self._add_times(step.times)
                yield step
        finally:
            self._add(record, seconds, count)

    def as_dict(self) -> dict[str, int | float]:
        """The counts, and as shares of 1: steps with a replay batch, and pads among all rows that ran."""
        counts: dict[str, int | float] = {
            name: value for name, value in attrs.asdict(self, recurse=False).items() if isinstance(value, int)
        }
        return counts | {
            "replay_step_share": _share(self.replay_steps, self.steps),
            "token_pad_share": _share(self.token_pads, self.tokens + self.token_pads),
            "replay_pad_share": _share(self.replay_pads, self.replay_rows + self.replay_pads),
        }

    def histograms(self) -> dict[str, dict[str, list[int]]]:
        """Steps by tokens and padded tokens, and those with a replay batch by its rows and padded rows, ascending."""
        counts: dict[str, Counter[int]] = {
            name: Counter() for name in ("num_tokens", "padded_tokens", "replay_rows", "padded_rows")
        }
        names = (("num_tokens", "padded_tokens", self.table.model), ("replay_rows", "padded_rows", self.table.replay))
        for unpadded_name, padded_name, table in names:
            for (unpadded, padded, _), count in table.items():
                counts[unpadded_name][unpadded] += count
                counts[padded_name][padded] += count
        return {
            name: {"values": sorted(counter), "counts": [counter[value] for value in sorted(counter)]}
            for name, counter in counts.items()
        }

    def times(self) -> dict[str, dict[str, object]] | None:
        """Histograms of step time, TTFT and time per output token, in seconds; None where no step time is known."""
        if not self.step_times.count:
            return None
        return {
            "step_s": self.step_times.as_dict(),
            "ttft_s": self.ttft.as_dict(),
            "time_per_output_token_s": self.time_per_output_token.as_dict(),
        }

    def _add(self, record: StepRecord | None, seconds: float | None, count: int) -> None:
        """Count so many steps of this record, each of so many seconds if known."""
        if record is None:
            return
        self.table.add(record, count)
        self.steps += count
        self.tokens += count * record.num_tokens
        self.token_pads += count * (record.padded_tokens - record.num_tokens)
        if seconds is not None:
            self.step_times.add(seconds, count)
        if record.has_replay_batch:
            self.replay_steps += count
            self.replay_rows += count * record.replay_rows
            self.replay_pads += count * (record.padded_rows - record.replay_rows)
            self.trimmed_rows += count * (record.num_tokens - record.replay_rows)

    def _add_times(self, times: Iterable[RequestTimes]) -> None:
        """Count the times of finished requests."""
        for request in times:
            if request.ttft_s is not None:
                self.ttft.add(request.ttft_s)
            if request.time_per_output_token_s is not None:
                self.time_per_output_token.add(request.time_per_output_token_s)


def _share(part: int, whole: int) -> float:
    """part / whole, and 0 of nothing."""
    return part / whole if whole else 0.0
