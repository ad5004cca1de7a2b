"""What tuning is worth for published configs on real traces: a table that is computed once and bundled.

`python -m replay_sim.explore.tuning_table CONFIGS TRACE...` computes it and writes it beside this module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import pandas as pd

from replay_sim.config import ServingConfig
from replay_sim.config.loading import config_from_mapping
from replay_sim.explore.tuning import TunedPlan
from replay_sim.explore.tuning_costs import fitted_costs
from replay_sim.explore.workload_steps import tuned_workload
from replay_sim.plan.capture_sizes import PIECEWISE_MODES
from replay_sim.progress import Progress, no_progress, progress_bar
from replay_sim.whole_file import write_whole
from replay_sim.workload.detect import read_trace
from replay_sim.workload.trace import TraceRequest

TABLE_FILE = "tuning_table.json"
"""The bundled table, beside this module."""
PLANS = ("default", "own", "tuned")
ENGINE = "vllm"


@attrs.frozen(kw_only=True)
class PlanOnTrace:
    """A plan on both halves of a trace's steps: expected milliseconds of a step, padded rows, and graphs captured.

    unseen_mixed_step_ms: the mean over the steps that no FULL graph takes, None without any.
    """

    seen_step_ms: float
    unseen_step_ms: float
    unseen_mixed_step_ms: float | None
    seen_padded_rows: int
    unseen_padded_rows: int
    num_replay_graphs: int
    num_model_graphs: int


@attrs.frozen(kw_only=True)
class TableRow:
    """One config on one trace, in the engine's names.

    alike: how many of the published configs have these settings. has_own_list: whether the config lists replay sizes.
    steps: of the half tuned on; mixed_steps: those of them that no FULL graph takes.
    """

    config: str
    alike: int
    has_own_list: bool
    trace: str
    steps: int
    mixed_steps: int
    default: PlanOnTrace
    own: PlanOnTrace
    tuned: PlanOnTrace

    def gain(self, over: str, half: str) -> float:
        """How much less time a step takes tuned than with plan `over`, as a share of 1, on half `seen` or `unseen`."""
        name = f"{half}_step_ms"
        tuned, other = getattr(self.tuned, name), getattr(getattr(self, over), name)
        return float(1 - tuned / other)


@attrs.frozen(kw_only=True)
class TuningTable:
    """All rows, and where their times come from; `configs` and `traces` name the files."""

    source: str
    configs: str
    traces: tuple[str, ...]
    rows: tuple[TableRow, ...]


def published_configs(path: Path) -> dict[ServingConfig, list[str]]:
    """The configs of a file of published ones that are that engine's, each with the ids of those alike.

    Those without PIECEWISE graphs are left out: there is nothing to tune. Raises OSError or ValueError for a file that
    is not one, and ConfigError for settings that cannot be used.
    """
    known = {field.name for field in attrs.fields(ServingConfig)}
    found: dict[ServingConfig, list[str]] = {}
    for entry in json.loads(path.read_text(encoding="utf-8"))["configs"]:
        if entry["engine"] == ENGINE:
            settings = {key: value for key, value in entry.items() if key in known and value is not None}
            config = config_from_mapping(settings)
            if config.cudagraph_mode in PIECEWISE_MODES:
                found.setdefault(config, []).append(entry["id"])
    return found


def table_row(config: ServingConfig, ids: Sequence[str], trace: str, requests: Iterable[TraceRequest]) -> TableRow:
    """Tune a config on the first half of a trace's steps, and judge on the second (issue 6, point 4)."""
    tuning = tuned_workload(config, requests, trace).tuning
    return TableRow(
        config=ids[0],
        alike=len(ids),
        has_own_list=config.decoder_replay_cudagraph_capture_sizes is not None,
        trace=trace,
        steps=tuning.steps,
        mixed_steps=tuning.mixed_steps,
        default=_on_trace(tuning.default),
        own=_on_trace(tuning.own),
        tuned=_on_trace(tuning.tuned),
    )


def _on_trace(plan: TunedPlan) -> PlanOnTrace:
    seen, unseen = plan.seen, plan.unseen
    assert unseen is not None
    return PlanOnTrace(
        seen_step_ms=round(seen.expected_step_ms, 5),
        unseen_step_ms=round(unseen.expected_step_ms, 5),
        unseen_mixed_step_ms=None if unseen.mixed_step_ms is None else round(unseen.mixed_step_ms, 5),
        seen_padded_rows=seen.padded_rows,
        unseen_padded_rows=unseen.padded_rows,
        num_replay_graphs=seen.num_replay_graphs,
        num_model_graphs=seen.num_model_graphs,
    )


def make_table(configs: Path, traces: Sequence[Path], progress: Progress = no_progress) -> TuningTable:
    """The table of every published config on every trace; each takes some seconds."""
    published = published_configs(configs)
    read = {path.name: read_trace(path) for path in traces}
    pairs = [(config, ids, trace) for config, ids in published.items() for trace in read]
    rows = [table_row(config, ids, trace, read[trace]) for config, ids, trace in progress(pairs, "configs x traces")]
    source = fitted_costs(next(iter(published))).source
    return TuningTable(source=source, configs=configs.name, traces=tuple(read), rows=tuple(rows))


def table_text(table: TuningTable) -> str:
    """The table as the text of its file, a row a line."""
    data = attrs.asdict(table)
    lines = ",\n".join("  " + json.dumps(row) for row in data.pop("rows"))
    return json.dumps(data, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"


def read_table(text: str) -> TuningTable:
    """The table of a file's text that `table_text` made."""
    data: dict[str, Any] = json.loads(text)
    rows = tuple(TableRow(**row | {plan: PlanOnTrace(**row[plan]) for plan in PLANS}) for row in data["rows"])
    return TuningTable(**data | {"traces": tuple(data["traces"]), "rows": rows})


def bundled_table() -> TuningTable:
    """The table in the package."""
    file = resources.files("replay_sim.explore") / TABLE_FILE
    return read_table(file.read_text(encoding="utf-8"))


def table_frame(table: TuningTable) -> pd.DataFrame:
    """The table to look at, a row a config and trace: milliseconds and padded rows on the unseen half, and gains.

    `gain on` and `gain unseen`: less time a step than the config's own plan, as a share of 1, on either half.
    """
    lines = []
    for row in table.rows:
        plans = {plan: getattr(row, plan) for plan in PLANS}
        lines.append(
            {
                "config": row.config,
                "alike": row.alike,
                "trace": row.trace.split("_")[0].split(".")[0],
                **{f"ms {plan}": round(of.unseen_step_ms, 3) for plan, of in plans.items()},
                "gain on": f"{row.gain('own', 'seen'):.2%}",
                "gain unseen": f"{row.gain('own', 'unseen'):.2%}",
                "over default": f"{row.gain('default', 'unseen'):.2%}",
                **{f"rows {plan}": of.unseen_padded_rows for plan, of in plans.items()},
                "replay graphs": "/".join(str(of.num_replay_graphs) for of in plans.values()),
                "PIECEWISE": "/".join(str(of.num_model_graphs) for of in plans.values()),
            }
        )
    return pd.DataFrame(lines)


def main(paths: Sequence[str]) -> None:
    """Compute the table of a file of configs and some traces, and write it beside this module."""
    configs, *traces = map(Path, paths)
    table = make_table(configs, traces, progress_bar)
    path = Path(__file__).with_name(TABLE_FILE)
    write_whole(path, table_text(table))
    print(f"{len(table.rows)} rows in {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
