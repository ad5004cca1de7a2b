"""Figures of captured graphs: their segments and eager breaks in order."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from replay_sim.explore.theme import FAINT, INK, Meaning, finish, marker
from replay_sim.explore.timeline import TimelineEntry

BREAK_WIDTH = 5
UPPER, LOWER = 1.0, 0.0
THICKNESS = 0.36


def timeline_figure(
    model: Sequence[TimelineEntry], model_size: int, replay: Sequence[TimelineEntry], replay_size: int, source: str
) -> go.Figure:
    """A model graph above and the replay graph that runs inside its last break below, in captured operations.

    Breaks hold no operation and are drawn BREAK_WIDTH wide. An empty `replay` draws the model graph alone.
    """
    figure = go.Figure()
    add_strip(figure, model, UPPER, Meaning.MODEL_GRAPH)
    ticks = {UPPER: f"model graph<br>of {model_size} tokens"}
    if replay:
        add_strip(figure, replay, LOWER, Meaning.REPLAY_GRAPH)
        ticks[LOWER] = f"replay graph<br>of {replay_size} rows"
        _add_descent(figure, model, replay)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text=f"captured operations in order (a break holds none; drawn {BREAK_WIDTH} wide)")
    figure.update_yaxes(
        tickvals=list(ticks), ticktext=list(ticks.values()), range=[-0.42 if replay else 0.6, 1.85], showgrid=False
    )
    return finish(figure, finding=_finding(model, replay), source=source, height=460 if replay else 320, left=130)


def _finding(model: Sequence[TimelineEntry], replay: Sequence[TimelineEntry]) -> str:
    def counted(entries: Sequence[TimelineEntry]) -> str:
        breaks = sum(entry.is_break for entry in entries)
        return f"{len(entries) - breaks} segments and {breaks} breaks"

    finding = f"The model graph is {counted(model)}"
    return f"{finding}; in its last break runs a replay graph of {counted(replay)}" if replay else finding


def strip_spans(entries: Sequence[TimelineEntry]) -> list[tuple[int, int]]:
    """Where each entry starts, and how wide it is drawn, in captured operations."""
    spans, start = [], 0
    for entry in entries:
        width = BREAK_WIDTH if entry.is_break else entry.operations
        spans.append((start, width))
        start += width
    return spans


def add_strip(figure: go.Figure, entries: Sequence[TimelineEntry], level: float, meaning: Meaning) -> None:
    """Draw a graph's segments and breaks in order at `level`, each break with its name."""
    spans = list(zip(entries, strip_spans(entries), strict=True))
    for is_break, look in ((False, meaning), (True, Meaning.BREAK)):
        parts = [(entry, start, width) for entry, (start, width) in spans if entry.is_break is is_break]
        name = "eager break" if is_break else f"segment of the {look.value}"
        figure.add_bar(
            orientation="h",
            y=[level] * len(parts),
            x=[width - 0.4 for _, _, width in parts],
            base=[start + 0.2 for _, start, _ in parts],
            width=THICKNESS,
            name=name,
            marker=marker(look),
            text=["" if is_break else str(entry.operations) for entry, _, _ in parts],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            legendgroup=name,
            showlegend=not is_break or level == UPPER,
            customdata=[[entry.label, entry.operations] for entry, _, _ in parts],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} captured operations<extra></extra>",
        )
    for entry, (start, width) in spans:
        if entry.is_break:
            figure.add_annotation(
                x=start + width / 2,
                y=level + THICKNESS / 2,
                text=entry.label,
                textangle=-32,
                showarrow=False,
                xanchor="left",
                yanchor="bottom",
                font={"size": 11.5, "color": INK},
            )


def _add_descent(figure: go.Figure, model: Sequence[TimelineEntry], replay: Sequence[TimelineEntry]) -> None:
    """Two thin lines from the model graph's last break to the ends of the replay graph that runs inside it."""
    start, width = strip_spans(model)[-1]
    replay_end = sum(strip_spans(replay)[-1])
    bottom, top = UPPER - THICKNESS / 2, LOWER + THICKNESS / 2
    figure.add_scatter(
        x=[start, 0, None, start + width, replay_end],
        y=[bottom, top, None, bottom, top],
        mode="lines",
        line={"color": FAINT, "width": 1, "dash": "dot"},
        opacity=0.5,
        hoverinfo="skip",
        showlegend=False,
    )
