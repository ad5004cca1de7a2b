"""The report: one standalone HTML page that a reviewer reads without Jupyter and without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import attrs
import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from replay_sim.batch.dispatch import HEADERS
from replay_sim.explore.advice import Advice, advise
from replay_sim.explore.figures_plan import staircase_figure
from replay_sim.explore.figures_pool import SENTENCES, reserved_figure
from replay_sim.explore.figures_workload import dispatch_figure, replay_rows_figure
from replay_sim.explore.job import ExecutedRun, Job
from replay_sim.explore.pool_map import recorded
from replay_sim.explore.pool_measured import CASES, ReservedCase, record_of, reserved_cases, reserved_source
from replay_sim.measure.environment import package_version
from replay_sim.measure.records import REQUIRED_POINT_KEYS, Record, bundled_records
from replay_sim.replay.sharing import PoolSharing
from replay_sim.whole_file import write_whole

MIB = 1 << 20
MOST_ROWS = 20
TEMPLATES = Path(__file__).parent / "templates"


@attrs.frozen
class Table:
    """A table as text: its header, its rows, and how many rows are left out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    hidden: int = 0


@attrs.frozen
class ShownRecord:
    """A record as the page shows it."""

    name: str
    record: Record
    settings: str
    points: Table


def write_report(
    job: Job,
    folder: Path,
    *,
    notebooks: Mapping[str, str] | None = None,
    records: Iterable[tuple[str, Record]] | None = None,
) -> Path:
    """Write `index.html` into `folder`, whole or not at all, and return its path.

    `notebooks` are titles by link, relative to the folder. `records` default to those in the package. Raises OSError
    where the folder cannot be made.
    """
    path = folder / "index.html"
    write_whole(path, render(job, notebooks or {}, bundled_records() if records is None else records))
    return path


def render(job: Job, notebooks: Mapping[str, str], records: Iterable[tuple[str, Record]]) -> str:
    """The page as text; whatever comes from files is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    records = list(records)
    shown = sorted((_shown(name, record) for name, record in records), key=_kind_order)
    pool = _pool(job, records)
    return environment.get_template("report.html.j2").render(
        job=job,
        advice=advise(job),
        plan_facts=_plan_facts(job, pool["chosen_bytes"]),
        pool=pool,
        figures=_figures(job),
        model_table=_dispatch_table(job.simulation.table.model_rows()),
        replay_table=_dispatch_table(job.simulation.table.replay_rows()),
        reasons=_reasons(job),
        executed=_executed(job.executed) if job.executed else None,
        records=shown,
        notebooks=notebooks,
        plotly_js=get_plotlyjs(),
        version=package_version(),
        today=date.today().isoformat(),
    )


def recommendation(advice: Advice) -> str:
    """The recommendation for a terminal."""
    return "\n".join([advice.headline, *(f"- {fact}" for fact in advice.facts)])


def _figures(job: Job) -> dict[str, str]:
    counted = f"counted by replay_sim from {job.workload}; no time is claimed"
    planned = f"computed by replay_sim.plan from config {job.config_name}; no device was used"
    table = job.simulation.table
    drawn = {
        "staircase": staircase_figure(job.plan, planned),
        "dispatch": dispatch_figure(table, counted),
        "rows": replay_rows_figure(table, job.plan, counted),
    }
    return {name: _html(figure, name) for name, figure in drawn.items()}


def _html(figure: go.Figure, name: str) -> str:
    config = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"figure-{name}", config=config))


def _plan_facts(job: Job, predicted_pool_bytes: int) -> Table:
    """Settings and sizes in the engine's names, costs in their units."""
    summary = job.summary | {"predicted_pool_bytes": predicted_pool_bytes}
    rows = [(key, _cell(key, value)) for key, value in summary.items() if key != "notes"]
    return Table(("", ""), rows)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "reachable_rows":
        return ", ".join(f"{low:,} to {high:,}" for low, high in value) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / MIB:,.1f} MiB"
    if key in ("mean_padding", "worst_padding"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _pool(job: Job, records: Sequence[tuple[str, Record]]) -> dict[str, Any]:
    """Reserved bytes of the plan's graphs in each arrangement, predicted and, where a record has the plan, measured."""
    memory = recorded(job.shape, job.plan)
    record = record_of(job.plan, job.shape, records)
    cases = reserved_cases(memory, record)
    source = reserved_source(job.config_name, job.shape, record)
    header = ["Replay graphs in", "Order", "Outputs", "Model MiB, predicted", "Replay MiB, predicted"]
    if record is not None:
        header += ["Model MiB, measured", "Replay MiB, measured", "Error"]
    usual = (memory.sharing.sharing.value, *CASES[0])
    return {
        "figure": _html(reserved_figure(cases, source), "pool"),
        "table": Table(header, [_pool_row(case, record is not None) for case in cases]),
        "source": source,
        "is_measured": record is not None,
        "sharing": memory.sharing,
        "where": SENTENCES[memory.sharing.sharing],
        "chosen_bytes": next(
            sum(case.predicted) for case in cases if (case.arrangement, case.order, case.outputs) == usual
        ),
        "workspaces": [f"{name}, {nbytes / MIB:,.0f} MiB" for name, nbytes in memory.workspaces],
    }


def _pool_row(case: ReservedCase, with_measured: bool) -> list[str]:
    row = [SENTENCES[PoolSharing(case.arrangement)], case.order.replace("_", " "), case.outputs]
    row += [f"{nbytes / MIB:,.0f}" for nbytes in case.predicted]
    if case.measured is None or case.error is None:
        return row + ["–"] * (3 * with_measured)
    return row + [f"{nbytes / MIB:,.0f}" for nbytes in case.measured] + [f"{case.error:+.2%}"]


def _dispatch_table(rows: Sequence[Sequence[Any]]) -> Table:
    cells = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row] for row in rows[:MOST_ROWS]]
    return Table(HEADERS, cells, len(rows) - len(cells))


def _reasons(job: Job) -> Table:
    table = job.simulation.table
    counts = [
        *(("model", reason.value, count) for reason, count in table.model_reasons.most_common()),
        *(("replay", reason.value, count) for reason, count in table.replay_reasons.most_common()),
    ]
    return Table(("Layers", "Reason", "Steps"), [(layers, reason, f"{count:,}") for layers, reason, count in counts])


def _executed(run: ExecutedRun) -> dict[str, Any]:
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
    table = report.table
    return {
        "run": run,
        "groups": Table(header, rows),
        "model_table": _dispatch_table(table.model_rows()),
        "replay_table": _dispatch_table(table.replay_rows()),
        "static_mib": f"{report.static_buffer_bytes / MIB:,.1f}",
        "break_mib": f"{report.break_buffer_bytes / MIB:,.1f}",
        "seconds": f"{sum(report.step_us) / 1e6:.2f}",
    }


def _kind_order(shown: ShownRecord) -> tuple[int, str]:
    return list(REQUIRED_POINT_KEYS).index(shown.record.kind), shown.name


def _shown(name: str, record: Record) -> ShownRecord:
    header = list(dict.fromkeys(key for point in record.points for key in point))
    rows = [[_cell(key, point.get(key)) for key in header] for point in record.points[:MOST_ROWS]]
    settings = ", ".join(f"{key} {value}" for key, value in record.settings.items())
    return ShownRecord(name, record, settings, Table(header, rows, len(record.points) - len(rows)))
