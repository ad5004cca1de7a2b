"""The figure of the batch composer: the requests above, the gather map below, drawn anew at every change."""

from __future__ import annotations

from typing import Any

import attrs
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.explore.figures_batch import BOTTOM, COMPUTED, THICKNESS, TOP
from replay_sim.explore.kept_rows import KeptRows
from replay_sim.explore.theme import Meaning, finish, line, marker, text, titled

HEIGHT, LEFT = 620, 150
ROOM_FOR_TITLE = 104
"""Pixels for a title of two lines, so that the axes stay where they are when it changes."""
ROW_WIDTH, REQUEST_WIDTH = 0.82, 0.6
ROW_HOVER = (
    "buffer row %{x} holds row %{customdata[0]}<br>position %{customdata[1]}, slot %{customdata[2]}, "
    "request %{customdata[3]}<br>window from %{customdata[4]} in the first replay layer, from %{customdata[5]} in the "
    "rest<extra></extra>"
)


@attrs.frozen
class Marks:
    """What one trace shows: where its bars begin, how far they reach, and what their hover tells."""

    x: list
    y: list
    base: list
    customdata: list = attrs.field(factory=list)


def composer_marks(kept: KeptRows) -> tuple[Marks, ...]:
    """The bars of every trace but the links, in the order of the traces; as many for any batch."""
    batch, window_rows = kept.batch, kept.rows
    names = [text(f"{name} · {phase}") for name, phase in zip(kept.names, kept.by_request()["phase"], strict=True)]
    lengths = (window_rows.query_start_loc[1:] - window_rows.query_start_loc[:-1]).tolist()
    trimmed = (batch.query_lens - lengths).tolist() if names else []
    computed = batch.computed.tolist()
    first_kept = [before + cut for before, cut in zip(computed, trimmed, strict=True)]
    rows, gathered = kept.rows.rows.tolist(), kept.gather_map()
    others = sorted(set(range(batch.num_tokens)) - set(rows))
    metadata = kept.by_row().iloc[: window_rows.num_rows].to_numpy().tolist() if gathered else []
    return (
        Marks(computed, names, [0] * len(names)),
        Marks(trimmed, names, computed),
        Marks(lengths, names, first_kept),
        _track(rows, TOP),
        _track(others, TOP),
        _track(list(range(batch.num_tokens, kept.record.padded_tokens)), TOP),
        _track(list(range(len(metadata))), BOTTOM, metadata),
        _track(list(range(len(metadata), len(gathered))), BOTTOM),
    )


def _track(rows: list[int], level: float, customdata: list | None = None) -> Marks:
    return Marks(rows, [THICKNESS] * len(rows), [level] * len(rows), customdata or [])


def links(kept: KeptRows) -> dict[str, list]:
    """The ends of a thin line from each row of the static buffers to the step's row that fills it."""
    pairs = [(low, high) for low, high in enumerate(kept.gather_map()) if high is not None]
    return {
        "x": [end for low, high in pairs for end in (low, high, None)],
        "y": [end for _ in pairs for end in (BOTTOM + THICKNESS, TOP, None)],
    }


def composer_figure(kept: KeptRows, source: str) -> go.Figure:
    """A batch's requests above and its gather map below; the title says on how many rows the replay layers run."""
    figure = make_subplots(rows=2, cols=1, row_heights=[0.52, 0.48], vertical_spacing=0.17)
    requests, tracks = {"orientation": "h", "width": REQUEST_WIDTH}, {"width": ROW_WIDTH}
    of_request, of_row = "%{y}: %{x} tokens from position %{base}, ", "row %{x} of the step: "
    looks: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {**requests, "name": "computed before", "marker": COMPUTED, "hovertemplate": of_request}),
        (1, {**requests, **_look(Meaning.TRIMMED), "hovertemplate": of_request}),
        (1, {**requests, **_look(Meaning.KEPT), "hovertemplate": of_request}),
        (2, {**tracks, **_look(Meaning.KEPT), "showlegend": False, "hovertemplate": of_row}),
        (2, {**tracks, **_look(Meaning.TRIMMED), "showlegend": False, "hovertemplate": of_row}),
        (2, {**tracks, **_look(Meaning.PAD), "hovertemplate": of_row}),
        (2, {**tracks, **_look(Meaning.KEPT), "showlegend": False, "hovertemplate": ROW_HOVER}),
        (2, {**tracks, **_look(Meaning.PAD), "showlegend": False, "hovertemplate": "buffer row %{x}: "}),
    )
    for (row, look), marks in zip(looks, composer_marks(kept), strict=True):
        if look["hovertemplate"] != ROW_HOVER:
            look["hovertemplate"] += f"{look['name']}<extra></extra>"
        figure.add_trace(go.Bar(**look, **attrs.asdict(marks)), row=row, col=1)
    thin = line(Meaning.KEPT, width=0.8)
    figure.add_scatter(
        **links(kept), mode="lines", line=thin, opacity=0.6, hoverinfo="skip", showlegend=False, row=2, col=1
    )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="position in the request (tokens)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=1, col=1)
    figure.update_xaxes(title_text="row index", showgrid=False, rangemode="tozero", row=2, col=1)
    levels = [BOTTOM + THICKNESS / 2, TOP + THICKNESS / 2]
    figure.update_yaxes(tickvals=levels, ticktext=_levels(kept), showgrid=False, ticks="", row=2, col=1)
    finish(figure, finding=composed(kept), source=source, height=HEIGHT, left=LEFT)
    return figure.update_layout(margin_t=ROOM_FOR_TITLE)


def _look(meaning: Meaning) -> dict[str, Any]:
    return {"name": meaning.value, "marker": marker(meaning)}


def _levels(kept: KeptRows) -> list[str]:
    record = kept.record
    return ["static buffers", f"the step's rows<br>({record.num_tokens} of {record.padded_tokens})"]


def redraw(live: go.FigureWidget, kept: KeptRows) -> None:
    """Show another batch in a figure that `composer_figure` drew."""
    *bars, thin = live.data
    with live.batch_update():
        for trace, marks in zip(bars, composer_marks(kept), strict=True):
            trace.x, trace.y, trace.base, trace.customdata = marks.x, marks.y, marks.base, marks.customdata
        ends = links(kept)
        thin.x, thin.y = ends["x"], ends["y"]
        live.layout.title.update(titled(composed(kept)))
        live.layout.yaxis2.ticktext = _levels(kept)


def composed(kept: KeptRows) -> str:
    """What is kept of the step, and on how many rows the replay layers run, in a sentence."""
    record, needed = kept.record, kept.rows.num_rows
    found = f"{needed} of the step's {record.num_tokens} rows are needed"
    if not record.has_replay_batch:
        return f"{found}; no replay batch: the replay layers run on all {record.padded_tokens} padded rows"
    how = "in a replay graph" if record.replay_mode is CudagraphMode.PIECEWISE else "eagerly"
    return f"{found}; the replay layers run on {record.padded_rows} rows, pads included, {how}"
