"""Figures of a tuning: what steps hold and where sizes lie, what graphs buy, and gains over configs and traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.explore.theme import INK, LOOKS, Meaning, finish, marker
from replay_sim.explore.tuning import CurvePoint, Tuning
from replay_sim.explore.tuning_score import PlanScore, dispatched
from replay_sim.explore.tuning_steps import StepCounts, is_full
from replay_sim.explore.tuning_table import TuningTable
from replay_sim.plan import CapturePlan

PLANS = {"default": Meaning.DEFAULT_PLAN, "own": Meaning.EXPLICIT_PLAN, "tuned": Meaning.OPTIMAL_PLAN}
SYMBOLS = {"default": "circle", "own": "square", "tuned": "diamond"}
SIZES = {"default": 17, "own": 11, "tuned": 12}
"""Pixels; of plans that are one both can be seen."""
TRACE_SYMBOLS = ("circle", "square", "diamond", "cross", "x")
BINS = 100
MOST_SIZES = 40
"""More sizes than these are no longer drawn as lines."""


def steps_figure(counts: StepCounts, plan: CapturePlan, source: str) -> go.Figure:
    """Steps by tokens, FULL and others, and by rows of their replay batch, with the plan's sizes as dotted lines."""
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.24)
    tokens: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    rows: Counter[int] = Counter()
    for key, count in counts.items():
        tokens[is_full(key, plan)][key[0]] += count
        if dispatched(key, plan).padded_rows:
            rows[key[1]] += count
    width = _width(max((key[0] for key in counts), default=1))
    _add_bars(figure, tokens[True], width, "uniform decode, FULL graph", Meaning.KEPT, 1)
    _add_bars(figure, tokens[False], width, "other step", Meaning.MODEL_GRAPH, 1)
    _add_bars(figure, rows, _width(max(rows, default=1)), "replay batch", Meaning.REPLAY_GRAPH, 2)
    for row, sizes, largest in ((1, plan.model_sizes, max(tokens[True] | tokens[False], default=1)),
                                (2, plan.replay_sizes, max(rows, default=1))):  # fmt: skip
        _add_sizes(figure, [size for size in sizes if size <= 1.1 * largest], row)
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(title_text="tokens of the step (dotted: model sizes)", tickformat=",", row=1, col=1)
    figure.update_xaxes(title_text="rows of the replay batch (dotted: replay sizes)", tickformat=",", row=2, col=1)
    figure.update_yaxes(title_text="steps", type="log", dtick=1)
    return finish(figure, finding=_steps_finding(tokens, rows, counts.total()), source=source, height=560)


def _width(largest: int) -> int:
    return max(1, -(-largest // BINS))


def _add_bars(figure: go.Figure, counts: Counter[int], width: int, name: str, meaning: Meaning, row: int) -> None:
    bins: Counter[int] = Counter()
    for value, count in counts.items():
        bins[(value - 1) // width] += count
    found = sorted(bins.items())
    figure.add_bar(
        x=[(index + 0.5) * width + 0.5 for index, _ in found],
        y=[count for _, count in found],
        width=width,
        name=name,
        marker=marker(meaning),
        customdata=[[index * width + 1, (index + 1) * width] for index, _ in found],
        hovertemplate="%{customdata[0]:,} to %{customdata[1]:,}: %{y:,} steps, " + name + "<extra></extra>",
        row=row,
        col=1,
    )


def _add_sizes(figure: go.Figure, sizes: Sequence[int], row: int) -> None:
    for size in sizes[-MOST_SIZES:]:
        figure.add_vline(x=size, line={"color": INK, "width": 0.8, "dash": "dot"}, opacity=0.5, row=row, col=1)


def _steps_finding(tokens: Mapping[bool, Counter[int]], rows: Counter[int], steps: int) -> str:
    usual = f"; the commonest replay batch has {rows.most_common(1)[0][0]:,} rows" if rows else ""
    return (
        f"{tokens[True].total() / steps:.0%} of the steps are uniform decodes, {rows.total() / steps:.0%} have a "
        f"replay batch{usual}"
    )


def curves_figure(tuning: Tuning, source: str) -> go.Figure:
    """Expected step time of the steps tuned on against graphs: replay graphs on the left, PIECEWISE on the right.

    The default and the config's own plan are points, the tuned one is where it was chosen.
    """
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, shared_yaxes=True)
    sides = ((tuning.replay_curve, "num_replay_graphs"), (tuning.model_curve, "num_model_graphs"))
    for col, (curve, graphs) in enumerate(sides, 1):
        figure.add_scatter(
            x=[getattr(point.score, graphs) for point in curve],
            y=[point.score.expected_step_ms for point in curve],
            mode="lines+markers",
            name="best of as many",
            marker={"size": 5},
            line={"color": LOOKS[Meaning.OPTIMAL_PLAN].colour, "width": 1.5},
            customdata=[_knobs(point) for point in curve],
            hovertemplate="%{x} graphs: %{y:.3f} ms<br>%{customdata}<extra></extra>",
            showlegend=col == 1,
            row=1,
            col=col,
        )
        for plan in tuning.plans:
            figure.add_scatter(
                x=[getattr(plan.seen, graphs)],
                y=[plan.seen.expected_step_ms],
                mode="markers",
                name=plan.name,
                marker={
                    "size": SIZES[plan.name],
                    "symbol": SYMBOLS[plan.name],
                    "color": LOOKS[PLANS[plan.name]].colour,
                },
                hovertemplate=f"{plan.name}: %{{x}} graphs, %{{y:.3f}} ms<extra></extra>",
                showlegend=col == 1,
                row=1,
                col=col,
            )
    figure.update_xaxes(title_text="replay graphs", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title_text="PIECEWISE model graphs", row=1, col=2)
    figure.update_yaxes(title_text="expected step time (ms)", row=1, col=1)
    return finish(figure, finding=_curves_finding(tuning), source=source, height=420)


def _knobs(point: CurvePoint) -> str:
    """All that a point chose, for its hover."""
    plan = point.plan
    sizes = (f"{name} {' '.join(map(str, part)) or 'none'}" for name, part in
             (("replay", plan.replay_sizes), ("model", plan.model_sizes)))  # fmt: skip
    return "<br>".join((*sizes, f"trim threshold {plan.trim_threshold}"))


def _curves_finding(tuning: Tuning) -> str:
    tuned, own = tuning.tuned.seen, tuning.own.seen
    return (
        f"{tuned.num_replay_graphs} replay and {tuned.num_model_graphs} PIECEWISE graphs take "
        f"{1 - tuned.expected_step_ms / own.expected_step_ms:.1%} less time a step than the config's own "
        f"{own.num_replay_graphs} and {own.num_model_graphs}"
    )


def gains_figure(table: TuningTable) -> go.Figure:
    """What tuning gains over each config's own plan, on the half that it was tuned on and on the unseen one."""
    figure = go.Figure()
    looks = (Meaning.MODEL_GRAPH, Meaning.REPLAY_GRAPH, Meaning.EAGER, Meaning.KEPT, Meaning.BREAK)
    for trace, symbol, meaning in zip(table.traces, TRACE_SYMBOLS, looks, strict=False):
        rows = [row for row in table.rows if row.trace == trace]
        figure.add_scatter(
            x=[row.gain("own", "seen") for row in rows],
            y=[row.gain("own", "unseen") for row in rows],
            mode="markers",
            name=trace.split(".")[0],
            marker={"symbol": symbol, "size": 9, "color": LOOKS[meaning].colour, "opacity": 0.8},
            customdata=[
                (row.config, row.own.num_replay_graphs, row.tuned.num_replay_graphs,
                 row.own.num_model_graphs, row.tuned.num_model_graphs) for row in rows
            ],
            hovertemplate="%{customdata[0]}<br>tuned on %{x:.2%}, unseen %{y:.2%}<br>replay graphs %{customdata[1]} to "
            "%{customdata[2]}, PIECEWISE %{customdata[3]} to %{customdata[4]}<extra></extra>",
        )  # fmt: skip
    most = max((row.gain("own", "seen") for row in table.rows), default=0.0)
    figure.add_scatter(
        x=[0, most],
        y=[0, most],
        mode="lines",
        name="as much on both",
        line={"color": INK, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    figure.update_xaxes(title_text="less time a step than the config's own, steps tuned on", tickformat=".1%")
    figure.update_yaxes(title_text="the same, unseen steps", tickformat=".1%")
    return finish(figure, finding=_gains_finding(table), source=table.source, height=470)


def _gains_finding(table: TuningTable) -> str:
    unseen = sorted(row.gain("own", "unseen") for row in table.rows)
    worse = sum(gain < 0 for gain in unseen)
    return (
        f"On steps that it did not see tuning takes {unseen[len(unseen) // 2]:.1%} less time in the median and "
        f"{unseen[-1]:.1%} at most; {worse} of {len(unseen)} get worse, by {max(0.0, -unseen[0]):.2%} at most"
    )


def plans_on_steps_figure(
    counts: StepCounts, plan: CapturePlan, scores: Mapping[str, PlanScore], source: str
) -> go.Figure:
    """Rows of the replay batches that `plan` makes of some steps, with its sizes, and step times of plans by name.

    There are as many traces whatever the plan, so that a live figure can be updated trace by trace.
    """
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.62, 0.38])
    rows: Counter[int] = Counter()
    for key, count in counts.items():
        if dispatched(key, plan).padded_rows:
            rows[key[1]] += count
    largest = max((*rows, *plan.replay_sizes, plan.window))
    _add_bars(figure, rows, _width(largest), "replay batch", Meaning.REPLAY_GRAPH, 1)
    figure.add_scatter(
        x=list(plan.replay_sizes),
        y=[1] * len(plan.replay_sizes),
        mode="markers",
        name="replay size",
        marker={"symbol": "triangle-up", "size": 11, "color": INK},
        hovertemplate="size %{x:,}<extra></extra>",
        row=1,
        col=1,
    )
    names = list(scores)
    figure.add_bar(
        x=[scores[name].expected_step_ms for name in names],
        y=names,
        orientation="h",
        text=[f"{scores[name].expected_step_ms:.3f} ms, {scores[name].padded_rows:,} padded rows" for name in names],
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": "#FFFFFF"},
        marker={"color": [LOOKS[PLANS[name]].colour for name in names]},
        showlegend=False,
        hovertemplate="%{y}: %{x:.3f} ms<extra></extra>",
        row=2,
        col=1,
    )
    figure.update_xaxes(title_text="rows of the replay batch", range=[0, 1.05 * largest], tickformat=",", row=1, col=1)
    figure.update_yaxes(title_text="steps", type="log", dtick=1, row=1, col=1)
    figure.update_xaxes(title_text="expected step time (ms)", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    return finish(figure, finding=_plans_finding(scores), source=source, height=520)


def _plans_finding(scores: Mapping[str, PlanScore]) -> str:
    tuned, own = scores["tuned"], scores["own"]
    less = 1 - tuned.expected_step_ms / own.expected_step_ms
    return (
        f"{tuned.num_replay_graphs} replay and {tuned.num_model_graphs} PIECEWISE graphs: "
        f"{tuned.expected_step_ms:.3f} ms a step, {less:.2%} less than the config's own"
    )
