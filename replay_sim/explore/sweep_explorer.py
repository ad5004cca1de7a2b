"""The explorer of a sweep: two knobs as axes, the others fixed; the speedup of every such design follows."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from replay_sim.explore.explorer import Explorer, live_figure
from replay_sim.explore.figures_sweep import UNITS, speedup_heatmap
from replay_sim.explore.sweep_best import TIME, best_row, ran, varied, with_knobs_of

ACROSS, UP = "across", "up"
DRAWN = {"heatmap": ("x", "y", "z", "text", "customdata", "zmin", "zmax"), "scatter": ("x", "y", "customdata")}
"""What changes in a trace when a control moves."""
LABEL, WIDTH = "300px", "480px"


class SweepExplorer(Explorer):
    """Menus for both axes and for every knob that the sweep varied; those that are axes have no say.

    `best` is the best design of the table, at which the menus start; the star is on the best of those shown.
    """

    def __init__(self, table: pd.DataFrame, source: str, axes: tuple[str, str]) -> None:
        """Start at the best design of the table; ValueError for axes that were not varied or are the same."""
        self.table, self.source = table, source
        self.knobs = varied(table)
        self.best = best_row(table)
        wrong = next((name for name in axes if name not in self.knobs), None)
        if wrong is not None or axes[0] == axes[1]:
            raise ValueError(f"axes: {axes} are not allowed; they must be two of {', '.join(self.knobs)}")
        menus = {ACROSS: _menu(ACROSS, self.knobs, axes[0]), UP: _menu(UP, self.knobs, axes[1])}
        values = {name: sorted(ran(table)[name].unique().tolist()) for name in self.knobs}
        super().__init__(
            menus | {name: _menu(UNITS.get(name, name), values[name], self.best[name]) for name in self.knobs}
        )
        self.figure = live_figure(self._draw())
        self.widget = widgets.VBox(
            [self.grid("400px"), self.reset_button(), self._refusal, self._sentence, self.figure]
        )
        self.listen()

    @property
    def axes(self) -> tuple[str, str]:
        """The knobs across and up."""
        return self.state[ACROSS], self.state[UP]

    @property
    def shown(self) -> pd.DataFrame:
        """The points that the figure shows."""
        fixed = self.best.copy()
        fixed.update(pd.Series({name: self.state[name] for name in self.knobs}, dtype=object))
        return with_knobs_of(self.table, fixed, self.axes)

    @property
    def sentence(self) -> str:
        """The best of what is shown against the best of all."""
        here = best_row(self.shown)
        at = ", ".join(f"{name} {here[name]}" for name in self.axes)
        later = here[TIME] / self.best[TIME] - 1
        return (
            f"Best here: {at}: {here[TIME]:,.1f} s for the workload, {later:+.1%} against the best of all, "
            f"{here['buffer_mib']:,.0f} MiB of buffers, {here['speedup']:.2f} times as fast as without replay."
        )

    def refusal(self, name: str, value: object) -> str:
        """Why a menu cannot take the value, in a sentence; empty if it can."""
        control = self.controls.get(name)
        if control is None:
            return f"{name} is no menu; the menus are {', '.join(self.controls)}"
        allowed = ", ".join(str(option) for option in control.options)
        return "" if value in control.options else f"{name}: {value!r} is not allowed; it must be one of {allowed}"

    def show(self) -> None:
        """Draw what the menus say; one knob as both axes, and a slice of failures alone, are refused."""
        if self.axes[0] == self.axes[1]:
            self.say(f"{UP}: {self.axes[1]} is {ACROSS} already; another knob must be {UP}")
            return
        if (self.shown["error"] != "").all():
            self.say("every design of these values failed; choose another value of a knob that is no axis")
            return
        self.say("")
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update({key: new[key] for key in DRAWN[new.type]})
            layout = self.figure.layout
            layout.title.text, layout.margin, layout.height = (
                drawn.layout.title.text,
                drawn.layout.margin,
                drawn.layout.height,
            )
            layout.annotations = drawn.layout.annotations
            for axis in ("xaxis", "yaxis"):
                layout[axis].update({key: drawn.layout[axis][key] for key in ("range", "tickvals", "ticktext")})
                layout[axis].title.text = drawn.layout[axis].title.text

    def _draw(self) -> go.Figure:
        self.say_sentence()
        return speedup_heatmap(self.shown, best_row(self.shown), self.axes, self.source)


def _menu(label: str, options: list[Any], start: Any) -> widgets.Dropdown:
    return widgets.Dropdown(
        options=options,
        value=start,
        description=label,
        style={"description_width": LABEL},
        layout=widgets.Layout(width=WIDTH),
    )
