"""The report's plan and its pool memory."""

from __future__ import annotations

from replay_sim.explore.evidence import Evidence
from replay_sim.explore.figures_plan import staircase_figure
from replay_sim.explore.figures_pool import SENTENCES, reserved_figure
from replay_sim.explore.pool_measured import ReservedCase, reserved_source
from replay_sim.explore.report_parts import MIB, Drawing, Section, Table, Words, cell, sentence
from replay_sim.replay.sharing import PoolSharing


def plan_section(found: Evidence) -> Section:
    """The staircase of the replay sizes, if there are any, then settings, sizes and costs in the engine's names."""
    job = found.job
    source = f"computed by replay_sim.plan from config {job.config_name}; no device was used"
    summary = job.summary | {"predicted_pool_bytes": sum(found.pool.chosen.predicted)}
    facts = [(key, cell(key, value)) for key, value in summary.items() if key != "notes"]
    return Section(
        "plan",
        "Plan",
        [
            *(Words(sentence(note)) for note in job.plan.notes),
            *([Drawing("staircase", staircase_figure(job.plan, source))] if job.plan.replay_sizes else []),
            Table("Settings, sizes and costs", (), facts),
            Words(
                f"Computed for decoder {job.shape.name}. Padding is a share of the rows that run, over every row count "
                "that some step can have, each once. Made by",
                f"replay-sim plan {job.config_name}",
                is_source=True,
            ),
        ],
    )


def pool_section(found: Evidence) -> Section:
    """Reserved bytes of the plan's graphs in each arrangement, predicted and, where a record has the plan, measured."""
    job, pool = found.job, found.pool
    is_measured = pool.record is not None
    header = ["Replay graphs in", "Order", "Outputs", "Model MiB, predicted", "Replay MiB, predicted"]
    if is_measured:
        header += ["Model MiB, measured", "Replay MiB, measured", "Error"]
    source = reserved_source(job.config_name, job.shape, pool.record)
    small = f"{sentence(source)} Growth over the whole capture of each group of graphs."
    if pool.memory.workspaces:
        spaces = ", ".join(f"{name}, {nbytes / MIB:,.0f} MiB" for name, nbytes in pool.memory.workspaces)
        small += f" Outside of the pools each stream keeps a library workspace: {spaces}."
    sharing = pool.memory.sharing
    return Section(
        "pool",
        "Pool memory",
        [
            Words(
                f"The replay graphs of this plan's decoder use {SENTENCES[sharing.sharing]}: {sharing.reason}. A model "
                "whose early aux states are read after the replay layers takes a stream of its own."
            ),
            Drawing("pool", reserved_figure(pool.cases, source)),
            Table(
                f"Reserved by graph pools, {'predicted and measured' if is_measured else 'predicted'}",
                header,
                [_pool_row(case, is_measured) for case in pool.cases],
            ),
            Words(small, is_source=True),
        ],
    )


def _pool_row(case: ReservedCase, with_measured: bool) -> list[str]:
    row = [SENTENCES[PoolSharing(case.arrangement)], case.order.replace("_", " "), case.outputs]
    row += [f"{nbytes / MIB:,.0f}" for nbytes in case.predicted]
    if case.measured is None or case.error is None:
        return row + ["–"] * (3 * with_measured)
    return row + [f"{nbytes / MIB:,.0f}" for nbytes in case.measured] + [f"{case.error:+.2%}"]
