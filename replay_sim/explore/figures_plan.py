"""Figures of a plan: the padding staircase of its replay sizes."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.batch.dispatch import smallest_size
from replay_sim.explore.theme import FAINT, Meaning, finish, line
from replay_sim.plan import CapturePlan, plan_cost, reachable_rows, unreachable_sizes

BEYOND = 1.15
TICKS_THAT_FIT = 18


def staircase_points(plan: CapturePlan) -> list[tuple[int, int]]:
    """Rows and padded rows at the ends of every step of the staircase: one above the size below, and the size."""
    lows = [1, *(size + 1 for size in plan.replay_sizes[:-1])]
    return [(rows, size) for low, size in zip(lows, plan.replay_sizes, strict=False) for rows in (low, size)]


def staircase_figure(plan: CapturePlan, source: str) -> go.Figure:
    """Padded rows, and pads as a share of them, against the rows of a replay batch, with the sizes as ticks.

    Beyond the largest size rows run eagerly, without pads; row counts that no batch has are shaded.
    """
    points = staircase_points(plan)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.6, 0.4])
    if points:
        _add_steps(figure, points)
    largest = plan.replay_sizes[-1] if plan.replay_sizes else plan.window
    end = max(int(largest * BEYOND), largest + 1)
    figure.add_scatter(
        x=[largest + 1 if points else 1, end],
        y=[largest + 1 if points else 1, end],
        mode="lines",
        name="eager: more rows than the largest size" if points else "eager: no replay graphs",
        line=line(Meaning.EAGER),
        hovertemplate="%{x} rows run eagerly, no pads<extra></extra>",
        row=1,
        col=1,
    )
    if shade_unreachable(figure, plan, end):
        figure.add_trace(shade_legend(), row=1, col=1)
    ticks = thinned(plan.replay_sizes, end)
    figure.update_xaxes(range=[0, end], tickvals=ticks, ticktext=[f"{size:,}" for size in ticks])
    figure.update_xaxes(title_text="rows of the replay batch (ticks: capture sizes)", row=2, col=1)
    figure.update_yaxes(title_text="padded rows", rangemode="tozero", tickformat=",", row=1, col=1)
    figure.update_yaxes(title_text="pads among<br>padded rows", tickformat=".0%", rangemode="tozero", row=2, col=1)
    return finish(figure, finding=_finding(plan), source=source, height=520)


def _add_steps(figure: go.Figure, points: list[tuple[int, int]]) -> None:
    rows, padded = zip(*points, strict=True)
    shares = [1 - count / size for count, size in points]
    figure.add_scatter(
        x=rows,
        y=padded,
        mode="lines+markers",
        name="replay graph that runs",
        line=line(Meaning.REPLAY_GRAPH, shape="hv"),
        marker={"size": 5},
        customdata=shares,
        hovertemplate="%{x} rows run as %{y} rows<br>%{customdata:.1%} pads<extra></extra>",
        row=1,
        col=1,
    )
    figure.add_scatter(
        x=rows,
        y=shares,
        mode="lines",
        fill="tozeroy",
        name="pads",
        line={"color": FAINT, "width": 1},
        fillpattern={"shape": "/", "fgcolor": FAINT, "bgcolor": "#FFFFFF", "size": 6, "solidity": 0.2},
        hovertemplate="%{x} rows: %{y:.1%} pads<extra></extra>",
        row=2,
        col=1,
    )


def shade_unreachable(figure: go.Figure, plan: CapturePlan, end: int) -> bool:
    """Grey up to `end` where no batch has so many rows (P6); whether there is such a place beside captured sizes."""
    start = 0
    for low, high in (*reachable_rows(plan), (end + 1, end + 1)):
        if low - 1 > start:
            figure.add_vrect(x0=start, x1=min(low - 1, end), fillcolor="#E9EDF1", line_width=0, layer="below")
        start = max(start, high)
    return bool(start and plan.replay_sizes)


def shade_legend() -> go.Scatter:
    """A trace without points that explains the grey in the legend."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={"symbol": "square", "size": 11, "color": "#E9EDF1", "line": {"color": FAINT, "width": 0.5}},
        name="no batch has so many rows",
    )


def thinned(sizes: Sequence[int], end: int) -> list[int]:
    """The sizes as ticks of an axis up to `end`, those left out whose labels would not fit; the last always stays."""
    apart = end / TICKS_THAT_FIT
    ticks: list[int] = []
    for size in sizes[:-1]:
        if (not ticks or size - ticks[-1] >= apart) and sizes[-1] - size >= apart:
            ticks.append(size)
    return [*ticks, *sizes[-1:]]


def _finding(plan: CapturePlan) -> str:
    if not plan.replay_sizes:
        return "No replay graphs are planned: every replay batch runs eagerly"
    cost = plan_cost(plan)
    if cost.worst_padding_rows is None:
        return "No batch can select any of the planned replay sizes"
    finding = (
        f"{len(plan.replay_sizes)} replay sizes pad {cost.mean_padding:.1%} on average over all reachable row counts; "
        f"the worst, {cost.worst_padding_rows:,} rows, runs as "
        f"{smallest_size(plan.replay_sizes, cost.worst_padding_rows):,} ({cost.worst_padding:.1%} pads)"
    )
    unreachable = unreachable_sizes(plan)
    return f"{finding}; {len(unreachable)} sizes are unreachable" if unreachable else finding
