"""Figures of plans beside each other: staircases and sizes, padding against graphs, cost against max_num_seqs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.batch.dispatch import smallest_size
from replay_sim.explore.figures_plan import BEYOND, shade_legend, shade_unreachable, staircase_points, thinned
from replay_sim.explore.plan_comparison import (
    DEFAULT,
    MIB,
    OPTIMAL,
    JudgedPlan,
    RowWeights,
    SeqsPoint,
    curve_padding,
    fewest_graphs,
)
from replay_sim.explore.theme import FAINT, INK, Meaning, finish, line
from replay_sim.measure.records import Record
from replay_sim.plan import CapturePlan
from replay_sim.plan.capture_sizes import listed

PLANS = {meaning.value: meaning for meaning in (Meaning.DEFAULT_PLAN, Meaning.EXPLICIT_PLAN, Meaning.OPTIMAL_PLAN)}
DASHES = {Meaning.DEFAULT_PLAN: "solid", Meaning.EXPLICIT_PLAN: "dash", Meaning.OPTIMAL_PLAN: "dot"}
SYMBOLS = {Meaning.DEFAULT_PLAN: "circle", Meaning.EXPLICIT_PLAN: "square", Meaning.OPTIMAL_PLAN: "diamond"}
BINS = 120
HEADROOM = 1.08
TALLEST = 3
"""A curve of padding is cut where it is so many times that of the worst plan."""


def plans_figure(plans: Mapping[str, JudgedPlan], weights: RowWeights, source: str) -> go.Figure:
    """Padded rows against rows, sampled at every size and one above it; how often rows occur; and where sizes lie.

    `plans` by name: default, explicit, optimal, of which any may lack; each has its traces all the same, so that
    a live figure can be updated trace by trace. A staircase leaves the figure where its plan has no size near. The
    ticks are the sizes of the default plan, or else of the first.
    """
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.54, 0.22, 0.24])
    first = plans.get(DEFAULT) or next(iter(plans.values()))
    end, is_cut = _end(plans, weights)
    for name, meaning in PLANS.items():
        _add_staircase(figure, meaning, plans.get(name))
    _add_weights(figure, weights, end)
    for level, (name, meaning) in enumerate(PLANS.items()):
        _add_sizes(figure, meaning, plans.get(name), level)
    is_shaded = shade_unreachable(figure, first.plan, end)
    figure.add_trace(shade_legend().update(showlegend=is_shaded), row=1, col=1)
    ticks = thinned([size for size in first.plan.replay_sizes if size <= end], end)
    figure.update_xaxes(range=[0, end], tickvals=ticks, ticktext=[f"{size:,}" for size in ticks])
    cut = "; larger sizes, which no batch here selects, lie to the right" if is_cut else ""
    title = f"rows of the replay batch (ticks: sizes of the default plan{cut})"
    figure.update_xaxes(title_text=title, row=3, col=1)
    figure.update_yaxes(title_text="padded rows", range=[0, end * HEADROOM], tickformat=",", row=1, col=1)
    figure.update_yaxes(title_text="replay<br>batches", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(tickvals=list(range(len(PLANS))), ticktext=list(PLANS), row=3, col=1)
    figure.update_yaxes(range=[len(PLANS) - 0.5, -0.5], title_text="sizes", showgrid=False, row=3, col=1)
    figure.update_layout(bargap=0)
    return finish(figure, finding=_plans_finding(plans), source=source, height=640, left=92)


def _end(plans: Mapping[str, JudgedPlan], weights: RowWeights) -> tuple[int, bool]:
    """Where the axis of rows ends, beyond the largest graph that a batch runs in; and whether sizes lie behind it."""
    captured = [judgement.plan.replay_sizes for judgement in plans.values() if judgement.plan.replay_sizes]
    most = max(weights.histogram, default=0)
    used = [smallest_size(sizes, most) or sizes[-1] for sizes in captured]
    last = max(used) if used else next(iter(plans.values())).plan.window
    end = max(int(last * BEYOND), last + 1)
    return end, any(sizes[-1] > end for sizes in captured)


def knobs(plan: CapturePlan) -> str:
    """The settings that a plan was made for, in the engine's names, for a hover."""
    return (
        f"window {plan.window:,} rows, max_num_seqs {plan.max_num_seqs:,}<br>"
        f"max_num_batched_tokens {plan.max_num_batched_tokens:,}<br>"
        f"decode of {plan.query_len_decode:,} tokens, trim threshold {plan.trim_threshold}"
    )


def _add_staircase(figure: go.Figure, meaning: Meaning, judgement: JudgedPlan | None) -> None:
    points = staircase_points(judgement.plan) if judgement else []
    figure.add_scatter(
        x=[rows for rows, _ in points],
        y=[size for _, size in points],
        mode="lines+markers",
        name=f"{meaning.value} plan",
        legendgroup=meaning.value,
        showlegend=bool(points),
        line=line(meaning, shape="hv", dash=DASHES[meaning]),
        marker={"size": 5, "symbol": SYMBOLS[meaning]},
        customdata=[1 - rows / size for rows, size in points],
        hovertemplate=f"<b>{meaning.value}</b>: %{{x:,}} rows run as %{{y:,}}<br>%{{customdata:.1%}} pads<br>"
        + (knobs(judgement.plan) if judgement else "")
        + "<extra></extra>",
        row=1,
        col=1,
    )


def _add_weights(figure: go.Figure, weights: RowWeights, end: int) -> None:
    """Bars of how many replay batches have so many rows, in bins of equal width."""
    width = -(-end // BINS)
    bins: defaultdict[int, float] = defaultdict(float)
    for rows, weight in weights.histogram.items():
        if rows <= end:
            bins[(rows - 1) // width] += weight
    found = sorted(bins.items())
    figure.add_bar(
        x=[(index + 0.5) * width + 0.5 for index, _ in found],
        y=[weight for _, weight in found],
        width=width,
        name="replay batches",
        showlegend=False,
        marker={"color": FAINT, "line": {"width": 0}},
        customdata=[[index * width + 1, (index + 1) * width] for index, _ in found],
        hovertemplate="%{customdata[0]:,} to %{customdata[1]:,} rows: %{y:,}<extra></extra>",
        row=2,
        col=1,
    )


def _add_sizes(figure: go.Figure, meaning: Meaning, judgement: JudgedPlan | None, level: int) -> None:
    """A stroke for each size of a plan, and a cross for those that no batch can select."""
    sizes = judgement.plan.replay_sizes if judgement else ()
    unreachable = set(judgement.unreachable) if judgement else set()
    figure.add_scatter(
        x=sizes,
        y=[level] * len(sizes),
        mode="markers",
        showlegend=False,
        legendgroup=meaning.value,
        marker={
            "symbol": ["x-thin" if size in unreachable else "line-ns" for size in sizes],
            "size": [8 if size in unreachable else 20 for size in sizes],
            "line": {"color": line(meaning)["color"], "width": 2},
        },
        customdata=["no batch can select it" if size in unreachable else "" for size in sizes],
        hovertemplate=f"{meaning.value}: size %{{x:,}}<br>%{{customdata}}<extra></extra>",
        row=3,
        col=1,
    )


def _plans_finding(plans: Mapping[str, JudgedPlan]) -> str:
    parts = [
        f"{name} pads {judgement.cost.mean_padding:.1%} with {_graphs(judgement.cost.num_replay_graphs)}"
        for name, judgement in plans.items()
        if judgement.plan.replay_sizes
    ]
    if not parts:
        return "No replay graphs are planned: every replay batch runs eagerly"
    lost = sum(len(judgement.unreachable) for judgement in plans.values())
    finding = ", ".join(parts)
    finding = finding[0].upper() + finding[1:]
    return f"{finding}; {lost} sizes no batch can select (×)" if lost else finding


def _graphs(count: int) -> str:
    return f"{count} graph" if count == 1 else f"{count} graphs"


def trade_off_figure(
    curve: Sequence[tuple[int, ...]], plans: Mapping[str, JudgedPlan], weights: RowWeights, source: str
) -> go.Figure:
    """Pads among padded rows against the number of replay graphs: the optimum for each, and the plans as points.

    `curve` is what `optimal_curve` returns for `weights`, on which `plans` were judged too.
    """
    base = next(iter(plans.values())).plan
    counts = [len(sizes) for sizes in curve]
    shares = curve_padding(base, curve, weights)
    figure = go.Figure()
    figure.add_scatter(
        x=counts,
        y=shares,
        mode="lines+markers",
        name="optimal plan for each number of graphs",
        line=line(Meaning.OPTIMAL_PLAN, dash=DASHES[Meaning.OPTIMAL_PLAN]),
        marker={"size": 7, "symbol": SYMBOLS[Meaning.OPTIMAL_PLAN]},
        customdata=[listed(sizes) for sizes in curve],
        hovertemplate=f"%{{x}} graphs: %{{y:.2%}} pads<br>%{{customdata}}<br>{knobs(base)}<extra></extra>",
    )
    for name, judgement in plans.items():
        if name != OPTIMAL:
            _add_plan_point(figure, PLANS[name], judgement)
    figure.update_xaxes(title_text="replay graphs", rangemode="tozero")
    top = TALLEST * max((judgement.cost.mean_padding for judgement in plans.values()), default=0.0)
    cut = top and max(shares, default=0.0) > top
    title = "pads among padded rows" + ("<br>(cut: few graphs pad more)" if cut else "")
    figure.update_yaxes(title_text=title, tickformat=".0%", range=[0, top] if cut else None, rangemode="tozero")
    return finish(figure, finding=_trade_off_finding(curve, shares, plans), source=source, height=440)


def _add_plan_point(figure: go.Figure, meaning: Meaning, judgement: JudgedPlan) -> None:
    figure.add_scatter(
        x=[judgement.cost.num_replay_graphs],
        y=[judgement.cost.mean_padding],
        mode="markers+text",
        name=f"{meaning.value} plan",
        text=[meaning.value],
        textposition="top center",
        showlegend=False,
        marker={"size": 12, "symbol": SYMBOLS[meaning], "color": line(meaning)["color"]},
        hovertemplate=f"<b>{meaning.value}</b>: %{{x}} graphs, %{{y:.2%}} pads<br>{listed(judgement.plan.replay_sizes)}"
        f"<br>{knobs(judgement.plan)}<extra></extra>",
    )


def _trade_off_finding(
    curve: Sequence[tuple[int, ...]], padding: Sequence[float], plans: Mapping[str, JudgedPlan]
) -> str:
    if not curve:
        return "No replay batch of these fits a replay graph: there is nothing to choose"
    cost = plans[DEFAULT].cost
    enough = fewest_graphs(curve, padding, cost.mean_padding)
    least = f"the last, {_graphs(len(curve[-1]))}, {padding[-1]:.1%}"
    if enough is None:
        return f"No choice here pads as little as the default's {cost.mean_padding:.1%}; {least}"
    return (
        f"{_graphs(enough)} chosen for these rows pad no more than the default's {cost.num_replay_graphs} "
        f"({cost.mean_padding:.1%}); {least}"
    )


def seqs_figure(
    points: Mapping[str, Sequence[SeqsPoint]], config_seqs: int, source: str, *, pool: Record | None = None
) -> go.Figure:
    """Replay graphs above, MiB below, against max_num_seqs, for the default and the explicit plan.

    `config_seqs` is marked. `pool` is a record of the plan at that value: its measured growth of the pool for replay
    graphs on a stream of their own, which the static buffers do not contain, is one point more.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for name, swept in points.items():
        _add_swept(figure, PLANS[name], swept)
    measured = _measured_pool(pool)
    if measured is not None:
        figure.add_scatter(
            x=[config_seqs],
            y=[measured / MIB],
            mode="markers+text",
            name="replay graphs' pool on a stream of its own, measured",
            text=[f"{measured / MIB:,.0f} MiB"],
            textposition="middle left",
            marker={"size": 13, "symbol": "star", "color": line(Meaning.REPLAY_GRAPH)["color"]},
            hovertemplate="measured: %{y:,.0f} MiB at max_num_seqs %{x:,}<extra></extra>",
            row=2,
            col=1,
        )
    figure.add_vline(x=config_seqs, line={"color": INK, "width": 1, "dash": "dot"}, opacity=0.6)
    ticks = sorted({point.max_num_seqs for swept in points.values() for point in swept})
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{value:,}" for value in ticks])
    figure.update_xaxes(title_text="max_num_seqs (requests; dotted: the config's)", row=2, col=1)
    figure.update_yaxes(title_text="replay graphs", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="MiB<br>(lines: static buffers)", rangemode="tozero", tickformat=",", row=2, col=1)
    return finish(figure, finding=_seqs_finding(points), source=source, height=540, left=86)


def _measured_pool(record: Record | None) -> int | None:
    """Bytes by which replay graphs on a stream of their own grew the pools, largest first; None without a record."""
    wanted = {"arrangement": "own_stream", "order": "largest_first", "outputs": "dropped", "group": "replay"}
    points = record.points if record else []
    return next((int(p["reserved_bytes"] or 0) for p in points if wanted.items() <= p.items()), None)


def _add_swept(figure: go.Figure, meaning: Meaning, points: Sequence[SeqsPoint]) -> None:
    panels = (
        (1, [point.num_replay_graphs for point in points], "%{y} replay graphs"),
        (2, [point.static_buffer_bytes / MIB for point in points], "%{y:,.1f} MiB of static buffers"),
    )
    for row, values, unit in panels:
        figure.add_scatter(
            x=[point.max_num_seqs for point in points],
            y=values,
            mode="lines+markers",
            name=f"{meaning.value} plan",
            legendgroup=meaning.value,
            showlegend=row == 1,
            line=line(meaning, dash=DASHES[meaning]),
            marker={"size": 7, "symbol": SYMBOLS[meaning]},
            customdata=[point.largest_size for point in points],
            hovertemplate=f"<b>{meaning.value}</b>, max_num_seqs %{{x:,}}: {unit}"
            "<br>largest size %{customdata:,} rows<extra></extra>",
            row=row,
            col=1,
        )


def _seqs_finding(points: Mapping[str, Sequence[SeqsPoint]]) -> str:
    swept = points[DEFAULT]
    most = max((point.static_buffer_bytes for point in swept), default=0)
    if not most:
        return "No max_num_seqs gives the default plan a replay graph"
    first = next(point for point in swept if point.static_buffer_bytes == most)
    return (
        f"From max_num_seqs {first.max_num_seqs:,} on the default plan grows no more: "
        f"{_graphs(first.num_replay_graphs)} up to {first.largest_size:,} rows, {most / MIB:,.0f} MiB of static buffers"
    )
