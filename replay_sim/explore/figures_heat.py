"""The heat map of one arm's time against another's over two settings, with the source of every cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.figures_capture import counted
from replay_sim.explore.speedup_cells import Cell, CellKind
from replay_sim.explore.theme import FAINT, INK, finish, text

LOW, HIGH = 40, 160
"""Percent at which the colours end."""
COLOURS = [[0.0, "#0B4F3F"], [0.35, "#5FB59C"], [0.5, "#F7F7F7"], [0.65, "#C9A0D1"], [1.0, "#5B2A63"]]
OUTSIDE = "#D8DEE4"
CORNER = 0.4
"""How far right and up of a cell's middle its mark stands, in cells."""
DRAWN = {"heatmap": ("z", "x", "y", "text", "customdata"), "scatter": ("x", "y", "customdata")}
"""What changes in a trace when a control moves."""


def heat_figure(cells: Sequence[Sequence[Cell]], axes: tuple[str, str], arm: str, base: str, source: str) -> go.Figure:
    """Percent of `base`'s time that `arm` takes; `cells` by the values of the second of `axes`, then of the first.

    A dot marks what was measured, grey what the model was asked outside of its range; a dash where there is no number.
    The traces are the same whatever the cells, so that a live figure can be redrawn trace by trace.
    """
    names = _labels(cells, axes)
    figure = go.Figure()
    for kinds, colours in (((CellKind.MEASURED, CellKind.MODELLED), COLOURS), ((CellKind.OUTSIDE,), None)):
        _add_cells(figure, cells, kinds, colours)
    _add_marks(figure, cells, CellKind.MEASURED, "measured", {"symbol": "circle", "size": 7, "color": INK}, CORNER)
    _add_marks(figure, cells, CellKind.NONE, "no number", {"symbol": "line-ew-open", "size": 9, "color": FAINT}, 0)
    look = {"symbol": "square", "size": 12, "color": OUTSIDE}
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=look, name="modelled outside of what was measured")
    for axis, values, title in zip(("xaxis", "yaxis"), names, axes, strict=True):
        figure.layout[axis].update(
            tickvals=list(range(len(values))),
            ticktext=values,
            title_text=AXIS_TITLES[title],
            range=[-0.5, len(values) - 0.5],
            showgrid=False,
        )
    finding = _finding(cells, axes, arm, base)
    return finish(figure, finding=finding, source=source, height=520, left=86)


AXIS_TITLES = {
    "window": "window (rows)",
    "num_reqs": "num_reqs (requests a step)",
    "max_num_batched_tokens": "max_num_batched_tokens (token budget)",
    "prompt_tokens": "prompt tokens, all requests together",
    "num_local_experts": "experts of the rank",
}
"""The settings that can be axes, with units."""


def redraw_heat(live: go.FigureWidget, drawn: go.Figure) -> None:
    """Change a live heat map into another."""
    with live.batch_update():
        for trace, new in zip(live.data, drawn.data, strict=True):
            trace.update({key: new[key] for key in DRAWN[new.type]})
        live.layout.title.text = drawn.layout.title.text
        live.layout.margin, live.layout.annotations = drawn.layout.margin, drawn.layout.annotations
        for axis in ("xaxis", "yaxis"):
            new = drawn.layout[axis]
            live.layout[axis].update(
                tickvals=new.tickvals, ticktext=new.ticktext, title_text=new.title.text, range=new.range
            )


def _labels(cells: Sequence[Sequence[Cell]], axes: tuple[str, str]) -> tuple[list[str], list[str]]:
    columns = [f"{getattr(cell.settings, axes[0]):,}" for cell in cells[0]]
    return columns, [f"{getattr(row[0].settings, axes[1]):,}" for row in cells]


def _add_cells(
    figure: go.Figure, cells: Sequence[Sequence[Cell]], kinds: tuple[CellKind, ...], colours: list | None
) -> None:
    def of(value: Callable[[Cell], object], absent: object = None) -> list[list]:
        return [[value(cell) if cell.kind in kinds else absent for cell in row] for row in cells]

    figure.add_heatmap(
        x=list(range(len(cells[0]))),
        y=list(range(len(cells))),
        z=of(lambda cell: round(100 * (cell.ratio or 0), 1)),
        text=of(lambda cell: f"{100 * (cell.ratio or 0):.0f}", absent=""),
        customdata=of(hover, absent=""),
        zmin=LOW,
        zmax=HIGH,
        colorscale=colours or [[0.0, OUTSIDE], [1.0, OUTSIDE]],
        showscale=colours is not None,
        colorbar={"title": {"text": "% of the other arm's time", "side": "right"}, "ticksuffix": " %", "thickness": 14},
        texttemplate="%{text}",
        textfont={"size": 12} if colours else {"size": 12, "color": FAINT},
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        xgap=2,
        ygap=2,
    )


def _add_marks(
    figure: go.Figure, cells: Sequence[Sequence[Cell]], kind: CellKind, name: str, look: dict, corner: float
) -> None:
    found = [(x, y, cell) for y, row in enumerate(cells) for x, cell in enumerate(row) if cell.kind is kind]
    figure.add_scatter(
        x=[x + corner for x, _, _ in found],
        y=[y + corner for _, y, _ in found],
        customdata=[hover(cell) for _, _, cell in found],
        mode="markers",
        marker=look,
        name=name,
        showlegend=True,
        hovertemplate="%{customdata}<extra></extra>",
    )


def hover(cell: Cell) -> str:
    """Every knob of a cell, its times, and where they come from."""
    settings = cell.settings
    knobs = (
        f"{settings.prompt_tokens:,} prompt tokens of {counted(settings.num_reqs, 'request')}<br>"
        f"window {settings.window:,}, max_num_batched_tokens {settings.max_num_batched_tokens:,}, "
        f"{settings.num_local_experts} experts"
    )
    source = text(cell.source).replace("; ", "<br>")
    if cell.ratio is None or cell.arm_us is None or cell.base_us is None:
        return f"{knobs}<br>{source}"
    return f"{knobs}<br><b>{cell.ratio:.1%}</b>: {cell.arm_us / 1e3:,.1f} of {cell.base_us / 1e3:,.1f} ms<br>{source}"


def _finding(cells: Sequence[Sequence[Cell]], axes: tuple[str, str], arm: str, base: str) -> str:
    known = [cell for row in cells for cell in row if cell.kind in (CellKind.MEASURED, CellKind.MODELLED)]
    ours, theirs = ARM_LOOKS[arm].label, ARM_LOOKS[base].label
    ratios = [cell.ratio for cell in known if cell.ratio is not None]
    if not ratios:
        return f"{ours} against {theirs}: nothing here was measured, nor is it in the model's range"
    count = sum(cell.kind is CellKind.MEASURED for cell in known)
    loses = sum(ratio > 1 for ratio in ratios)
    verdict = "never slower" if not loses else f"slower in {loses} of {len(ratios)} cells"
    return (
        f"“{ours}” takes {min(ratios):.0%} to {max(ratios):.0%} of the time of “{theirs}”, {verdict} "
        f"({count} cells measured, {len(known) - count} modelled)"
    )
