"""The captured graphs of a small decoder's plan: a line for each, and those worth drawing beneath each other."""

from __future__ import annotations

import pandas as pd

from replay_sim.capture import BreakableGraph
from replay_sim.explore.figures_capture import Strip
from replay_sim.explore.theme import Meaning
from replay_sim.explore.timeline import timeline_of
from replay_sim.explore.tour import StepTour


def captured_graphs(tour: StepTour) -> dict[tuple[str, int], BreakableGraph]:
    """All graphs that the tour captured, by kind and size: PIECEWISE, FULL and replay, each ascending."""
    runner = tour.graphs
    by_kind = {
        "PIECEWISE": runner.model_graphs,
        "FULL": runner.full_graphs,
        "replay": dict(zip(runner.replay_graphs.sizes, runner.replay_graphs.graphs, strict=True)),
    }
    return {(kind, size): graphs[size] for kind, graphs in by_kind.items() for size in sorted(graphs)}


def graphs_table(tour: StepTour) -> pd.DataFrame:
    """A line for each captured graph: segments, breaks and captured operations (C1)."""
    lines = {
        key: [len(graph.segments), graph.num_breaks, graph.num_operations]
        for key, graph in captured_graphs(tour).items()
    }
    index = pd.MultiIndex.from_tuples(list(lines), names=["graph", "size"])
    return pd.DataFrame(list(lines.values()), index=index, columns=["segments", "breaks", "operations"])


def decoder_strips(tour: StepTour) -> tuple[Strip, ...]:
    """The largest FULL graph, the smallest and the largest PIECEWISE one, and the largest replay graph, to draw."""
    graphs = captured_graphs(tour)
    sizes = {kind: [size for of, size in graphs if of == kind] for kind in ("FULL", "PIECEWISE", "replay")}
    chosen = (
        ("FULL", sizes["FULL"][-1], "tokens"),
        ("PIECEWISE", sizes["PIECEWISE"][0], "tokens"),
        ("PIECEWISE", sizes["PIECEWISE"][-1], "tokens"),
        ("replay", sizes["replay"][-1], "rows"),
    )
    return tuple(
        Strip(
            label=f"{kind}, {size} {unit}",
            entries=timeline_of(graphs[kind, size], tour.graphs.decoder.layers),
            meaning=Meaning.REPLAY_GRAPH if kind == "replay" else Meaning.MODEL_GRAPH,
        )
        for kind, size, unit in chosen
    )
