"""The one plotly theme: a colour and a pattern for every meaning, titles that state findings, captions with sources."""

from __future__ import annotations

import enum
import html
import math
import textwrap
from typing import Any

import attrs
import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
INK, FAINT, RULE = "#1B1F24", "#57606A", "#D8DEE4"
TITLE_CHARACTERS, CAPTION_CHARACTERS = 80, 130
CAPTION_LINE_PIXELS = 16
EDGE, TITLE_PAD, RIGHT = 16, 14, 44
LEGEND_ROW_PIXELS, LEGEND_SPARE_PIXELS, LEGEND_KEY_PIXELS, LEGEND_CHARACTER_PIXELS = 20, 28, 45, 7.2
NARROWEST = 848
"""Pixels of a notebook's cell in a window of 1,280: there titles are not cut and legends not covered."""


class Meaning(enum.Enum):
    """What a mark in any figure stands for; each has one look everywhere."""

    MODEL_GRAPH = "model graph"
    REPLAY_GRAPH = "replay graph"
    EAGER = "eager"
    KEPT = "kept row"
    TRIMMED = "trimmed row"
    PAD = "pad"
    BREAK = "break"
    DEFAULT_PLAN = "default"
    EXPLICIT_PLAN = "explicit"
    OPTIMAL_PLAN = "optimal"
    EAGER_OFF = "eager, replay off"
    EAGER_REPLAY = "eager, replay"
    PIECEWISE_OFF = "graphs, replay off"
    PIECEWISE_REPLAY_EAGER = "graphs, replay eager"
    PIECEWISE_REPLAY_GRAPHS = "graphs, replay graphs"
    PIECEWISE_REPLAY_ONE_LAUNCH = "graphs, replay in one launch"
    FULL = "FULL graph"


@attrs.frozen
class Look:
    """A colour and, for what has to be told apart without it, a plotly fill pattern ("" is a plain fill)."""

    colour: str
    pattern: str = ""


LOOKS = {
    Meaning.MODEL_GRAPH: Look("#12447A"),
    Meaning.REPLAY_GRAPH: Look("#E58A2B"),
    Meaning.EAGER: Look("#8E4A97", "\\"),
    Meaning.KEPT: Look("#14765E"),
    Meaning.TRIMMED: Look("#C9D1D9"),
    Meaning.PAD: Look("#FFFFFF", "/"),
    Meaning.BREAK: Look("#F4D35E", "x"),
    Meaning.DEFAULT_PLAN: Look(INK),
    Meaning.EXPLICIT_PLAN: Look("#5AA9C9", "-"),
    Meaning.OPTIMAL_PLAN: Look("#C2185B", "|"),
    Meaning.EAGER_OFF: Look("#C9A9D1", "\\"),
    Meaning.EAGER_REPLAY: Look("#5B2A63", "\\"),
    Meaning.PIECEWISE_OFF: Look("#4C83C3", "."),
    Meaning.PIECEWISE_REPLAY_EAGER: Look("#F2BC6B", "+"),
    Meaning.PIECEWISE_REPLAY_GRAPHS: Look("#C75B12", "+"),
    Meaning.PIECEWISE_REPLAY_ONE_LAUNCH: Look("#8A3A0B", "/"),
    Meaning.FULL: Look("#0B6E75", "x"),
}
"""Lightness differs wherever the pattern does not, so that the looks stay apart in grey."""


def marker(meaning: Meaning) -> dict[str, Any]:
    """The marker of a bar with this meaning: its colour, its pattern and a thin outline."""
    look = LOOKS[meaning]
    return {
        "color": look.colour,
        "line": {"color": FAINT if look.pattern else look.colour, "width": 1 if look.pattern else 0},
        "pattern": {"shape": look.pattern, "fillmode": "overlay", "fgcolor": FAINT, "size": 6, "solidity": 0.2},
    }


def line(meaning: Meaning, **changes: Any) -> dict[str, Any]:
    """The line of a curve with this meaning; dashed where the look has a pattern."""
    look = LOOKS[meaning]
    return {"color": look.colour, "width": 2, "dash": "dash" if look.pattern else "solid"} | changes


def text(value: object) -> str:
    """`value` as text that plotly shows as it is: its labels would read tags otherwise."""
    return html.escape(str(value), quote=False)


def finish(figure: go.Figure, *, finding: str, source: str, height: int, left: int = 70, below: int = 52) -> go.Figure:
    """Give the figure the theme, the title that states its finding, and a caption with its source.

    All in pixels: `height`, to which a legend of several rows adds, and the room for the labels of the axes, `left`
    and `below`.
    """
    more_legend = _room_for_legend(figure, NARROWEST - left - RIGHT)
    title, caption = titled(finding), _wrapped(f"Source: {source}", CAPTION_CHARACTERS)
    bottom = below + 12 + CAPTION_LINE_PIXELS * (1 + caption.count("<br>"))
    figure.update_layout(
        template=TEMPLATE,
        title=title,
        height=height + more_legend,
        margin={"l": left, "r": RIGHT, "t": 84 + 20 * title["text"].count("<br>") + more_legend, "b": bottom},
    )
    figure.add_annotation(
        name="caption",
        text=caption,
        font={"size": 11.5, "color": FAINT},
        align="left",
        showarrow=False,
        xref="paper",
        yref="paper",
        x=0,
        y=0,
        xanchor="left",
        yanchor="top",
        yshift=-below,
        xshift=EDGE - left,
    )
    return figure


def titled(finding: str) -> dict[str, Any]:
    """The finding as a title for plotly, bold and broken into lines; several lines start higher than one would."""
    words = _wrapped(finding, TITLE_CHARACTERS)
    return {"text": f"<b>{words}</b>", "pad": {"t": TITLE_PAD + 12 * ("<br>" in words), "l": EDGE}}


def _room_for_legend(figure: go.Figure, width: float) -> int:
    """The pixels that a horizontal legend so wide needs beyond those of one row: its entries stand in columns then."""
    names = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    entries = [LEGEND_KEY_PIXELS + LEGEND_CHARACTER_PIXELS * len(name) for name in dict.fromkeys(names)]
    if sum(entries) <= width:
        return 0
    return LEGEND_ROW_PIXELS * math.ceil(len(entries) / max(1, width // max(entries))) - LEGEND_SPARE_PIXELS


def _wrapped(words: str, width: int) -> str:
    return "<br>".join(text(part) for part in textwrap.wrap(words, width))


def _axis() -> dict[str, Any]:
    return {
        "showgrid": True,
        "gridcolor": "#EEF1F4",
        "zeroline": False,
        "linecolor": RULE,
        "showline": True,
        "ticks": "outside",
        "tickcolor": RULE,
        "title": {"font": {"size": 13}, "standoff": 10},
    }


TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": INK},
        "title": {"font": {"size": 16}, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container"}
        | {"yanchor": "top", "pad": {"t": TITLE_PAD, "l": EDGE}},
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": _axis(),
        "yaxis": _axis(),
        "bargap": 0.25,
        "modebar": {
            "orientation": "v",
            "bgcolor": "rgba(0,0,0,0)",
            "remove": "select lasso autoscale zoomin zoomout pan".split(),
        },
        "hoverlabel": {"font": {"family": FONT}, "align": "left"},
    }
)
"""What every figure shares; light on purpose, also on a dark page."""
