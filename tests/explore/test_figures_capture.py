"""The figures of captures draw what they were given, counted by hand."""

import plotly.graph_objects as go

from replay_sim.explore.figures_capture import Strip, redraw_stack, stack_figure, strips_figure
from replay_sim.explore.figures_graphs import BREAK_WIDTH
from replay_sim.explore.layer_stack import StackCapture
from replay_sim.explore.theme import Meaning
from replay_sim.explore.timeline import TimelineEntry

SOURCE = "counted by hand"
SEGMENT, BREAK = TimelineEntry(False, "segment 1", 7), TimelineEntry(True, "attention", 0)
RIGHT = StackCapture((SEGMENT, BREAK, SEGMENT), 14, 3, 17, differing=0, compared=64)
WRONG = StackCapture((SEGMENT,), 17, 0, 17, differing=60, compared=64)


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def test_strips_are_drawn_beneath_each_other_in_order() -> None:
    """C1."""
    strips = (Strip("FULL <1>", (SEGMENT,)), Strip("replay", (SEGMENT, BREAK), Meaning.REPLAY_GRAPH))
    figure = strips_figure(strips, SOURCE)
    assert list(figure.layout.yaxis.tickvals) == [1, 0]
    assert figure.layout.yaxis.ticktext[0] == "FULL &lt;1&gt;"
    assert [trace.y for trace in figure.data if trace.x] == [(1,), (0,), (0,)]
    assert [trace.name for trace in figure.data if trace.showlegend] == [
        "segment of the model graph",
        "segment of the replay graph",
        "eager break",
    ]
    assert title(figure) == "<b>FULL &lt;1&gt;: 1 segment and no breaks; replay: 1 segment and 1 break</b>"


def test_the_stack_shows_its_order_and_what_the_host_launches() -> None:
    figure = stack_figure(RIGHT, SOURCE)
    segments, breaks, graphs, eager = figure.data
    assert [round(start, 1) for start in segments.base] == [0.2, 7 + BREAK_WIDTH + 0.2]
    assert list(segments.text) == ["7", "7"] and [round(start, 1) for start in breaks.base] == [7.2]
    assert graphs.x == (0, 2) and eager.x == (17, 3) and eager.base == (0, 2)
    assert title(figure) == ("<b>2 segments and 1 break: 5 launches a step instead of 17; replay equals eager</b>")


def test_a_redrawn_stack_is_the_one_that_would_be_drawn_and_says_what_is_wrong() -> None:
    live, drawn = go.FigureWidget(stack_figure(RIGHT, SOURCE)), stack_figure(WRONG, SOURCE)
    redraw_stack(live, WRONG)
    for shown, expected in zip(live.data, drawn.data, strict=True):
        for name in ("x", "y", "base", "customdata", "text"):
            assert list(getattr(shown, name)) == list(getattr(expected, name)), name
    assert title(live) == title(drawn)
    assert title(live).startswith("<b>1 segment and no breaks: 1 launch a step instead of 17; WRONG")
