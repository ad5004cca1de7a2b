"""`replay-sim plan`: sizes, graph count, buffers, padding and unreachable sizes of a serving config."""

import json
from typing import Any

import click

from replay_sim.commands import _options
from replay_sim.config import SHAPES, load_config
from replay_sim.plan import make_plan
from replay_sim.plan.summary import plan_summary
from replay_sim.progress import progress_bar

MIB = 1 << 20


@click.command(name="plan", short_help="Sizes, graph count, buffers, padding and memory of a config.")
@click.argument("config")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the engine's key names.")
@click.option(
    "--shape",
    type=click.Choice(sorted(SHAPES)),
    default="flash-rank",
    show_default=True,
    help="The decoder whose rows are counted in bytes.",
)
@click.option("--memory", is_flag=True, help="Predict the graphs' memory in each sharing arrangement; takes seconds.")
@click.option(
    "--order",
    type=click.Choice(["largest_first", "smallest_first"]),
    default="largest_first",
    show_default=True,
    help="With --memory: the order of capture.",
)
@click.option("--hold-outputs", is_flag=True, help="With --memory: every graph's outputs stay alive.")
@click.pass_context
def command(
    context: click.Context, config: str, as_json: bool, shape: str, memory: bool, order: str, hold_outputs: bool
) -> None:
    """Plan the graphs of CONFIG, a preset's name or a JSON file in the engine's key names."""
    serving = load_config(config)
    plan = make_plan(serving)
    if not memory:
        _options.refuse_unused(
            context, ("order", "hold_outputs"), ": it needs memory, which predicts the graphs' pools"
        )
        summary = plan_summary(serving, plan, SHAPES[shape])
        click.echo(json.dumps(summary) if as_json else _table(summary))
        return
    from replay_sim.decoder.pool_prediction import record_plan
    from replay_sim.decoder.pool_report import chosen_pool_bytes, pool_summary, pool_table

    recorded = record_plan(SHAPES[shape], plan, progress_bar)
    growths = recorded.predict(largest_first=order == "largest_first", hold_outputs=hold_outputs)
    predicted = chosen_pool_bytes(recorded, growths)
    summary = plan_summary(serving, plan, SHAPES[shape], predicted_pool_bytes=predicted)
    if as_json:
        click.echo(json.dumps(summary | pool_summary(recorded, growths)))
    else:
        click.echo(_table(summary) + "\n\n" + pool_table(recorded, growths))


def _table(summary: dict[str, Any]) -> str:
    """Return the summary as a table of settings and figures, then the notes."""
    from tabulate import tabulate

    rows = [(key, _cell(key, value)) for key, value in summary.items() if key != "notes"]
    table = tabulate(rows, headers=("plan", ""), tablefmt="simple", disable_numparse=True, maxcolwidths=[None, 80])
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
