"""Figures of one batch: its requests with kept and trimmed rows, and how rows move into static buffers and back."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from replay_sim.batch.request import Batch
from replay_sim.batch.rows import kept_lengths
from replay_sim.explore.theme import FAINT, Meaning, finish, line, marker, text

TOP, BOTTOM, THICKNESS = 1.0, 0.0, 0.22
COMPUTED = {"color": "#F3F5F7", "line": {"color": FAINT, "width": 1}}


def batch_figure(batch: Batch, window: int, source: str) -> go.Figure:
    """Each request's positions in tokens: computed before, trimmed and kept by S1."""
    kept = kept_lengths(batch, window)
    trimmed = batch.query_lens - kept
    names = [text(f"{name or index} · {phase}") for index, (name, phase) in enumerate(_requests(batch))]
    parts = (
        ("computed before", COMPUTED, batch.computed, batch.computed * 0),
        (Meaning.TRIMMED.value, marker(Meaning.TRIMMED), trimmed, batch.computed),
        (Meaning.KEPT.value, marker(Meaning.KEPT), kept, batch.computed + trimmed),
    )
    figure = go.Figure()
    for name, look, lengths, base in parts:
        figure.add_bar(
            orientation="h",
            y=names,
            x=lengths.tolist(),
            base=base.tolist(),
            name=name,
            marker=look,
            hovertemplate="%{y}<br>" + name + ": %{x} tokens from position %{base}<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="position in the request (tokens)", rangemode="tozero")
    figure.update_yaxes(title_text="request", autorange="reversed", showgrid=False)
    finding = (
        f"{int(kept.sum())} of the step's {batch.num_tokens} rows are kept: the last {window} of a prefill, "
        "all rows of a decode"
    )
    return finish(figure, finding=finding, source=source, height=220 + 34 * batch.num_reqs, left=110)


def _requests(batch: Batch) -> list[tuple[str, str]]:
    phases = ("decode" if decode else "prefill" for decode in batch.is_decode.tolist())
    return list(zip(batch.request_ids, phases, strict=True))


def gather_figure(
    gather_map: Sequence[int | None],
    num_tokens: int,
    padded_tokens: int,
    source: str,
    *,
    buffers: str = "static buffers",
) -> go.Figure:
    """The gather: which row of the step fills each row of the static buffers; None is a pad, cleared (B2)."""
    rows = [row for row in gather_map if row is not None]
    figure = go.Figure()
    _add_step_rows(figure, rows, num_tokens, padded_tokens, trimmed="trimmed row, not gathered")
    _add_replay_rows(figure, rows, len(gather_map), explains_pads=num_tokens == padded_tokens)
    pads = len(gather_map) - len(rows)
    finding = f"Gather: {len(rows)} kept rows fill the first rows of the {buffers}; {pads} pad rows are cleared"
    return _tracks(figure, finding, source, f"the step's rows<br>({num_tokens} of {padded_tokens})", buffers)


def scatter_figure(
    gather_map: Sequence[int | None], written: Sequence[int], num_tokens: int, padded_tokens: int, source: str
) -> go.Figure:
    """The scatter: each output row of the replay batch goes back to the step's row; all others are zero (L6).

    `written` are the step's rows whose output is not all zero, as found in a real output.
    """
    rows = [row for row in gather_map if row is not None]
    figure = go.Figure()
    _add_step_rows(figure, written, num_tokens, padded_tokens, trimmed="trimmed row, zero in the output")
    _add_replay_rows(figure, rows, len(gather_map), explains_pads=num_tokens == padded_tokens)
    finding = (
        f"Scatter: {len(written)} output rows return to where they came from; the {num_tokens - len(written)} trimmed "
        "rows are zero"
    )
    return _tracks(figure, finding, source, f"the step's rows<br>({num_tokens} of {padded_tokens})", "replay outputs")


def _add_step_rows(figure: go.Figure, kept: Sequence[int], num_tokens: int, padded: int, *, trimmed: str) -> None:
    others = sorted(set(range(num_tokens)) - set(kept))
    _add_track(figure, Meaning.KEPT, kept, TOP)
    _add_track(figure, Meaning.TRIMMED, others, TOP, name=trimmed)
    _add_track(figure, Meaning.PAD, range(num_tokens, padded), TOP)


def _add_replay_rows(figure: go.Figure, rows: Sequence[int], padded: int, *, explains_pads: bool) -> None:
    """The replay batch below, each of its rows linked to the step's row, then its pads."""
    _add_links(figure, list(enumerate(rows)))
    _add_track(figure, Meaning.KEPT, range(len(rows)), BOTTOM, legend=False)
    _add_track(figure, Meaning.PAD, range(len(rows), padded), BOTTOM, legend=explains_pads)


def _add_track(
    figure: go.Figure, meaning: Meaning, rows: Sequence[int], level: float, *, name: str = "", legend: bool = True
) -> None:
    """A mark for each row at `level`; in the legend only if there is any."""
    name = name or meaning.value
    figure.add_bar(
        x=list(rows),
        y=[THICKNESS] * len(rows),
        base=[level] * len(rows),
        width=0.82,
        name=name,
        legendgroup=meaning.value,
        showlegend=legend and bool(rows),
        marker=marker(meaning),
        hovertemplate="row %{x}: " + name + "<extra></extra>",
    )


def _add_links(figure: go.Figure, links: Sequence[tuple[int, int]]) -> None:
    """A thin line from each row of the lower track to its row of the upper one."""
    x = [end for low, high in links for end in (low, high, None)]
    y = [end for _ in links for end in (BOTTOM + THICKNESS, TOP, None)]
    figure.add_scatter(
        x=x, y=y, mode="lines", line=line(Meaning.KEPT, width=0.8), opacity=0.6, hoverinfo="skip", showlegend=False
    )


def _tracks(figure: go.Figure, finding: str, source: str, upper: str, lower: str) -> go.Figure:
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="row index", showgrid=False)
    figure.update_yaxes(
        tickvals=[BOTTOM + THICKNESS / 2, TOP + THICKNESS / 2], ticktext=[lower, upper], showgrid=False, ticks=""
    )
    return finish(figure, finding=finding, source=source, height=330, left=130)
