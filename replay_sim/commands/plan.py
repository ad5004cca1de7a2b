"""`replay-sim plan`: sizes, graph count, buffers, padding and unreachable sizes of a serving config."""

import json
from typing import Any

import click

from replay_sim.config import SHAPES, load_config
from replay_sim.plan import make_plan
from replay_sim.plan.summary import plan_summary

MIB = 1 << 20


@click.command(name="plan")
@click.argument("config")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the engine's key names.")
@click.option(
    "--shape",
    type=click.Choice(sorted(SHAPES)),
    default="flash-rank",
    show_default=True,
    help="The decoder whose rows are counted in bytes.",
)
def command(config: str, as_json: bool, shape: str) -> None:
    """Plan the graphs of CONFIG, a preset's name or a JSON file in the engine's key names."""
    serving = load_config(config)
    summary = plan_summary(serving, make_plan(serving), SHAPES[shape])
    click.echo(json.dumps(summary) if as_json else _table(summary))


def _table(summary: dict[str, Any]) -> str:
    """Return the summary as a table of settings and figures, then the notes."""
    from tabulate import tabulate

    rows = [(key, _cell(key, value)) for key, value in summary.items() if key != "notes"]
    table = tabulate(
        rows, headers=("plan", ""), tablefmt="simple", disable_numparse=True, maxcolwidths=[None, 80]
    )
    return "\n".join([table, *(f"note: {note}" for note in summary["notes"])])


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "reachable_rows":
        return ", ".join(f"{low} to {high}" for low, high in value) or "none"
    if key.endswith("_sizes"):
        return ", ".join(map(str, value)) or "none"
    if key.endswith("_bytes"):
        return f"{value:,} ({value / MIB:.1f} MiB)"
    if key in ("mean_padding", "worst_padding"):
        return f"{value:.1%}"
    return str(value)
