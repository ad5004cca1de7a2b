"""The steps of a workload as tuning sees them: how often each count of tokens and kept rows occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import attrs
import numpy as np

from replay_sim.batch.dispatch import smallest_size, step_needs
from replay_sim.batch.request import Batch
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.joint import MixedSteps
from replay_sim.workload.scheduled_step import ScheduledStep
from replay_sim.workload.statistics_table import REPLAY_GRAPHS, StatisticsTable

StepKey = tuple[int, int, bool]
"""Tokens, rows that a replay batch would have (S1), and whether all requests are decodes of the full length."""
StepCounts = Counter[StepKey]


def step_key(batch: Batch, plan: CapturePlan) -> StepKey:
    """The key of a batch; the window and the decode length are the plan's."""
    needs = step_needs(batch, plan)
    return needs.num_tokens, needs.kept_rows, needs.is_uniform_decode


def step_keys(steps: Iterable[ScheduledStep], plan: CapturePlan) -> Iterator[StepKey]:
    """The key of every step with tokens; that of steps alike, which share their columns, is made once."""
    columns, key = None, (0, 0, False)
    for step in steps:
        if step.columns is not columns:
            columns, key = step.columns, step_key(step.batch, plan)
        if key[0]:
            yield key


def in_halves(keys: Iterable[StepKey]) -> tuple[StepCounts, StepCounts]:
    """Count the first half of the steps and the second; the first has one more of an odd number."""
    listed = list(keys)
    middle = (len(listed) + 1) // 2
    return Counter(listed[:middle]), Counter(listed[middle:])


def is_full(key: StepKey, plan: CapturePlan) -> bool:
    """Whether a FULL graph of the plan takes the step (D1)."""
    return key[2] and smallest_size(plan.full_sizes, key[0]) is not None


def mixed_steps(counts: StepCounts, plan: CapturePlan) -> MixedSteps:
    """The steps that no FULL graph of the plan takes, those alike added up."""
    mixed: Counter[tuple[int, int]] = Counter()
    for key, count in counts.items():
        if not is_full(key, plan):
            mixed[key[:2]] += count
    pairs = sorted(mixed)
    return MixedSteps(
        np.array([tokens for tokens, _ in pairs], np.int64),
        np.array([rows for _, rows in pairs], np.int64),
        np.array([mixed[pair] for pair in pairs], np.float64),
    )


@attrs.frozen
class CountedTable:
    """A statistics table as step counts, and what had to be assumed for it, a sentence each."""

    counts: StepCounts
    assumed: tuple[str, ...]


def from_statistics(table: StatisticsTable, plan: CapturePlan) -> CountedTable:
    """Step counts from what a server logged under `plan`; ValueError if it has no row of a model graph.

    The table of model graphs says how many tokens steps have and which are FULL. Which replay rows belong to which
    step it does not say: those of a table of replay graphs are given to the steps that may have had them, the most
    rows to the most tokens, which never gives a step more rows than tokens where the tables are of the same steps.
    Without it a step is taken to have one prefill beside as many decode tokens as the median FULL step.
    """
    full = table.histogram("FULL")
    mixed = table.histogram("PIECEWISE") + table.histogram("NONE")
    rows = table.histogram(graphs=REPLAY_GRAPHS)
    counts: StepCounts = Counter({(tokens, tokens, True): count for tokens, count in full.items() if tokens})
    if not mixed and not counts:
        raise ValueError("statistics: no row counts model graphs; a table of them is needed, with or without replay's")
    usual = _median(full)
    for tokens, kept, count in _most_to_most(mixed, rows, usual + plan.window):
        if tokens:
            counts[tokens, min(tokens, kept), False] += count
    return CountedTable(counts, tuple(_assumed(mixed.total(), rows.total(), usual, plan.window)))


def _most_to_most(mixed: Counter[int], rows: Counter[int], otherwise: int) -> Iterator[tuple[int, int, int]]:
    """Tokens, rows and how often, both from the most down; steps beyond all rows get `otherwise`."""
    left = sorted(rows.items())
    for tokens, steps in sorted(mixed.items(), reverse=True):
        while steps and left:
            kept, count = left.pop()
            taken = min(steps, count)
            yield tokens, kept, taken
            steps -= taken
            if count > taken:
                left.append((kept, count - taken))
        if steps:
            yield tokens, otherwise, steps


def _median(histogram: Counter[int]) -> int:
    """The value that half of the counts do not exceed; 0 of nothing."""
    reached = 0
    for value in sorted(histogram):
        reached += histogram[value]
        if 2 * reached >= histogram.total():
            return value
    return 0


def _assumed(steps: int, with_rows: int, usual: int, window: int) -> Iterator[str]:
    if with_rows:
        yield f"The {min(with_rows, steps):,} replay batches are given to the steps of most tokens, most rows first."
    if with_rows < steps:
        yield (
            f"Replay rows of {steps - with_rows:,} steps are assumed, as their table has none: one prefill of up to "
            f"{window} kept rows beside {usual} decode tokens, the median of FULL steps."
        )
