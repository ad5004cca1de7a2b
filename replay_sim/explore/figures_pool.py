"""Figures of pool reuse: the address map, reserved bytes of the arrangements, and early aux states overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from replay_sim.explore.corruption import CorruptionDemo, EarlyAuxStep
from replay_sim.explore.pool_map import PoolMap, TouchedRange
from replay_sim.explore.pool_measured import ReservedCase
from replay_sim.explore.theme import FAINT, INK, LOOKS, RULE, Meaning, finish, marker
from replay_sim.replay.sharing import PoolSharing

MIB = 1 << 20
MOST_EDGES = 40
PIXELS = 400
"""Parts of the map's height; what is smaller is drawn together with its neighbour."""
MEANINGS = {"model": Meaning.MODEL_GRAPH, "replay": Meaning.REPLAY_GRAPH}
PARTS = (
    ("model", "model", True, "model graph, first use"),
    ("model", "model", False, "model graph, reuse"),
    ("replay", "replay", True, "replay graph, first use"),
    ("replay", "replay", False, "replay graph, reuse"),
    ("replay", "model", False, "replay graph in a model's bytes"),
)
"""Group of a graph, group of the first user of the bytes, whether they are the same graph, and how it is said."""
PATTERNS = {("model", "model"): "/", ("replay", "replay"): "/", ("replay", "model"): "x"}
SENTENCES = {
    PoolSharing.SHARED: "shared pool and stream",
    PoolSharing.OWN_STREAM: "the same pool, a stream of their own",
    PoolSharing.OWN_POOL: "a pool of their own",
}
CASE_LABELS = {
    ("largest_first", "dropped"): "largest<br>first",
    ("largest_first", "held"): "largest first,<br>outputs held",
    ("smallest_first", "dropped"): "smallest<br>first",
}


def address_map_figure(pool_map: PoolMap, source: str) -> go.Figure:
    """Which bytes of the graph pools each graph touches, over the capture sequence, coloured by graph (O1, O2).

    Below it what each graph touches, and what is reserved by then. The traces are the same for every map.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.76, 0.24])
    for part in PARTS:
        _add_ranges(figure, pool_map, *part)
    _add_totals(figure, pool_map)
    _add_edges(figure, pool_map)
    bands = _bands(pool_map)
    for band in bands[1:]:
        figure.add_vline(x=band[0] - 0.5, line={"color": RULE, "width": 1})
    figure.update_layout(barmode="overlay", bargap=0.1)
    figure.update_yaxes(title_text="address in the pools (MiB)", rangemode="tozero", tickformat=",", row=1, col=1)
    figure.update_yaxes(showgrid=False, row=1, col=1)
    figure.update_yaxes(title_text="touched<br>(MiB)", rangemode="tozero", tickformat=",", row=2, col=1)
    figure.update_xaxes(showgrid=False, range=[-0.8, len(pool_map.graphs) - 0.2])
    figure.update_xaxes(
        tickvals=[(band[0] + band[-1]) / 2 for band in bands],
        ticktext=[_band_label(pool_map, band) for band in bands],
        tickangle=0,
        ticks="",
    )
    figure.update_xaxes(title_text="graphs in the order of their capture", row=2, col=1)
    return finish(figure, finding=_map_finding(pool_map), source=source, height=740, left=78, below=78)


def _look(group: str, first_group: str, is_first: bool) -> dict[str, Any]:
    """Plain for the first user of the bytes; patterned in white, or in the first user's colour, for the next ones."""
    look = marker(MEANINGS[group])
    if is_first:
        return look
    foreign = LOOKS[MEANINGS[first_group]].colour if first_group != group else "#FFFFFF"
    pattern = {"shape": PATTERNS[group, first_group], "fillmode": "overlay", "fgcolor": foreign, "fgopacity": 1.0}
    return look | {"pattern": {**pattern, "size": 5, "solidity": 0.28}}


def _add_ranges(figure: go.Figure, pool_map: PoolMap, group: str, first_group: str, is_first: bool, name: str) -> None:
    least = pool_map.reserved_bytes() / PIXELS
    bars = [
        (number, touched)
        for number in _numbers(pool_map, group)
        for touched in _visible(_ranges_of_part(pool_map, number, first_group, is_first), least)
    ]
    figure.add_bar(
        x=[number for number, _ in bars],
        y=[round(touched.size / MIB, 3) for _, touched in bars],
        base=[round(touched.start / MIB, 3) for _, touched in bars],
        width=0.86,
        name=name,
        marker=_look(group, first_group, is_first),
        showlegend=bool(bars),
        customdata=[[pool_map.graphs[n].name, pool_map.graphs[t.first_user].name] for n, t in bars],
        hovertemplate="%{customdata[0]}<br>%{y:,.1f} MiB from %{base:,.1f} MiB on, first used by %{customdata[1]}"
        "<extra></extra>",
        row=1,
        col=1,
    )


def _visible(ranges: Sequence[TouchedRange], least: float) -> list[TouchedRange]:
    """The ranges with those joined that are less than `least` bytes apart, named after the larger part's user."""
    joined: list[TouchedRange] = []
    for touched in ranges:
        last = joined[-1] if joined else None
        is_small = last is not None and (min(last.size, touched.size) < least or last.first_user == touched.first_user)
        if last is not None and is_small and touched.start - (last.start + last.size) < least:
            user = max(last, touched, key=lambda one: one.size).first_user
            joined[-1] = TouchedRange(last.start, touched.start + touched.size - last.start, user)
        else:
            joined.append(touched)
    return joined


def _add_totals(figure: go.Figure, pool_map: PoolMap) -> None:
    """Under the map: what each graph touches, in the same parts and looks, and a line of what is reserved by then."""
    floors = [0] * len(pool_map.graphs)
    for group, first_group, is_first, name in PARTS:
        sizes = ((n, _bytes_of_part(pool_map, n, first_group, is_first)) for n in _numbers(pool_map, group))
        part = [(n, size) for n, size in sizes if size]
        figure.add_bar(
            x=[n for n, _ in part],
            y=[round(size / MIB, 3) for _, size in part],
            base=[round(floors[n] / MIB, 3) for n, _ in part],
            width=0.86,
            marker=_look(group, first_group, is_first),
            showlegend=False,
            customdata=[pool_map.graphs[n].name for n, _ in part],
            hovertemplate="%{customdata}<br>%{y:,.1f} MiB: " + name + "<extra></extra>",
            row=2,
            col=1,
        )
        for n, size in part:
            floors[n] += size
    figure.add_scatter(
        x=list(range(len(pool_map.graphs))),
        y=[round(graph.reserved_bytes / MIB, 3) for graph in pool_map.graphs],
        mode="lines",
        line={"color": INK, "width": 1.6, "shape": "hvh"},
        name="reserved so far",
        customdata=[graph.name for graph in pool_map.graphs],
        hovertemplate="after %{customdata}<br>%{y:,.1f} MiB reserved<extra></extra>",
        row=2,
        col=1,
    )


def _numbers(pool_map: PoolMap, group: str) -> list[int]:
    return [number for number, graph in enumerate(pool_map.graphs) if graph.group == group]


def _ranges_of_part(pool_map: PoolMap, number: int, first_group: str, is_first: bool) -> list[TouchedRange]:
    """The ranges of one graph whose first user is the graph itself or an earlier one of `first_group`."""
    return [
        touched
        for touched in pool_map.graphs[number].ranges
        if (touched.first_user == number) is is_first and pool_map.graphs[touched.first_user].group == first_group
    ]


def _bytes_of_part(pool_map: PoolMap, number: int, first_group: str, is_first: bool) -> int:
    return sum(touched.size for touched in _ranges_of_part(pool_map, number, first_group, is_first))


def _add_edges(figure: go.Figure, pool_map: PoolMap) -> None:
    """A thin line at the end of each segment, from the graph that reserved it on; none where too many hide the map."""
    x: list[float | None] = []
    y: list[float | None] = []
    drawn = pool_map.segments if len(pool_map.segments) <= MOST_EDGES else ()
    for segment in drawn:
        end = round((segment.start + segment.size) / MIB, 3)
        x += [segment.graph - 0.5, len(pool_map.graphs) - 0.5, None]
        y += [end, end, None]
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": FAINT, "width": 0.7, "dash": "dot"},
        name="end of a segment",
        showlegend=bool(drawn),
        hoverinfo="skip",
        row=1,
        col=1,
    )


def _bands(pool_map: PoolMap) -> list[range]:
    """The numbers of the graphs of each kind, which are captured one after the other."""
    kinds = groupby(range(len(pool_map.graphs)), key=lambda number: pool_map.graphs[number].name.partition(" ")[0])
    numbers = [list(band) for _, band in kinds]
    return [range(band[0], band[-1] + 1) for band in numbers]


def _band_label(pool_map: PoolMap, band: range) -> str:
    """The kind of the band's graphs, and the sizes of the first and the last."""
    kind, _, first = pool_map.graphs[band[0]].name.partition(" graph of ")
    last = pool_map.graphs[band[-1]].name.partition(" graph of ")[2]
    sizes = first if len(band) == 1 else f"{first.split()[0]} … {last}"
    return f"{kind}<br>{sizes}"


def _map_finding(pool_map: PoolMap) -> str:
    model, replay = (pool_map.reserved_bytes(group) / MIB for group in ("model", "replay"))
    where = SENTENCES[pool_map.arrangement]
    if not any(graph.group == "replay" for graph in pool_map.graphs):
        return f"The model graphs reserve {model:,.0f} MiB; the plan has no replay graphs"
    reused = pool_map.reused_bytes("replay", "model") / MIB
    if reused:
        return (
            f"With {where} the replay graphs run in {reused:,.0f} MiB that the model graphs used first and add "
            f"{replay:,.0f} MiB to their {model:,.0f} MiB"
        )
    return (
        f"With {where} the replay graphs reuse no byte of the model graphs' {model:,.0f} MiB and add {replay:,.0f} MiB"
    )


def reserved_figure(cases: Sequence[ReservedCase], source: str) -> go.Figure:
    """Reserved MiB of model and replay graphs, stacked, for each arrangement and order; predicted beside measured."""
    figure = go.Figure()
    is_measured = any(case.measured for case in cases)
    for kind in ("measured", "predicted")[not is_measured :]:
        for index, meaning in enumerate(MEANINGS.values()):
            _add_reserved_bars(figure, cases, kind, index, meaning)
    figure.update_layout(barmode="group", bargap=0.22, bargroupgap=0.06)
    figure.update_xaxes(showgrid=False, tickangle=0, tickfont={"size": 12})
    figure.update_yaxes(title_text="reserved by graph pools (MiB)", rangemode="tozero", tickformat=",")
    return finish(figure, finding=_reserved_finding(cases), source=source, height=500, left=78, below=86)


def _add_reserved_bars(
    figure: go.Figure, cases: Sequence[ReservedCase], kind: str, index: int, meaning: Meaning
) -> None:
    """The bars of one group, the replay graphs' on top of the model graphs'; hollow for what is predicted.

    The topmost bar carries the sum.
    """
    shown = [(case, sizes) for case in cases if (sizes := getattr(case, kind)) and (sizes[1] or not index)]
    look = marker(meaning)
    if kind == "predicted":
        look = {"color": "#FFFFFF", "line": {"color": look["color"], "width": 1.6}} | {
            "pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": look["color"], "size": 7, "solidity": 0.12}
        }
    figure.add_bar(
        x=[
            [SENTENCES[PoolSharing(case.arrangement)] for case, _ in shown],
            [CASE_LABELS[case.order, case.outputs] for case, _ in shown],
        ],
        y=[round(sizes[index] / MIB, 1) for _, sizes in shown],
        base=[round(sizes[0] / MIB, 1) if index else 0 for _, sizes in shown],
        name=f"{meaning.value}s, {kind}",
        offsetgroup=kind,
        marker=look,
        text=[f"{sum(sizes) / MIB:,.0f}" if index or not sizes[1] else "" for _, sizes in shown],
        textposition="outside",
        textfont={"size": 11},
        cliponaxis=False,
        customdata=[[case.order.replace("_", " "), case.outputs] for case, _ in shown],
        hovertemplate="%{customdata[0]}, outputs %{customdata[1]}<br>%{y:,.1f} MiB, "
        + f"{meaning.value}s, {kind}<extra></extra>",
    )


def _reserved_finding(cases: Sequence[ReservedCase]) -> str:
    best = {
        case.arrangement: case.measured or case.predicted
        for case in cases
        if (case.order, case.outputs) == ("largest_first", "dropped")
    }
    finding = (
        f"Replay graphs that share pool and stream add {best['shared'][1] / MIB:,.0f} MiB; on a stream of their own "
        f"{best['own_stream'][1] / MIB:,.0f} MiB"
    )
    errors = [abs(case.error) for case in cases if case.error is not None]
    return f"{finding}; predicted within {max(errors):.1%} of every measurement" if errors else f"{finding} (predicted)"


def early_aux_figure(demo: CorruptionDemo, source: str) -> go.Figure:
    """Channel 0 of each early aux state, row by row: as the model graph makes it and as it is read after the step."""
    layers, steps = demo.layers, demo.steps
    titles = [f"step of {' + '.join(map(str, step.prompts))} tokens" for step in steps]
    figure = make_subplots(
        rows=len(layers),
        cols=len(steps),
        shared_xaxes="columns",
        shared_yaxes="all",
        vertical_spacing=0.1,
        horizontal_spacing=0.03,
        column_titles=titles,
    )
    figure.update_annotations(font={"size": 13, "color": INK})
    for column, step in enumerate(steps, 1):
        for row in range(1, len(layers) + 1):
            _add_aux_state(figure, step, row, column)
        figure.update_xaxes(title_text="row of the step", row=len(layers), col=column)
    for row, layer in enumerate(layers, 1):
        figure.update_yaxes(title_text=f"layer {layer},<br>channel 0", row=row, col=1)
    wrong = sum(bool(rows) for step in steps for rows in step.wrong_rows("shared"))
    finding = (
        f"Forced to share, {wrong} of {len(steps) * len(layers)} early aux states are another graph's data when they "
        "are read: no error, plausible numbers, and which ones depends on the batch"
    )
    figure.update_layout(legend={"y": 1.1})
    return finish(figure, finding=finding, source=source, height=540, left=86)


def _add_aux_state(figure: go.Figure, step: EarlyAuxStep, row: int, column: int) -> None:
    right, read = ([round(float(value), 1) for value in states[row - 1][:, 0]] for states in (step.right, step.shared))
    wrong = step.wrong_rows("shared")[row - 1]
    shown = {trace.legendgroup for trace in figure.data if trace.showlegend}
    colour = LOOKS[Meaning.MODEL_GRAPH].colour
    figure.add_scatter(
        y=right,
        mode="lines+markers",
        name="right: as the model graph makes it",
        line={"color": colour, "width": 1},
        marker={"size": 4},
        showlegend="right" not in shown,
        legendgroup="right",
        hovertemplate="row %{x}: %{y} is right<extra></extra>",
        row=row,
        col=column,
    )
    figure.add_scatter(
        x=wrong,
        y=[read[index] for index in wrong],
        mode="markers",
        name="read after the step, where it is wrong: what the replay graph left there",
        marker={"symbol": "x", "size": 7, "color": LOOKS[Meaning.REPLAY_GRAPH].colour, "line": {"width": 0}},
        showlegend=bool(wrong) and "wrong" not in shown,
        legendgroup="wrong",
        hovertemplate="row %{x}: %{y} is read<extra></extra>",
        row=row,
        col=column,
    )
