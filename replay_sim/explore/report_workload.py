"""The report's workload: the config tuned on it against its own, and the dispatches at its busiest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from replay_sim.batch.dispatch import HEADERS
from replay_sim.explore.evidence import Evidence
from replay_sim.explore.figures_tuning import curves_figure, plans_on_steps_figure
from replay_sim.explore.figures_workload import dispatch_figure, replay_rows_figure
from replay_sim.explore.job import ExecutedRun, Job
from replay_sim.explore.report_parts import (
    MIB,
    MOST_ROWS,
    Beside,
    Drawing,
    Heading,
    Part,
    Pasted,
    Section,
    Table,
    Words,
    listed,
    sentence,
)
from replay_sim.explore.tuning_report import About, as_dict, headline, keeps_own, overrides
from replay_sim.explore.vllm_export import emit_text
from replay_sim.explore.workload_steps import BUSIEST, TunedWorkload

PLANS = ("default", "own", "tuned")


def workload_section(found: Evidence) -> Section:
    """Tuned against the config's own, then counts of the busiest case."""
    job = found.job
    parts: list[Part] = [Words(sentence(job.workload))]
    if isinstance(job.tuned, str):
        parts.append(Words(f"The config was not tuned on it: {job.tuned}."))
    else:
        parts += _tuned(job, job.tuned)
    return Section("workload", "Workload", [*parts, *_busiest(job)])


def guesses_of(tuned: TunedWorkload) -> tuple[str, ...]:
    """Which of the steps that the outcome is judged on the model never saw the like of."""
    return tuned.costs.guesses(tuned.tuning.tuned.plan, tuned.unseen or tuned.seen)


def told_of(workload: TunedWorkload) -> list[str]:
    """What the config to paste sets against the one that was given."""
    return [] if keeps_own(workload.tuning) else overrides(workload.tuning)


def _tuned(job: Job, workload: TunedWorkload) -> Iterator[Part]:
    """The outcome of `tune`: headline, plans side by side, what graphs buy, the config to paste, and what to know."""
    tuning = workload.tuning
    about = About(config=job.config_name, workload=job.workload, assumed=(BUSIEST,), guesses=guesses_of(workload))
    outcome = as_dict(tuning, about)
    source = f"{job.workload}; step times are {workload.costs.source}"
    judged, half = (workload.unseen, "unseen") if workload.unseen else (workload.seen, "seen")
    yield Heading("Tuned on the first half of its steps, judged on the second")
    yield Words(headline(tuning))
    scores = {plan.name: plan.unseen or plan.seen for plan in tuning.plans}
    yield Drawing("tuned", plans_on_steps_figure(judged, tuning.tuned.plan, scores, f"{source}; steps: {half}"))
    yield _plans_table(outcome)
    yield Table("Sizes and threshold", ("", *PLANS), _settings_rows(outcome))
    if tuning.grid:
        yield Drawing("graphs", curves_figure(tuning, source))
    yield from (Words(sentence(note), is_source=True) for note in (*about.assumed, *about.guesses))
    yield Words(
        f"Capture seconds are graphs times seconds a graph, {outcome['capture_seconds_source']}. Made by",
        f"replay-sim tune {job.config_name}",
        is_source=True,
    )
    yield Heading("The config to paste")
    yield from (Words(sentence(told)) for told in told_of(workload))
    pasted = tuning.own if keeps_own(tuning) else tuning.tuned
    yield Pasted(emit_text(pasted.config, [(plan.name, plan.config) for plan in tuning.plans]))


def _plans_table(outcome: dict[str, Any]) -> Table:
    """Default, own and tuned on both halves."""
    header = ["Plan", "Steps", "Step ms", "Step ms outside of FULL graphs", "Padded rows", "Replay graphs"]
    header += ["PIECEWISE graphs", "Capture s", "Input buffers MiB"]
    rows = []
    for name in PLANS:
        plan = outcome[name]
        for half, score in (("tuned on", plan), ("unseen", (outcome["unseen"] or {}).get(name))):
            if score is None:
                continue
            mixed = "–" if score["mixed_step_ms"] is None else f"{score['mixed_step_ms']:,.3f}"
            row = [name, half, f"{score['expected_step_ms']:,.3f}", mixed]
            row += [f"{score[key]:,}" for key in ("padded_rows", "num_replay_graphs", "num_model_graphs")]
            rows.append([*row, f"{plan['capture_s']:,.1f}", f"{plan['static_buffer_bytes'] / MIB:,.0f}"])
    return Table("Expected step time, modelled", header, rows)


def _settings_rows(outcome: dict[str, Any]) -> list[list[str]]:
    keys = ("decoder_replay_trim_threshold", "decoder_replay_cudagraph_capture_sizes", "cudagraph_capture_sizes")
    return [[key, *(_listed(outcome[name][key]) for name in PLANS)] for key in keys]


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return listed(value, " ")
    return "none" if value is None else str(value)


def _busiest(job: Job) -> Iterator[Part]:
    """Counts, untimed: every request waits from the start."""
    table = job.simulation.table
    counted = f"counted by replay_sim from {job.workload}; no time is claimed"
    yield Heading("At its busiest")
    yield Words(
        "Here every request waits from the start and every draft token is accepted: no batch that this traffic can "
        "make is larger. Dispatches are counted, not timed."
    )
    yield Drawing("dispatch", dispatch_figure(table, counted))
    yield Drawing("rows", replay_rows_figure(table, job.plan, counted))
    yield dispatch_tables(table.model_rows(), table.replay_rows())
    reasons = [
        *(("model", reason.value, f"{count:,}") for reason, count in table.model_reasons.most_common()),
        *(("replay", reason.value, f"{count:,}") for reason, count in table.replay_reasons.most_common()),
    ]
    yield Table("Reasons", ("Layers", "Reason", "Steps"), reasons)
    yield Words("Counted by", f"replay-sim simulate {job.config_name}", is_source=True)


def dispatch_tables(model_rows: Sequence[Sequence[Any]], replay_rows: Sequence[Sequence[Any]]) -> Beside:
    """The dispatch table, model graphs beside replay graphs."""
    return Beside([_dispatch("Model graphs", model_rows), _dispatch("Replay graphs", replay_rows)])


def _dispatch(title: str, rows: Sequence[Sequence[Any]]) -> Table:
    cells = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row] for row in rows[:MOST_ROWS]]
    return Table(title, HEADERS, cells, len(rows) - len(cells))


def executed_section(run: ExecutedRun) -> Section:
    """The steps that the reference decoder ran: graphs, buffers and dispatches; times only of a GPU."""
    report = run.report
    header = ["Group", "Graphs", "Segments", "Operations", "Pool MiB"]
    rows = [
        [group.group, *(f"{n:,}" for n in (group.num_graphs, group.num_segments, group.num_operations))]
        + [f"{group.pool_bytes / MIB:,.1f}"]
        for group in report.groups
    ]
    if run.is_on_gpu:
        header.append("Capture s")
        rows = [[*row, f"{group.seconds:.2f}"] for row, group in zip(rows, report.groups, strict=True)]
    took = f", in {sum(report.step_us) / 1e6:.2f} s" if run.is_on_gpu else ""
    buffers = (
        f"Static input buffers {report.static_buffer_bytes / MIB:,.1f} MiB, break buffers "
        f"{report.break_buffer_bytes / MIB:,.1f} MiB. Pool: {report.sharing.value}, {report.sharing_reason}."
    )
    if not run.is_on_gpu:
        buffers += (
            f" Bytes are those of decoder {report.shape} under the CUDA caching allocator's rules, replayed on a CPU."
        )
    return Section(
        "executed",
        "Executed run",
        [
            Words(f"{len(report.records):,} steps of the same workload on decoder {report.shape}, {run.where}{took}."),
            Table("Graphs", header, rows),
            Words(buffers),
            dispatch_tables(report.table.model_rows(), report.table.replay_rows()),
        ],
    )
