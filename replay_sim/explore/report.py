"""The report: one standalone HTML page that a reviewer reads without Jupyter and without a network."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

import attrs
import jinja2
from plotly.offline import get_plotlyjs

from replay_sim.explore.advice import advise
from replay_sim.explore.evidence import Evidence
from replay_sim.explore.report_parts import MOST_ROWS, Section, Table, cell
from replay_sim.explore.report_plan import plan_section, pool_section
from replay_sim.explore.report_speedup import speedup_section
from replay_sim.explore.report_threshold import threshold_section
from replay_sim.explore.report_workload import executed_section, workload_section
from replay_sim.measure.environment import package_version
from replay_sim.measure.records import REQUIRED_POINT_KEYS, Record
from replay_sim.whole_file import write_whole

TEMPLATES = Path(__file__).parent / "templates"


@attrs.frozen
class ShownRecord:
    """A record as the page shows it."""

    name: str
    record: Record
    settings: str
    points: Table


def write_report(found: Evidence, folder: Path, *, notebooks: Mapping[str, str] | None = None) -> Path:
    """Write `index.html` into `folder`, whole or not at all, and return its path.

    `notebooks` are titles by link, relative to the folder. Raises OSError where the folder cannot be made.
    """
    path = folder / "index.html"
    write_whole(path, render(found, notebooks or {}))
    return path


def render(found: Evidence, notebooks: Mapping[str, str]) -> str:
    """The page as text; whatever comes from files is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.j2").render(
        job=found.job,
        advice=advise(found),
        found=found,
        sections=sections(found),
        records=sorted((_shown(name, record) for name, record in found.records), key=_kind_order),
        notebooks=notebooks,
        plotly_js=get_plotlyjs(),
        version=package_version(),
        today=date.today().isoformat(),
    )


def sections(found: Evidence) -> list[Section]:
    """What follows the recommendation, in the order of the page."""
    made = [
        plan_section(found),
        pool_section(found),
        speedup_section(found),
        threshold_section(found),
        workload_section(found),
    ]
    return [*made, executed_section(found.job.executed)] if found.job.executed else made


def _kind_order(shown: ShownRecord) -> tuple[int, str]:
    return list(REQUIRED_POINT_KEYS).index(shown.record.kind), shown.name


def _shown(name: str, record: Record) -> ShownRecord:
    header = list(dict.fromkeys(key for point in record.points for key in point))
    rows = [[cell(key, point.get(key)) for key in header] for point in record.points[:MOST_ROWS]]
    settings = ", ".join(f"{key} {value}" for key, value in record.settings.items())
    return ShownRecord(name, record, settings, Table("", header, rows, len(record.points) - len(rows)))
