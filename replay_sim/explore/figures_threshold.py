"""Figures of the trim threshold: time with and without the break, where it begins to pay, what a threshold costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.speedup_cells import CellKind
from replay_sim.explore.theme import FAINT, INK, LOOKS, Meaning, finish, line
from replay_sim.explore.threshold_curves import ShownCurve, arm_names
from replay_sim.measure.trim_curve import PAIRS, ThresholdCosts, TrimCurve

TICKS = (128, 256, 512, 1024, 2048, 4096, 8192)
BAND, TRIMS = "rgba(244, 211, 94, 0.45)", "rgba(20, 118, 94, 0.08)"
DRAWN = {
    "scatter": ("x", "y", "customdata", "name", "line", "marker"),
    "bar": ("x", "y", "customdata", "text", "marker"),
}
"""What changes in a trace when a control moves."""
GAIN_STYLES = (("solid", "circle"), ("dash", "square"), ("dot", "diamond"), ("dashdot", "x"), ("longdash", "star"))
GAIN_COLOURS = ("#12447A", "#C75B12", "#14765E", "#8E4A97", INK)


def threshold_figure(shown: ShownCurve, threshold: float, costs: ThresholdCosts, source: str) -> go.Figure:
    """Step time with and without the break, what the break saves, and what each threshold costs.

    Top to bottom. The band is where the break begins to pay, 5th to 95th percentile; shaded is where steps break.
    The traces are the same for every curve.
    """
    figure = make_subplots(rows=3, cols=1, vertical_spacing=0.11, row_heights=[0.42, 0.26, 0.32])
    curve, names = shown.curve, arm_names(shown.curve.key.arm)
    for number, (name, arm) in enumerate(zip(names, (PAIRS[curve.key.arm], curve.key.arm), strict=True)):
        times = (curve.without_us, curve.with_us)[number]
        _add_times(figure, shown, arm, name, times / 1e3)
        dots = shown.dots
        tokens = [] if dots is None else dots.num_tokens.tolist()
        measured = [] if dots is None else ((dots.without_us, dots.with_us)[number] / 1e3).tolist()
        _add_dots(figure, arm, f"{name}, measured", tokens, measured)
    _add_gain(figure, shown)
    _add_costs(figure, costs, threshold)
    log = {"type": "log", "tickvals": TICKS, "ticktext": [f"{tick:,}" for tick in TICKS]}
    figure.update_layout(
        shapes=_shapes(shown, threshold),
        xaxis=log,
        xaxis2=log | {"title_text": "tokens of the step"},
        xaxis3={"type": "category", "title_text": "decoder_replay_trim_threshold (tokens)", "showgrid": False},
        yaxis={"title_text": "step (ms)", "rangemode": "tozero"},
        yaxis2={"title_text": "the break<br>saves (%)"},
        yaxis3={"title_text": "costs more than<br>the best (%)", "rangemode": "tozero"},
    )
    finding = _finding(shown, threshold, costs)
    return finish(figure, finding=finding, source=source, height=720, left=84)


def _shapes(shown: ShownCurve, threshold: float) -> list[dict[str, Any]]:
    """The band of the crossing, where steps break, and the line of nothing gained."""
    curve = shown.curve
    end = float(curve.num_tokens[-1])
    spans = [(shown_low(shown), shown_high(shown), BAND)]
    if curve.key.in_graphs and threshold <= curve.padded_tokens[-1]:
        spans.append((_first_broken(curve, threshold), end, TRIMS))
    rects = [
        {"type": "rect", "x0": low, "x1": high, "y0": 0, "y1": 1, "xref": x, "yref": f"{y} domain", "fillcolor": colour}
        | {"line": {"width": 0}, "layer": "below"}
        for low, high, colour in spans
        for x, y in (("x", "y"), ("x2", "y2"))
    ]
    nothing = {"type": "line", "xref": "x2 domain", "yref": "y2", "x0": 0, "x1": 1, "y0": 0, "y1": 0}
    return [*rects, nothing | {"line": {"color": FAINT, "width": 1}}]


def _add_times(figure: go.Figure, shown: ShownCurve, arm: str, name: str, times: np.ndarray) -> None:
    look, is_measured = ARM_LOOKS[arm], shown.kind is CellKind.MEASURED
    figure.add_scatter(
        x=shown.curve.num_tokens.tolist(),
        y=times.round(3).tolist(),
        customdata=shown.curve.padded_tokens.tolist(),
        mode="lines+markers",
        name=f"{name}{'' if is_measured else ', modelled'}",
        line=line(look.meaning, dash=look.dash, width=2 if is_measured else 1.2),
        marker={"symbol": look.symbol, "size": 6 if is_measured else 1},
        hovertemplate="%{x:,} tokens, padded to %{customdata:,}: %{y:.2f} ms<extra></extra>",
        row=1,
        col=1,
    )


def _add_dots(figure: go.Figure, arm: str, name: str, tokens: Sequence[int], times: Sequence[float]) -> None:
    look = ARM_LOOKS[arm]
    figure.add_scatter(
        x=list(tokens),
        y=list(times),
        mode="markers",
        name=name,
        showlegend=False,
        line=line(look.meaning),
        marker={"symbol": look.symbol, "size": 11, "color": line(look.meaning)["color"]},
        hovertemplate="measured, %{x:,} tokens: %{y:.2f} ms<extra></extra>",
        row=1,
        col=1,
    )


def _add_gain(figure: go.Figure, shown: ShownCurve) -> None:
    gain = 100 * shown.curve.gain
    figure.add_scatter(
        x=shown.curve.num_tokens.tolist(),
        y=gain.round(2).tolist(),
        mode="lines+markers",
        name="saved by the break",
        showlegend=False,
        line={"color": INK, "width": 1.6},
        marker={"size": 5},
        hovertemplate="%{x:,} tokens: the break saves %{y:.1f} %<extra></extra>",
        row=2,
        col=1,
    )


def _add_costs(figure: go.Figure, costs: ThresholdCosts, threshold: float) -> None:
    candidates = sorted(costs.by_threshold)
    chosen = min(candidate for candidate in candidates if candidate >= threshold)
    figure.add_bar(
        x=[threshold_name(candidate) for candidate in candidates],
        y=[round(100 * costs.regret(candidate), 3) for candidate in candidates],
        customdata=[costs.of(candidate) / 1e3 for candidate in candidates],
        text=["best" if at == costs.best else f"{100 * costs.regret(at):.1f}" for at in candidates],
        textposition="outside",
        cliponaxis=False,
        name="threshold",
        showlegend=False,
        marker={"color": [LOOKS[Meaning.KEPT if at == chosen else Meaning.TRIMMED].colour for at in candidates]},
        hovertemplate="threshold %{x}: %{y:.2f} % over the best, %{customdata:.2f} ms a step<extra></extra>",
        row=3,
        col=1,
    )


def threshold_name(threshold: float) -> str:
    """A threshold as a label; infinity breaks no graph."""
    return f"{threshold:,.0f}" if np.isfinite(threshold) else "none"


def shown_low(shown: ShownCurve) -> float:
    """Where the band of the crossing begins, in tokens; within the curve."""
    return float(min(shown.crossing.low, shown.curve.num_tokens[-1]))


def shown_high(shown: ShownCurve) -> float:
    """Where the band ends; at least a hundredth wide, so that it is seen."""
    return float(min(max(shown.crossing.high, 1.01 * shown_low(shown)), shown.curve.num_tokens[-1]))


def _first_broken(curve: TrimCurve, threshold: float) -> float:
    """The first token count whose padded size is at least the threshold."""
    padded, tokens = curve.padded_tokens, curve.num_tokens
    return float(tokens[padded >= threshold].min(initial=tokens[-1]))


def _finding(shown: ShownCurve, threshold: float, costs: ThresholdCosts) -> str:
    key = shown.curve.key
    if not key.in_graphs:
        return f"Eager steps trim whatever the threshold: trimming {shown.verdict}"
    return (
        f"The break {shown.verdict}; threshold {threshold:,.0f} costs {costs.regret(threshold):.1%} more than the "
        f"best, {threshold_name(costs.best)}"
    )


@attrs.frozen
class GainPanel:
    """One panel of gains: its title, and curves with their labels."""

    title: str
    curves: Sequence[tuple[str, ShownCurve]]


def gains_figure(panels: Sequence[GainPanel], source: str, *, over_rows: bool = False) -> go.Figure:
    """What the break saves, in % of the time without it, by tokens, or by tokens over requests × window.

    Modelled curves are thin and without markers.
    """
    columns = len(panels)
    titles = [panel.title for panel in panels]
    figure = make_subplots(rows=1, cols=columns, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=titles)
    for column, panel in enumerate(panels, 1):
        for number, (label, shown) in enumerate(panel.curves):
            _add_gain_curve(figure, label, shown, number, column, over_rows=over_rows)
        figure.add_hline(y=0, line={"color": FAINT, "width": 1.2, "dash": "dot"}, row=1, col=column)
    figure.update_xaxes(type="log", title_text="tokens of the step")
    if over_rows:
        figure.update_xaxes(title_text="tokens over requests × window", tickvals=[0.25, 0.5, 1, 2, 4, 8, 16, 32, 64])
    else:
        ticks = TICKS if len(panels) == 1 else TICKS[::2]
        figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks], tickangle=0)
    figure.update_yaxes(title_text="the break saves (%)", row=1, col=1)
    for note in figure.layout.annotations:
        note.update(y=1.0, yanchor="bottom", font={"size": 13})
    figure.update_layout(legend={"y": 1.09})
    return finish(figure, finding=_gains_finding(panels, over_rows), source=source, height=450)


def _add_gain_curve(
    figure: go.Figure, label: str, shown: ShownCurve, number: int, column: int, *, over_rows: bool
) -> None:
    curve, (dash, symbol) = shown.curve, GAIN_STYLES[number]
    scale = curve.key.num_reqs * curve.key.window if over_rows else 1
    is_measured = shown.kind is CellKind.MEASURED
    figure.add_scatter(
        x=(curve.num_tokens / scale).round(4).tolist(),
        y=(100 * curve.gain).round(2).tolist(),
        customdata=curve.num_tokens.tolist(),
        mode="lines+markers" if is_measured else "lines",
        name=label if is_measured else f"{label}, modelled",
        legendgroup=label,
        showlegend=column == 1,
        line={"color": GAIN_COLOURS[number], "width": 2 if is_measured else 1.3, "dash": dash},
        marker={"symbol": symbol, "size": 6},
        hovertemplate=f"{label}, %{{customdata:,}} tokens: %{{y:.1f}} % saved<extra>{shown.kind.value}</extra>",
        row=1,
        col=column,
    )


def _gains_finding(panels: Sequence[GainPanel], over_rows: bool) -> str:
    found = [", ".join(crossing_name(shown, over_rows) for _, shown in panel.curves) for panel in panels]
    parts = found if len(panels) == 1 else [f"{panel.title} {at}" for panel, at in zip(panels, found, strict=True)]
    unit = "times requests × window" if over_rows else "tokens"
    labels = ", ".join(label for label, _ in panels[0].curves)
    return f"From how many {unit} on the break pays ({labels}): {'; '.join(parts)}"


def crossing_name(shown: ShownCurve, over_rows: bool = False) -> str:
    """A crossing in a word or two: in tokens, or over requests × window."""
    found, key = shown.crossing, shown.curve.key
    scale = key.num_reqs * key.window if over_rows else 1
    least, most, tokens = (value / scale for value in (found.least_measured, found.most_measured, found.tokens))
    form = ".2f" if over_rows else ",.0f"
    if tokens <= least:
        return f"≤ {least:{form}}"
    return f"{tokens:{form}}" if np.isfinite(tokens) else f"> {most:{form}}"


def redraw_threshold(live: go.FigureWidget, drawn: go.Figure) -> None:
    """Change a live threshold figure into another."""
    with live.batch_update():
        for trace, new in zip(live.data, drawn.data, strict=True):
            trace.update({key: new[key] for key in DRAWN[new.type]})
        live.layout.title.text = drawn.layout.title.text
        live.layout.margin, live.layout.annotations = drawn.layout.margin, drawn.layout.annotations
        live.layout.shapes = drawn.layout.shapes
