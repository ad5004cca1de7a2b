"""Figures of a sweep: speedup over two knobs, time against memory, and what a step along each knob costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from replay_sim.explore.plan_comparison import DEFAULT, EXPLICIT, OPTIMAL
from replay_sim.explore.sweep_best import (
    TIME,
    neighbours,
    pareto,
    ran,
    varied,
    with_knobs_of,
    within,
)
from replay_sim.explore.sweep_plans import EAGER
from replay_sim.explore.sweep_rows import KNOBS
from replay_sim.explore.theme import INK, LOOKS, RULE, Meaning, finish, line, marker, text

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.object_]

UNITS = {
    "window": "window (rows)",
    "max_num_seqs": "max_num_seqs (requests)",
    "max_num_batched_tokens": "max_num_batched_tokens (token budget)",
    "decoder_replay_trim_threshold": "decoder_replay_trim_threshold (padded tokens)",
}
FAMILIES = {
    DEFAULT: (Meaning.DEFAULT_PLAN, "solid", "circle"),
    EXPLICIT: (Meaning.EXPLICIT_PLAN, "dash", "square"),
    OPTIMAL: (Meaning.OPTIMAL_PLAN, "dot", "diamond"),
    EAGER: (Meaning.EAGER, "dashdot", "triangle-up"),
}
"""The look of a plan by the first word of its name: optimal-4 is an optimum."""
SCALE = [[0.0, "#5B2A63"], [0.35, "#C9A0D1"], [0.5, "#F7F7F7"], [0.65, "#5FB59C"], [1.0, "#0B4F3F"]]
"""Green is faster than without replay, violet slower."""
BINS = 48
CORNER = 0.36, 0.3
"""How far right and up of a cell's middle the star stands, in cells."""
NEAR = 0.01
"""A design this share slower than the best is as good as the best: the model is no better than that."""


def speedup_heatmap(table: pd.DataFrame, best: pd.Series, axes: tuple[str, str], source: str) -> go.Figure:
    """Speedup over replay off by two knobs, those of `axes` across and up; all others are as in `best`, starred.

    A cross is a point that failed; its hover says why.
    """
    cells = with_knobs_of(table, best, axes)
    values = [sorted(cells[name].unique()) for name in axes]
    places = {
        name: {value: place for place, value in enumerate(known)} for name, known in zip(axes, values, strict=True)
    }
    shape = len(values[1]), len(values[0])
    z, words, hovers = np.full(shape, np.nan), np.full(shape, "", object), np.full(shape, "", object)
    for _, row in cells.iterrows():
        at = places[axes[1]][row[axes[1]]], places[axes[0]][row[axes[0]]]
        hovers[at] = _hover(row)
        z[at], words[at] = (row["speedup"], f"{row['speedup']:.2f}") if not row["error"] else (np.nan, "×")
    figure = go.Figure()
    _add_heat(figure, z, words, hovers)
    figure.add_scatter(
        x=[places[axes[0]][best[axes[0]]] + CORNER[0]],
        y=[places[axes[1]][best[axes[1]]] + CORNER[1]],
        mode="markers",
        marker=_star(11),
        name="the best design",
        customdata=[_hover(best)],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=True,
    )
    for axis, name, known in zip(("xaxis", "yaxis"), axes, values, strict=True):
        ticks = [f"{value:,}" if not isinstance(value, str) else value for value in known]
        span = [-0.5, len(known) - 0.5]
        figure.layout[axis].update(tickvals=list(range(len(known))), ticktext=ticks, range=span, showgrid=False)
        figure.layout[axis].title.text = UNITS.get(name, name)
    return finish(figure, finding=_heat_finding(cells, axes), source=source, height=140 + 42 * shape[0] + 80, left=86)


def _add_heat(figure: go.Figure, speedup: Floats, words: Words, hovers: Words) -> None:
    """Cells coloured by how far from 1 they are; what failed has no colour."""
    reach = max(float(np.nanmax(np.abs(speedup - 1))), 0.01)
    figure.add_heatmap(
        x=list(range(speedup.shape[1])),
        y=list(range(speedup.shape[0])),
        z=[[None if np.isnan(cell) else round(cell, 3) for cell in row] for row in speedup.tolist()],
        text=words.tolist(),
        customdata=hovers.tolist(),
        zmin=1 - reach,
        zmax=1 + reach,
        colorscale=SCALE,
        colorbar={"title": {"text": "times as fast as without replay", "side": "right"}, "thickness": 14},
        texttemplate="%{text}",
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=True,
        xgap=2,
        ygap=2,
    )


def _heat_finding(cells: pd.DataFrame, axes: tuple[str, str]) -> str:
    good = ran(cells)
    most, least = good.loc[good["speedup"].idxmax()], good.loc[good["speedup"].idxmin()]
    at = [", ".join(f"{name} {_told(row[name])}" for name in axes) for row in (most, least)]
    return (
        f"Replay makes the workload {most['speedup']:.2f} times as fast at {at[0]}, {least['speedup']:.2f} at {at[1]}"
    )


def memory_figure(table: pd.DataFrame, best: pd.Series, source: str) -> go.Figure:
    """Time of the workload against MiB of buffers: all designs, the front of each kind of plan, `best`, neighbours."""
    good = ran(table)
    figure = go.Figure()
    _add_cloud(figure, good)
    for family, (meaning, dash, symbol) in FAMILIES.items():
        mine = good[good["plan"].str.split("-").str[0] == family]
        if not mine.empty:
            _add_front(figure, pareto(mine), f"{family} plans", meaning, dash, symbol)
    near = good[good["point"].isin(neighbours(table, best)["point"])]
    _add_points(
        figure,
        near,
        "neighbours",
        {"symbol": "circle-open", "size": 14, "color": INK, "line": {"width": 2}},
    )
    _add_points(figure, best.to_frame().T, "the best design", _star(17))
    figure.update_xaxes(title_text="static and break buffers (MiB)", tickformat=",", rangemode="tozero")
    figure.update_yaxes(
        title_text="all steps of the workload (s, logarithmic)", type="log", tickvals=_ticks(good[TIME])
    )
    return finish(figure, finding=_memory_finding(table, best), source=source, height=560, left=78)


def _ticks(values: pd.Series) -> list[float]:
    """Round values from the least to the most, for a logarithmic axis."""
    powers = range(math.floor(math.log10(values.min())), math.ceil(math.log10(values.max())) + 1)
    return [digit * 10.0**power for power in powers for digit in (1, 1.5, 2, 3, 5, 7)]


def _memory_finding(table: pd.DataFrame, best: pd.Series) -> str:
    front = pareto(table)
    cheap = front[front[TIME] <= best[TIME] * (1 + NEAR)].iloc[0]
    told = f"The best takes {best[TIME]:,.1f} s with {best['buffer_mib']:,.0f} MiB of buffers"
    if cheap["point"] == best["point"]:
        return f"{told}; less memory costs more than {NEAR:.0%} of the time"
    other = [name for name in varied(table) if cheap[name] != best[name]]
    return f"{told}; {cheap['buffer_mib']:,.0f} MiB take at most {NEAR:.0%} longer, with {design(cheap, other)}"


def neighbours_figure(table: pd.DataFrame, best: pd.Series, source: str) -> go.Figure:
    """How much slower the workload is one step from the best along each knob: how sharp the optimum is."""
    near = neighbours(table, best).iloc[::-1]
    labels = [f"{row.knob} {_told(best[row.knob])} → {_told(row.value)}" for row in near.itertuples()]
    change = near["time against best"]
    figure = go.Figure()
    figure.add_bar(
        x=change.tolist(),
        y=labels,
        orientation="h",
        marker=marker(Meaning.MODEL_GRAPH),
        text=[f"{value:+.1%}, {mib:,.0f} MiB" for value, mib in zip(change, near["buffer_mib"], strict=True)],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{text}<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(x=NEAR, line={"color": INK, "width": 1, "dash": "dot"}, opacity=0.6)
    least, most = min(float(change.min()), 0.0), max(float(change.max()), NEAR)
    room = 0.3 * (most - least)
    figure.update_xaxes(title_text="time of the workload against the best (dotted: + 1 %)", tickformat="+.0%")
    figure.update_xaxes(range=[least - room * (least < 0), most + room])
    figure.update_yaxes(showgrid=False)
    alike, count = len(within(table, best, NEAR)), len(ran(table))
    finding = (
        f"A step from the best costs {change.min():+.1%} to {change.max():+.1%}; {alike:,} of {count:,} designs take "
    )
    finding += f"at most {NEAR:.0%} longer than it"
    return finish(figure, finding=finding, source=source, height=190 + 26 * len(near), left=330)


def design(row: pd.Series, knobs: Sequence[str] = KNOBS) -> str:
    """A design in words: the values of these knobs."""
    return ", ".join(f"{name} {_told(row[name])}" for name in knobs)


def _told(value: object) -> str:
    return text(value) if isinstance(value, str) else "none" if pd.isna(value) else f"{value:,.0f}"


def _add_cloud(figure: go.Figure, good: pd.DataFrame) -> None:
    """All points, as squares where any lie: ten thousand marks would make the figure slow and the notebook large."""
    edges = [np.linspace(good[name].min(), good[name].max(), BINS + 1) for name in ("buffer_mib", TIME)]
    width, height = (float(edge[1] - edge[0]) or 1.0 for edge in edges)
    place = [
        ((good[name] - edge[0]) / size).astype(int).clip(upper=BINS - 1)
        for name, edge, size in zip(("buffer_mib", TIME), edges, (width, height), strict=True)
    ]
    counts = Counter(zip(*place, strict=True))
    figure.add_scatter(
        x=[round(float(edges[0][0] + (x + 0.5) * width), 1) for x, _ in counts],
        y=[round(float(edges[1][0] + (y + 0.5) * height), 2) for _, y in counts],
        mode="markers",
        name=f"all {len(good):,} designs",
        marker={"symbol": "square", "size": 6, "color": RULE},
        customdata=list(counts.values()),
        hovertemplate="%{customdata} designs about here<extra></extra>",
    )


def _add_front(figure: go.Figure, front: pd.DataFrame, name: str, meaning: Meaning, dash: str, symbol: str) -> None:
    figure.add_scatter(
        x=front["buffer_mib"].tolist(),
        y=front[TIME].tolist(),
        mode="lines+markers",
        name=name,
        line=line(meaning, shape="hv", dash=dash),
        marker={"symbol": symbol, "size": 7, "color": LOOKS[meaning].colour},
        customdata=[_hover(row) for _, row in front.iterrows()],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _add_points(figure: go.Figure, rows: pd.DataFrame, name: str, look: dict) -> None:
    figure.add_scatter(
        x=rows["buffer_mib"].tolist(),
        y=rows[TIME].tolist(),
        mode="markers",
        name=name,
        marker=look,
        customdata=[_hover(row) for _, row in rows.iterrows()],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _star(size: int) -> dict:
    return {"symbol": "star", "size": size, "color": INK, "line": {"color": "#FFFFFF", "width": 1}}


def _hover(row: pd.Series) -> str:
    """Every knob of a design, and what it comes to."""
    knobs = "<br>".join(f"{name} {_told(row[name])}" for name in KNOBS if name != "workload")
    if row["error"]:
        return f"{knobs}<br><b>failed</b>: {text(row['error'])}"
    mib = (row["static_buffer_bytes"] + row["break_buffer_bytes"]) / (1 << 20)
    told = (
        f"<b>{row[TIME]:,.1f} s</b>, {row['expected_step_ms']:,.1f} ms a step",
        f"{row['speedup']:.2f} times as fast as without replay",
        f"{row['num_replay_graphs']:,.0f} replay graphs, {mib:,.0f} MiB of buffers",
        f"{row['extrapolated_share']:.0%} of the time extrapolated",
    )
    return "<br>".join((knobs, *told))
