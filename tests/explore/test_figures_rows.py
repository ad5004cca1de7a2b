"""The figures of kept rows draw what they were given, counted by hand."""

import plotly.graph_objects as go
import pytest

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.explore.figures_composer import composer_figure, redraw
from replay_sim.explore.figures_rows import chunks_figure, rows_kept_in_chunks, windows_figure
from replay_sim.explore.kept_rows import KeptRows
from replay_sim.explore.tour import TOUR_BATCH, TOUR_CONFIG

SOURCE = "counted by hand"
DECODES = Batch([Request(1, 9, Phase.DECODE, request_id="a<b>")] * 4)


@pytest.fixture
def kept() -> KeptRows:
    return KeptRows(TOUR_BATCH, TOUR_CONFIG)


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def test_windows_of_the_rest_stop_where_the_kept_rows_start(kept) -> None:
    """S4."""
    figure = windows_figure(kept, 1, SOURCE)
    alone, every = figure.data
    assert alone.y == every.y == tuple(range(16, 24))
    assert alone.base == tuple(range(9, 17)) and alone.x == (7, 6, 5, 4, 3, 2, 1, 0)
    assert every.base == (16,) * 8 and every.x == (1, 2, 3, 4, 5, 6, 7, 8)
    assert title(figure).startswith("<b>The 8 kept rows of B see full windows") and "28 of 64" in title(figure)


def test_every_chunk_keeps_a_window_of_its_own() -> None:
    """S7."""
    assert rows_kept_in_chunks(1000, 1000, 128) == 128
    assert rows_kept_in_chunks(1000, 300, 128) == 3 * 128 + 100
    assert rows_kept_in_chunks(1000, 100, 128) == 1000
    figure = chunks_figure(1000, (128, 50), (100, 300, 1000), SOURCE)
    assert [trace.name for trace in figure.data] == ["window 128", "window 50"]
    assert figure.data[0].y == (100.0, 48.4, 12.8) and figure.data[0].customdata == (1000, 484, 128)
    assert "keeps 128 rows in chunks of 1,000 and 1,000 in chunks of 100 (window 128)" in title(figure)


def test_the_composer_draws_requests_step_and_buffers(kept) -> None:
    """S1, S2, B2."""
    figure = composer_figure(kept, SOURCE)
    computed, trimmed, of_request, rows, others, pads, buffers, buffer_pads, thin = figure.data
    assert computed.x == (0, 10, 0, 12) and trimmed.x == (15, 6, 0, 0) and of_request.base == (15, 16, 0, 12)
    assert rows.x == (*range(15, 23), *range(29, 43)) and len(others.x) == 43 - 22
    assert pads.x == tuple(range(43, 64))
    assert buffers.x == tuple(range(22)) and buffer_pads.x == (22, 23)
    assert thin.x[:3] == (0, 15, None) and len(thin.x) == 3 * 22
    assert list(buffers.customdata[0])[:2] == [15, 15] and list(buffers.customdata[21])[3] == 3
    assert "22 of the step's 43 rows are needed; the replay layers run on 24 rows" in title(figure)


def test_a_redrawn_figure_is_the_one_that_would_be_drawn(kept) -> None:
    other = KeptRows(DECODES, TOUR_CONFIG)
    live, drawn = go.FigureWidget(composer_figure(kept, SOURCE)), composer_figure(other, SOURCE)
    redraw(live, other)
    for shown, expected in zip(live.data, drawn.data, strict=True):
        for name in ("x", "y", "base", "customdata"):
            assert list(getattr(shown, name, None) or ()) == list(getattr(expected, name, None) or ()), name
    assert title(live) == title(drawn) and "no replay batch: the replay layers run on all 4" in title(live)
    assert live.layout.yaxis2.ticktext == drawn.layout.yaxis2.ticktext
    assert live.data[0].y[0] == "a&lt;b&gt; · decode"
