"""A workload run through scheduler and dispatch, without a device and without times: what would be dispatched."""

from collections.abc import Iterable, Iterator
from functools import partial

import attrs

from replay_sim.batch.dispatch import DispatchTable, StepRecord, dispatch_step
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.workload.scheduler import Dispatch, ScheduledStep


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
    """What the steps so far add up to, and their dispatch table.

    tokens and replay_rows are real ones; pads are the rows added to fill graphs. trimmed_rows: rows that the
    replay layers did not run on, of the steps with a replay batch.
    """

    table: DispatchTable = attrs.field(factory=DispatchTable)
    steps: int = 0
    tokens: int = 0
    token_pads: int = 0
    requests_finished: int = 0
    replay_steps: int = 0
    replay_rows: int = 0
    replay_pads: int = 0
    trimmed_rows: int = 0

    def watch(self, steps: Iterable[ScheduledStep]) -> Iterator[ScheduledStep]:
        """Pass the dispatched steps through and count them; ValueError for one without a record."""
        for step in steps:
            if step.record is None:
                raise ValueError(f"step {step.index} has no record: the scheduler needs a dispatch")
            self._add(step.record)
            self.requests_finished += len(step.finished)
            yield step

    def as_dict(self) -> dict[str, int | float]:
        """The counts, and as shares of 1: steps with a replay batch, and pads among all rows that ran."""
        counts = attrs.asdict(self, filter=lambda field, _: field.name != "table")
        return counts | {
            "replay_step_share": _share(self.replay_steps, self.steps),
            "token_pad_share": _share(self.token_pads, self.tokens + self.token_pads),
            "replay_pad_share": _share(self.replay_pads, self.replay_rows + self.replay_pads),
        }

    def _add(self, record: StepRecord) -> None:
        """Count one step."""
        self.table.add(record)
        self.steps += 1
        self.tokens += record.num_tokens
        self.token_pads += record.padded_tokens - record.num_tokens
        if record.has_replay_batch:
            self.replay_steps += 1
            self.replay_rows += record.replay_rows
            self.replay_pads += record.padded_rows - record.replay_rows
            self.trimmed_rows += record.num_tokens - record.replay_rows


def _share(part: int, whole: int) -> float:
    """part / whole, and 0 of nothing."""
    return part / whole if whole else 0.0
