"""The recommendation: what a plan and a workload's dispatches say to keep or change, counted and not timed."""

from __future__ import annotations

from collections import Counter

import attrs

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.explore.job import Job
from replay_sim.plan import unreachable_sizes
from replay_sim.plan.capture_sizes import listed

MIB = 1 << 20
SEVERAL_SIZES = 2


@attrs.frozen
class Advice:
    """A headline to act on, and the facts behind it, a sentence each."""

    headline: str
    facts: tuple[str, ...]


def advise(job: Job) -> Advice:
    """What to do about the job's plan, judged by its own costs and by the workload that was counted."""
    facts = [_cost(job), _padding(job), *_workload(job), *job.plan.notes]
    return Advice(_headline(job), tuple(facts))


def _headline(job: Job) -> str:
    """The first of these that holds, from what is broken to what is wasteful."""
    plan, table = job.plan, job.simulation.table
    if not plan.replay_sizes:
        return "This config captures no replay graphs: every replay batch runs eagerly. The reason is in the notes."
    if not table.replay:
        return "Replay never happens on this workload: no step has a replay batch, so its graphs buy nothing."
    eager = sum(count for (_, _, mode), count in table.replay.items() if mode is CudagraphMode.NONE)
    if eager:
        largest = max(rows for rows, _, _ in table.replay)
        return (
            f"Plan larger replay sizes: {eager:,} of {table.replay.total():,} replay batches run eagerly, the largest "
            f"of {largest:,} rows; the largest size is {plan.replay_sizes[-1]:,}."
        )
    unreachable = unreachable_sizes(plan)
    if unreachable:
        return f"Drop the replay sizes {listed(unreachable)}: no batch can select them."
    unused = [size for size in plan.replay_sizes if size not in _uses(job)]
    if len(unused) >= SEVERAL_SIZES:
        return (
            f"{len(plan.replay_sizes) - len(unused)} of {len(plan.replay_sizes)} replay sizes hold every replay batch "
            f"of this saturated workload; the others ({listed(unused)}) were not used in it. Sharing the pool of the "
            "model graphs, they cost capture time and no pool memory."
        )
    return f"Keep the {len(plan.replay_sizes)} replay sizes: this workload runs every replay batch in one of them."


def _uses(job: Job) -> Counter[int]:
    """How many replay batches each replay graph runs."""
    uses: Counter[int] = Counter()
    for (_, padded, mode), count in job.simulation.table.replay.items():
        if mode is CudagraphMode.PIECEWISE:
            uses[padded] += count
    return uses


def _cost(job: Job) -> str:
    cost = job.summary
    return (
        f"The plan captures {cost['num_replay_graphs']} replay graphs beside {cost['num_model_graphs']} piecewise and "
        f"{cost['num_full_graphs']} full model graphs; on {job.shape.name} its static buffers take "
        f"{cost['static_buffer_bytes'] / MIB:,.0f} MiB and its break buffers "
        f"{cost['break_buffer_bytes'] / MIB:,.0f} MiB."
    )


def _padding(job: Job) -> str:
    cost = job.summary
    if cost["worst_padding_rows"] is None:
        return "No replay batch that any step can have runs in a replay graph."
    return (
        f"Over all reachable row counts {cost['mean_padding']:.1%} of the rows run are pads; at worst, with "
        f"{cost['worst_padding_rows']:,} rows, {cost['worst_padding']:.1%}."
    )


def _workload(job: Job) -> list[str]:
    simulation, table = job.simulation, job.simulation.table
    counts = simulation.as_dict()
    facts = [
        f"Of {simulation.steps:,} steps {simulation.replay_steps:,} ({counts['replay_step_share']:.1%}) have a replay "
        f"batch; there the replay layers skip {simulation.trimmed_rows:,} of "
        f"{simulation.trimmed_rows + simulation.replay_rows:,} rows and run on {simulation.replay_pads:,} pads "
        f"({counts['replay_pad_share']:.1%} of what they run on)."
    ]
    if table.replay:
        rows: Counter[int] = Counter()
        for (asked, _, _), count in table.replay.items():
            rows[asked] += count
        usual, count = min(rows.items(), key=lambda item: (-item[1], item[0]))
        padded = min(size for asked, size, _ in table.replay if asked == usual)
        facts.append(
            f"The most frequent replay batch has {usual:,} rows ({count / table.replay.total():.0%} of replay batches) "
            f"and runs as {padded:,}."
        )
        facts.append(
            "All requests wait from the start and every draft token is accepted: the busiest case. With idle seats a "
            f"prefill that runs alone keeps {job.plan.window:,} rows, so keep a size for it."
        )
    return facts
