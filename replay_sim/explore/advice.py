"""The recommendation: the winner and its margin, then what plan, pool, prompts, threshold and dispatches say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.evidence import Evidence, PromptTimes
from replay_sim.explore.job import Job
from replay_sim.explore.pool_measured import ReservedCase
from replay_sim.explore.report_parts import sentence
from replay_sim.explore.report_threshold import config_words, crossing_words
from replay_sim.explore.report_workload import guesses_of, told_of
from replay_sim.explore.speedup_cells import CellKind
from replay_sim.explore.tuning_report import headline
from replay_sim.explore.workload_steps import TunedWorkload
from replay_sim.plan import unreachable_sizes
from replay_sim.plan.capture_sizes import listed

MIB = 1 << 20
SEVERAL_SIZES = 2
MOST_GUESSES = 3
EXTRAPOLATED = "extrapolated"


@attrs.frozen
class Advice:
    """A headline to act on, and the facts behind it, a sentence each."""

    headline: str
    facts: tuple[str, ...]


def advise(found: Evidence) -> Advice:
    """What to do about the job's config: tuned sizes or its own, judged by modelled times, then by counts and bytes."""
    job = found.job
    plan = plan_verdict(job)
    facts = [*_speedup(found), *_threshold(found), _cost(job), *_pool(found.pool.chosen), _padding(job)]
    facts += [*_workload(job), *map(sentence, job.plan.notes), *found.limits]
    if isinstance(job.tuned, str):
        return Advice(plan, (f"The config was not tuned on this workload: {job.tuned}.", *facts))
    return Advice(
        headline(job.tuned.tuning), (*_margin(job.tuned), f"The config's own plan, by counts alone: {plan}", *facts)
    )


def recommendation(advice: Advice) -> str:
    """The recommendation for a terminal."""
    return "\n".join([advice.headline, *(f"- {fact}" for fact in advice.facts)])


def _margin(tuned: TunedWorkload) -> Iterator[str]:
    """What the winner overrides, the margin where there is a choice, and how much of the time is extrapolated."""
    yield from map(sentence, told_of(tuned))
    own, best = (plan.unseen or plan.seen for plan in (tuned.tuning.own, tuned.tuning.tuned))
    if own.mixed_step_ms and best.mixed_step_ms and own.mixed_steps == best.mixed_steps:
        less = 1 - best.mixed_step_ms / own.mixed_step_ms
        yield (
            f"Of these steps {own.mixed_steps:,} of {own.steps:,} run outside of FULL graphs, where sizes are a "
            f"choice: there a step takes {abs(less):.1%} {'more' if less < 0 else 'less'}, "
            f"{best.mixed_step_ms:,.3f} ms tuned against {own.mixed_step_ms:,.3f} ms with the config's own sizes "
            "(modelled)."
        )
    guesses = [guess.removeprefix(f"{EXTRAPOLATED}, ") for guess in guesses_of(tuned)]
    if guesses:
        more = f"; {len(guesses) - MOST_GUESSES} more reasons" if len(guesses) > MOST_GUESSES else ""
        yield f"The model is {EXTRAPOLATED} to {'; '.join(guesses[:MOST_GUESSES])}{more}."


def _speedup(found: Evidence) -> Iterator[str]:
    """The shortest and the longest prompt that have a number, of those that the config runs so if there are any."""
    known = [one for one in found.prompts if one.eager.ratio is not None]
    run = [one for one in known if one.replays]
    chosen = run or known
    if chosen:
        where = ", ".join(map(_prompt, chosen[:1] + chosen[1:][-1:]))
        takes = "takes" if run else "would take, if this config ran prompts so,"
        measured = any(one.eager.kind is CellKind.MEASURED for one in chosen)
        on = f"; {'; '.join(sorted({one.provenance for _, one in found.drawn}))}" if measured else ""
        yield (
            f"“{ARM_LOOKS[found.arm].label}” {takes} of replay off's time {where}; one prompt a step, "
            f"{found.job.shape.num_local_experts} experts a rank{on}."
        )


def _prompt(one: PromptTimes) -> str:
    cell = one.eager
    source = ", ".join(cell.source.split(", ")[:2]) if cell.kind is CellKind.MEASURED else cell.kind.value
    return f"{cell.ratio:.1%} at {one.tokens:,} tokens ({source})"


def _threshold(found: Evidence) -> Iterator[str]:
    at = found.threshold
    if isinstance(at, str):
        yield f"No curve says from where on the break pays: {at}."
    else:
        yield crossing_words(found, at)
        yield config_words(found, at)


def _pool(case: ReservedCase) -> Iterator[str]:
    model, replay = (nbytes / MIB for nbytes in case.predicted)
    measured = ""
    if case.measured is not None:
        measured = f"; measured {case.measured[0] / MIB:,.0f} and {case.measured[1] / MIB:,.0f} MiB"
    yield f"Model graphs reserve {model:,.0f} MiB, replay graphs {replay:,.0f} MiB beside them (predicted{measured})."


def plan_verdict(job: Job) -> str:
    """What the counts say of the plan alone: the first that holds, from what is broken to what is wasteful."""
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
    if not simulation.replay_steps:
        return [f"None of {simulation.steps:,} steps has a replay batch, however many requests wait."]
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
