"""Figures of captures: graphs beneath each other as ordered lists, and what a step launches with and without."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.explore.figures_graphs import BREAK_WIDTH, THICKNESS, add_strip, strip_spans
from replay_sim.explore.layer_stack import StackCapture
from replay_sim.explore.theme import Meaning, finish, marker, text, titled
from replay_sim.explore.timeline import TimelineEntry

STRIP_PIXELS, HEIGHT, LEFT = 118, 470, 170
LAUNCH_ROWS = ("without graphs", "with this graph")
AXIS = f"captured operations in order (a break holds none; drawn {BREAK_WIDTH} wide)"


@attrs.frozen
class Strip:
    """A graph to draw: its label, its entries in order, and whether it is of the model or of the replay layers."""

    label: str
    entries: tuple[TimelineEntry, ...]
    meaning: Meaning = Meaning.MODEL_GRAPH

    @property
    def in_words(self) -> str:
        """Its segments and breaks, in words."""
        breaks = sum(entry.is_break for entry in self.entries)
        return f"{counted(len(self.entries) - breaks, 'segment')} and {counted(breaks, 'break')}"


def counted(count: int, noun: str) -> str:
    """The count with its noun, such as 1 break, no breaks, 4 segments."""
    return f"{count or 'no'} {noun}{'s' * (count != 1)}"


def strips_figure(strips: Sequence[Strip], source: str) -> go.Figure:
    """Graphs beneath each other, each the ordered list of its segments and breaks (C1)."""
    figure = go.Figure()
    levels = range(len(strips) - 1, -1, -1)
    for strip, level in zip(strips, levels, strict=True):
        add_strip(figure, strip.entries, level, strip.meaning)
    shown: set[str] = set()
    for trace in figure.data:
        trace.showlegend = trace.name not in shown and bool(trace.x)
        shown |= {trace.name} if trace.showlegend else set()
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text=AXIS)
    ticks = {"tickvals": list(levels), "ticktext": [text(strip.label) for strip in strips]}
    figure.update_yaxes(**ticks, range=[-0.4, len(strips) - 0.15], showgrid=False)
    finding = "; ".join(f"{strip.label}: {strip.in_words}" for strip in strips)
    return finish(figure, finding=finding, source=source, height=190 + STRIP_PIXELS * len(strips), left=LEFT)


@attrs.frozen
class _Bars:
    x: list
    base: list
    y: list
    customdata: list
    text: list


def _stack_bars(made: StackCapture) -> tuple[_Bars, ...]:
    """Segments, breaks, graph launches and operations launched eagerly: the bars of the four traces."""
    spans = list(zip(made.entries, strip_spans(made.entries), strict=True))
    strips = []
    for is_break in (False, True):
        parts = [(entry, start, width) for entry, (start, width) in spans if entry.is_break is is_break]
        strips.append(
            _Bars(
                x=[width - 0.4 for _, _, width in parts],
                base=[start + 0.2 for _, start, _ in parts],
                y=["the graph"] * len(parts),
                customdata=[[entry.label, entry.operations] for entry, _, _ in parts],
                text=["" if is_break else str(entry.operations) for entry, _, _ in parts],
            )
        )
    counts = ([0, made.num_segments], [made.eager_operations, made.break_operations])
    bases = ([0, 0], [0, made.num_segments])
    launches = (
        _Bars(count, base, list(LAUNCH_ROWS), [[row, 0] for row in LAUNCH_ROWS], [str(n or "") for n in count])
        for count, base in zip(counts, bases, strict=True)
    )
    return (*strips, *launches)


def stack_figure(made: StackCapture, source: str) -> go.Figure:
    """The captured stack as an ordered list above, and what the host launches in a step below."""
    figure = make_subplots(rows=2, cols=1, row_heights=[0.4, 0.6], vertical_spacing=0.3)
    looks = (
        (1, "segment of the graph", Meaning.MODEL_GRAPH, "%{customdata[0]}: %{customdata[1]} captured operations"),
        (1, "eager break", Meaning.BREAK, "%{customdata[0]}: runs live"),
        (2, "graph launch", Meaning.MODEL_GRAPH, "%{y}: %{x} graph launches"),
        (2, "operation launched eagerly", Meaning.EAGER, "%{y}: %{x} operations launched one by one"),
    )
    for (row, name, meaning, hover), bars in zip(looks, _stack_bars(made), strict=True):
        figure.add_bar(
            orientation="h",
            name=name,
            marker=marker(meaning),
            width=THICKNESS if row == 1 else 0.6,
            hovertemplate=f"{hover}<extra></extra>",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            row=row,
            col=1,
            **attrs.asdict(bars),
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text=AXIS, row=1, col=1)
    figure.update_xaxes(title_text="launches by the host in a step", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(showgrid=False)
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    finish(figure, finding=stack_finding(made), source=source, height=HEIGHT, left=LEFT)
    return figure.update_layout(margin_t=104)


def redraw_stack(live: go.FigureWidget, made: StackCapture) -> None:
    """Show another capture in a figure that `stack_figure` drew."""
    with live.batch_update():
        for trace, bars in zip(live.data, _stack_bars(made), strict=True):
            trace.x, trace.base, trace.y = bars.x, bars.base, bars.y
            trace.customdata, trace.text = bars.customdata, bars.text
        live.layout.title.update(titled(stack_finding(made)))


def stack_finding(made: StackCapture) -> str:
    """What the capture comes to, in a sentence."""
    parts = f"{counted(made.num_segments, 'segment')} and {counted(made.num_breaks, 'break')}"
    launched = f"{made.launches} {'launch' if made.launches == 1 else 'launches'} a step"
    right = "replay equals eager" if not made.differing else "WRONG: replay differs from eager"
    return f"{parts}: {launched} instead of {made.eager_operations}; {right}"
