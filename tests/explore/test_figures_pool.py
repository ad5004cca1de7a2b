"""The figures of pool reuse: what they draw is what they were given, counted by hand."""

import attrs
import pytest
import torch

from replay_sim.batch.dispatch import CudagraphMode, ModelReason, ReplayReason, StepRecord
from replay_sim.explore.corruption import CorruptionDemo, EarlyAuxStep
from replay_sim.explore.figures_pool import PARTS, address_map_figure, early_aux_figure, reserved_figure
from replay_sim.explore.pool_map import MIB, MappedGraph, MapSegment, PoolMap, TouchedRange
from replay_sim.explore.pool_measured import ReservedCase
from replay_sim.replay.sharing import PoolSharing

SOURCE = "counted by hand"
SHARED = PoolMap(
    PoolSharing.SHARED,
    True,
    False,
    (MapSegment(0, 30 * MIB, 0), MapSegment(30 * MIB, 2 * MIB, 2)),
    (
        MappedGraph("PIECEWISE graph of 9 tokens", "model", (TouchedRange(0, 30 * MIB, 0),), 30 * MIB),
        MappedGraph("FULL graph of 3 tokens", "model", (TouchedRange(0, 20 * MIB, 0),), 30 * MIB),
        MappedGraph(
            "replay graph of 4 rows",
            "replay",
            (TouchedRange(0, 10 * MIB, 0), TouchedRange(30 * MIB, 2 * MIB, 2)),
            32 * MIB,
        ),
        MappedGraph("replay graph of 2 rows", "replay", (TouchedRange(30 * MIB, MIB, 2),), 32 * MIB),
    ),
)
FIRST, AGAIN = "model graph, first use", "model graph, reuse"
OWN, OWN_AGAIN = "replay graph, first use", "replay graph, reuse"
FOREIGN = "replay graph in a model's bytes"


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def caption(figure) -> str:
    (found,) = [note.text for note in figure.layout.annotations if note.name == "caption"]
    return found


def bars(figure, name: str) -> list[tuple]:
    """Column, start and size in MiB of the bars in the map."""
    (found,) = [trace for trace in figure.data if trace.name == name]
    return list(zip(found.x, found.base, found.y, strict=True))


def test_the_map_draws_every_range_in_its_graphs_column_by_who_used_it_first() -> None:
    """O1."""
    figure = address_map_figure(SHARED, SOURCE)
    assert bars(figure, FIRST) == [(0, 0, 30)]
    assert bars(figure, AGAIN) == [(1, 0, 20)]
    assert bars(figure, FOREIGN) == [(2, 0, 10)]
    assert bars(figure, OWN) == [(2, 30, 2)]
    assert bars(figure, OWN_AGAIN) == [(3, 30, 1)]
    assert "run in 10 MiB that the model graphs used first and add 2 MiB to their 30 MiB" in title(figure)
    assert caption(figure) == "Source: counted by hand"


def test_the_map_names_the_kinds_of_graphs_and_says_what_is_reserved_after_each() -> None:
    """O5."""
    figure = address_map_figure(SHARED, SOURCE)
    assert list(figure.layout.xaxis2.ticktext) == ["PIECEWISE<br>9 tokens", "FULL<br>3 tokens", "replay<br>4 … 2 rows"]
    assert list(figure.layout.xaxis2.tickvals) == [0, 1, 2.5]
    (reserved,) = [trace for trace in figure.data if trace.name == "reserved so far"]
    assert reserved.y == (30, 30, 32, 32)
    totals = [trace for trace in figure.data if trace.type == "bar" and trace.yaxis == "y2"]
    assert sorted((x, y) for trace in totals for x, y in zip(trace.x, trace.y, strict=True)) == [
        (0, 30),
        (1, 20),
        (2, 2),
        (2, 10),
        (3, 1),
    ]


def test_the_parts_of_the_map_stay_apart_without_colour() -> None:
    looks = {
        trace.name: (trace.marker.pattern.shape, trace.marker.color)
        for trace in address_map_figure(SHARED, SOURCE).data
        if trace.type == "bar" and trace.yaxis == "y"
    }
    assert len(looks) == len(PARTS)
    assert looks[FIRST][0] == looks[OWN][0] == "" and looks[AGAIN][0] == looks[OWN_AGAIN][0] == "/"
    assert looks[FOREIGN] == ("x", looks[OWN][1])


def test_ranges_too_small_to_be_seen_are_drawn_with_their_neighbours() -> None:
    crumbs = tuple(TouchedRange(start * 1024, 512, 0) for start in range(1000))
    graph = MappedGraph("PIECEWISE graph of 9 tokens", "model", crumbs, 1000 * MIB)
    figure = address_map_figure(attrs.evolve(SHARED, segments=(MapSegment(0, 1000 * MIB, 0),), graphs=(graph,)), SOURCE)
    ((column, start, size),) = bars(figure, FIRST)
    assert (column, start) == (0, 0) and size == pytest.approx(1000 / 1024, rel=1e-2)
    assert "the plan has no replay graphs" in title(figure)


def test_traces_are_the_same_for_every_map() -> None:
    """So that an explorer can change them in place."""
    other = attrs.evolve(SHARED, arrangement=PoolSharing.OWN_POOL, segments=(), graphs=SHARED.graphs[:1])
    kinds = [[(trace.type, trace.name) for trace in address_map_figure(m, SOURCE).data] for m in (SHARED, other)]
    assert kinds[0] == kinds[1]


def cases(*, measured: bool) -> list[ReservedCase]:
    sizes = {"shared": (20 * MIB, 0), "own_stream": (20 * MIB, 6 * MIB), "own_pool": (20 * MIB, 6 * MIB)}
    return [
        ReservedCase(name, "largest_first", "dropped", both, (both[0] + MIB, both[1]) if measured else None)
        for name, both in sizes.items()
    ]


def test_prediction_stands_beside_measurement_and_looks_different() -> None:
    figure = reserved_figure(cases(measured=True), SOURCE)
    by_name = {trace.name: trace for trace in figure.data}
    assert by_name["model graphs, measured"].y == (21, 21, 21)
    assert by_name["model graphs, predicted"].y == (20, 20, 20)
    assert by_name["replay graphs, predicted"].y == (6, 6) and by_name["replay graphs, predicted"].base == (20, 20)
    assert (
        by_name["model graphs, predicted"].marker.color == "#FFFFFF" != by_name["model graphs, measured"].marker.color
    )
    assert by_name["model graphs, measured"].text == ("21", "", "")
    assert by_name["replay graphs, measured"].text == ("27", "27")
    assert "add 0 MiB; on a stream of their own 6 MiB; predicted within 4.8% of every measurement" in title(figure)


def test_nothing_is_drawn_as_measured_where_nothing_was() -> None:
    figure = reserved_figure(cases(measured=False), SOURCE)
    assert [trace.name for trace in figure.data] == ["model graphs, predicted", "replay graphs, predicted"]
    assert title(figure).endswith("(predicted)</b>")


def demo_of(shared: list[float]) -> CorruptionDemo:
    record = StepRecord(
        3, 4, CudagraphMode.PIECEWISE, 2, 2, CudagraphMode.PIECEWISE, ReplayReason.GRAPH, 1, ModelReason.PIECEWISE
    )
    right = torch.tensor([[1.0], [2.0], [3.0]])
    step = EarlyAuxStep((2, 1), record, (right,), (torch.tensor(shared)[:, None],), (right,))
    demo = CorruptionDemo(layers=(0,))
    demo.__dict__["_ran"] = ((step,), (), ())
    return demo


def test_overwritten_rows_are_marked_with_what_was_read() -> None:
    """O3."""
    figure = early_aux_figure(demo_of([1.0, -7.0, 3.0]), SOURCE)
    right, wrong = figure.data
    assert right.y == (1, 2, 3)
    assert (wrong.x, wrong.y, wrong.showlegend) == ((1,), (-7,), True)
    assert "Forced to share, 1 of 1 early aux states are another graph's data" in title(figure)
    assert "step of 2 + 1 tokens" in [note.text for note in figure.layout.annotations]


def test_right_rows_have_no_mark() -> None:
    figure = early_aux_figure(demo_of([1.0, 2.0, 3.0]), SOURCE)
    assert figure.data[1].x == () and not figure.data[1].showlegend
    assert "0 of 1" in title(figure)
