"""The steps of one schedule, counted once and then read at any window, and how a plan runs all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.explore.tuning_steps import StepKey
from replay_sim.plan import CapturePlan
from replay_sim.workload.scheduled_step import BatchColumns
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MODES = ("NONE", "PIECEWISE", "FULL")
"""What an index into the modes stands for."""


@attrs.frozen(eq=False)
class CountedSteps:
    """S distinct steps at one window, ascending: tokens, rows that a replay batch would have (S1), and how often.

    tokens, rows and counts int64 (S); uniform bool (S): all requests are decodes of the full length.
    """

    tokens: Ints
    rows: Ints
    uniform: Bools
    counts: Ints

    def key(self, index: int) -> StepKey:
        """One of the steps as tuning names it."""
        return int(self.tokens[index]), int(self.rows[index]), bool(self.uniform[index])


@attrs.frozen(eq=False)
class CountedSchedule:
    """B batches in the order in which they ran, those that follow one another alike as one.

    tokens and counts int64 (B), counts how often; uniform bool (B): all requests decode. prefill_lens int64 (P), the
    query lengths of all prefills, and batch_of int64 (P), their batches.
    """

    tokens: Ints
    counts: Ints
    uniform: Bools
    prefill_lens: Ints
    batch_of: Ints

    def at_window(self, window: int) -> CountedSteps:
        """The distinct steps: a prefill keeps at most `window` rows, a decode all of its own (S1)."""
        trimmed = np.zeros_like(self.tokens)
        np.add.at(trimmed, self.batch_of, np.maximum(self.prefill_lens - window, 0))
        columns = np.stack([self.tokens, self.tokens - trimmed, self.uniform.astype(np.int64)])
        distinct, which = np.unique(columns, axis=1, return_inverse=True)
        counts = np.zeros(distinct.shape[1], np.int64)
        np.add.at(counts, which, self.counts)
        return CountedSteps(distinct[0], distinct[1], distinct[2].astype(np.bool_), counts)


def count_schedule(requests: Iterable[TraceRequest], settings: SchedulerSettings) -> CountedSchedule:
    """Schedule the requests; ValueError for what the scheduler refuses, and for no request at all.

    No request's prompt rows are all read, and a decode is never split, so that decodes alone are uniform.
    """
    batches: list[BatchColumns] = []
    counts: list[int] = []
    for step in Scheduler(requests, settings).steps():
        if not batches or step.columns is not batches[-1]:
            batches.append(step.columns)
            counts.append(0)
        counts[-1] += 1
    if not batches:
        raise ValueError("the workload has no requests: there are no steps to count")
    prefills = [batch.query_lens[~batch.is_decode] for batch in batches]
    return CountedSchedule(
        tokens=np.array([batch.query_lens.sum() for batch in batches], np.int64),
        counts=np.array(counts, np.int64),
        uniform=np.array([batch.is_decode.all() for batch in batches], np.bool_),
        prefill_lens=np.concatenate(prefills),
        batch_of=np.repeat(np.arange(len(batches)), [lengths.size for lengths in prefills]),
    )


@attrs.frozen(eq=False)
class DispatchedSteps:
    """How a plan runs each of S counted steps, as every planned size is captured (D1-D3, S5).

    mode int64 (S), indices into MODES; padded_tokens int64 (S); padded_rows int64 (S), 0 without a replay batch;
    in_graph bool (S): a replay graph holds the batch.
    """

    steps: CountedSteps
    mode: Ints
    padded_tokens: Ints
    padded_rows: Ints
    in_graph: Bools

    @property
    def has_replay_batch(self) -> Bools:
        """Which steps have a replay batch, bool (S)."""
        has_batch: Bools = self.padded_rows > 0
        return has_batch


def dispatch_steps(steps: CountedSteps, plan: CapturePlan) -> DispatchedSteps:
    """Dispatch all steps under `plan`, whose window is theirs."""
    full = _padded(plan.full_sizes, steps.tokens) * steps.uniform
    piecewise = _padded(plan.model_sizes, steps.tokens)
    mode = np.where(full > 0, MODES.index("FULL"), np.where(piecewise > 0, MODES.index("PIECEWISE"), 0))
    padded = np.where(full > 0, full, np.where(piecewise > 0, piecewise, steps.tokens))
    breaks = np.zeros_like(steps.uniform) if plan.trim_threshold is None else piecewise >= plan.trim_threshold
    is_eager = mode == MODES.index("NONE")
    has_batch = np.where(is_eager, steps.rows < steps.tokens, breaks & (mode == MODES.index("PIECEWISE")))
    rows = _padded(plan.replay_sizes, steps.rows)
    in_graph = has_batch & (rows > 0)
    return DispatchedSteps(steps, mode, padded, np.where(in_graph, rows, steps.rows) * has_batch, in_graph)


def _padded(sizes: Sequence[int], values: Ints) -> Ints:
    """The smallest of the ascending sizes that holds each value; 0 where none does."""
    held: Ints = np.array([*sizes, 0], np.int64)[np.searchsorted(np.array(sizes, np.int64), values)]
    return held
