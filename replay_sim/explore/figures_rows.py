"""Figures of kept rows: the windows that they attend to, and what a prompt keeps when it comes in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import kept_lengths
from replay_sim.explore.kept_rows import KeptRows
from replay_sim.explore.theme import Meaning, finish, line, marker, text


def windows_figure(kept: KeptRows, request: int, source: str) -> go.Figure:
    """The positions that each kept row of one request may attend, in the first replay layer and in the rest (S4)."""
    rows = kept.by_row()
    rows = rows[rows.request_of_row == request]
    name = kept.names[request]
    first, rest = rows.window_start_first.tolist(), rows.window_start_rest.tolist()
    ends = (rows.positions + 1).tolist()
    parts = (
        ("first replay layer alone: its KV is written for every row", Meaning.TRIMMED, first, rest),
        ("every replay layer", Meaning.KEPT, rest, ends),
    )
    figure = go.Figure()
    for label, meaning, starts, stops in parts:
        figure.add_bar(
            orientation="h",
            y=rows.positions.tolist(),
            x=[stop - start for start, stop in zip(starts, stops, strict=True)],
            base=starts,
            name=label,
            marker=marker(meaning),
            hovertemplate="row at position %{y}: %{x} positions from %{base}<br>" + label + "<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text=f"position in request {text(name)} that the row may attend", dtick=2)
    figure.update_yaxes(title_text="kept row (position)", autorange="reversed", dtick=1, showgrid=False)
    lost = sum(rest) - sum(first)
    finding = (
        f"The {len(rows)} kept rows of {name} see full windows in the first replay layer; in the rest {lost} of "
        f"{sum(ends) - sum(first)} row-position pairs are gone"
    )
    return finish(figure, finding=finding, source=source, height=390, left=80)


def rows_kept_in_chunks(prompt_tokens: int, chunk_tokens: int, window: int) -> int:
    """Rows that a prompt keeps over all of its steps when it is computed in chunks of `chunk_tokens` (S1, S7)."""
    starts = range(0, prompt_tokens, chunk_tokens)
    chunks = (Request(min(chunk_tokens, prompt_tokens - start), start, Phase.PREFILL) for start in starts)
    return int(kept_lengths(Batch(chunks), window).sum())


def chunks_figure(prompt_tokens: int, windows: Sequence[int], chunks: Sequence[int], source: str) -> go.Figure:
    """The share of a prompt's rows that the replay layers run on, by chunk size, a curve for each window."""
    figure = go.Figure()
    dashes = ("solid", "dash", "dot", "dashdot")
    for window, dash in zip(windows, dashes, strict=False):
        kept = [rows_kept_in_chunks(prompt_tokens, chunk, window) for chunk in chunks]
        figure.add_scatter(
            x=list(chunks),
            y=[100 * rows / prompt_tokens for rows in kept],
            customdata=kept,
            mode="lines+markers",
            name=f"window {window}",
            line=line(Meaning.KEPT, dash=dash),
            hovertemplate=f"window {window}, chunks of %{{x}} tokens<br>%{{customdata}} of {prompt_tokens} rows kept: "
            "%{y:.1f} %<extra></extra>",
        )
    figure.update_xaxes(title_text="tokens of the prompt in one step (chunk)", type="log", tickvals=list(chunks))
    figure.update_yaxes(title_text="rows kept (% of the prompt)", range=[0, 104])
    window, most, least = windows[0], chunks[-1], chunks[0]
    many, few = (rows_kept_in_chunks(prompt_tokens, chunk, window) for chunk in (least, most))
    finding = (
        f"A prompt of {prompt_tokens:,} tokens keeps {few:,} rows in chunks of {most:,} and {many:,} in chunks of "
        f"{least:,} (window {window}): every chunk keeps a window of its own"
    )
    return finish(figure, finding=finding, source=source, height=380)
