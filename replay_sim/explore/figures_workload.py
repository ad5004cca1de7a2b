"""Figures of a workload: which graphs its steps take, and how many rows its replay batches have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.batch.dispatch import Counts, CudagraphMode, DispatchTable
from replay_sim.explore.theme import INK, Meaning, finish, marker
from replay_sim.plan import CapturePlan

Mode = tuple[str, Meaning, str | None]

MODEL_MODES: dict[CudagraphMode, Mode] = {
    CudagraphMode.FULL: ("model graph, FULL", Meaning.MODEL_GRAPH, "."),
    CudagraphMode.PIECEWISE: ("model graph, PIECEWISE", Meaning.MODEL_GRAPH, ""),
    CudagraphMode.NONE: ("eager", Meaning.EAGER, None),
}
REPLAY_MODES: dict[CudagraphMode, Mode] = {
    CudagraphMode.PIECEWISE: ("replay graph", Meaning.REPLAY_GRAPH, None),
    CudagraphMode.NONE: ("eager", Meaning.EAGER, None),
}
ANY_SIZE = "any"
BINS = 60


def dispatch_figure(table: DispatchTable, source: str) -> go.Figure:
    """Steps by the padded size and mode that they took: model graphs above, replay graphs below."""
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.26)
    _add_counts(figure, table.model, MODEL_MODES, 1)
    _add_counts(figure, table.replay, REPLAY_MODES, 2)
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_xaxes(title_text="padded tokens of the step", row=1, col=1)
    figure.update_xaxes(title_text="padded rows of the replay batch", row=2, col=1)
    figure.update_yaxes(title_text="steps", rangemode="tozero")
    return finish(figure, finding=_dispatch_finding(table), source=source, height=620, below=74)


def _dispatch_finding(table: DispatchTable) -> str:
    steps, replay = table.num_steps, table.replay.total()
    eager = sum(count for (_, _, mode), count in table.model.items() if mode is CudagraphMode.NONE)
    eager_replay = sum(count for (_, _, mode), count in table.replay.items() if mode is CudagraphMode.NONE)
    return (
        f"{_part(steps - eager, steps)} steps run in model graphs; "
        f"{_part(replay - eager_replay, replay)} replay batches run in replay graphs"
    )


def _part(count: int, whole: int) -> str:
    return f"all {whole:,}" if count == whole and whole else f"{count:,} of {whole:,}"


def _add_counts(figure: go.Figure, counts: Counts, modes: Mapping[CudagraphMode, Mode], row: int) -> None:
    """A bar for each size, grouped by mode; eager runs of all sizes are one bar."""
    by_mode: dict[CudagraphMode, Counter[int]] = {mode: Counter() for mode in modes}
    for (_, padded, mode), count in counts.items():
        by_mode[mode][0 if mode is CudagraphMode.NONE else padded] += count
    for mode, (name, meaning, pattern) in modes.items():
        found = sorted(by_mode[mode].items())
        look = marker(meaning)
        if pattern is not None:
            look["pattern"] = look["pattern"] | {"shape": pattern, "fgcolor": "#FFFFFF"}
        figure.add_bar(
            x=[[mode.value] * len(found), [f"{size:,}" if size else ANY_SIZE for size, _ in found]],
            y=[count for _, count in found],
            text=[f"{count:,}" for _, count in found],
            textposition="outside",
            textfont_size=11,
            cliponaxis=False,
            name=name,
            legendgroup=name,
            showlegend=bool(found) and not (row == 2 and mode is CudagraphMode.NONE),
            marker=look,
            hovertemplate="%{x}: %{y:,} steps, " + name + "<extra></extra>",
            row=row,
            col=1,
        )


def replay_rows_figure(table: DispatchTable, plan: CapturePlan, source: str) -> go.Figure:
    """Histogram of the replay batches' rows, in graphs and eager, with the capture sizes as lines."""
    largest = max((rows for rows, _, _ in table.replay), default=0)
    width = max(1, -(-largest // BINS))
    figure = go.Figure()
    for mode, (name, meaning, _) in REPLAY_MODES.items():
        bins: Counter[int] = Counter()
        for (rows, _, ran), count in table.replay.items():
            if ran is mode:
                bins[(rows - 1) // width] += count
        found = sorted(bins.items())
        figure.add_bar(
            x=[(index + 0.5) * width + 0.5 for index, _ in found],
            y=[count for _, count in found],
            width=width,
            name=f"{name} holds them" if mode is CudagraphMode.PIECEWISE else name,
            showlegend=bool(found),
            marker=marker(meaning),
            customdata=[[index * width + 1, (index + 1) * width] for index, _ in found],
            hovertemplate="%{customdata[0]:,} to %{customdata[1]:,} rows: %{y:,} steps<extra></extra>",
        )
    end = largest + width
    for size in plan.replay_sizes:
        if size <= end:
            figure.add_vline(x=size, line={"color": INK, "width": 0.8, "dash": "dot"}, opacity=0.5)
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(title_text="rows of the replay batch (dotted: capture sizes)", range=[0, end], tickformat=",")
    figure.update_yaxes(title_text="steps", rangemode="tozero")
    return finish(figure, finding=_rows_finding(table), source=source, height=380)


def _rows_finding(table: DispatchTable) -> str:
    rows = Counter[int]()
    padded = total = 0
    for (count_rows, padded_rows, _), count in table.replay.items():
        rows[count_rows] += count
        padded += padded_rows * count
        total += count_rows * count
    if not rows:
        return "No step of this workload has a replay batch"
    return (
        f"Replay batches have {min(rows):,} to {max(rows):,} rows; {1 - total / padded:.1%} of the rows that they "
        "run on are pads"
    )
