"""What every explorer does: controls that Python sets and reads, refusals in place, a picture that a notebook keeps."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from replay_sim.explore.in_page import InPage

SIDES = 8
"""Pixels of a page's width that are left beside a figure."""


class Explorer(ABC):
    """Controls, a sentence and a figure; `set` and `state` do from Python what hands do with the controls.

    `message` says in a sentence what was refused, or is empty. `figure` is drawn and `widget` assembled by the
    subclass, which then calls `listen`. `widget` is what a notebook shows.
    """

    figure: go.FigureWidget
    widget: widgets.VBox

    def __init__(self, controls: dict[str, Any]) -> None:
        self.controls = controls
        self.message = ""
        self._start = self.state
        self._is_setting = False
        self._refusal, self._sentence = widgets.HTML(), widgets.HTML()

    @property
    @abstractmethod
    def sentence(self) -> str:
        """What is shown, in a sentence or two."""

    @abstractmethod
    def refusal(self, name: str, value: object) -> str:
        """Why a control cannot take the value, in a sentence; empty if it can."""

    @abstractmethod
    def show(self) -> None:
        """Draw what the controls say, or say why it cannot be."""

    @property
    def state(self) -> dict[str, Any]:
        """The controls' values by name; `set(**state)` brings them back."""
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **values: Any) -> None:
        """Move controls; a value that a control does not have changes none of them and is refused in `message`."""
        refusal = next(filter(None, (self.refusal(name, value) for name, value in values.items())), "")
        if refusal:
            self.say(refusal)
            return
        self._is_setting = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self._is_setting = False
        self._on_change()

    def reset(self) -> None:
        """Put every control back to where it started."""
        self.set(**self._start)

    def listen(self) -> None:
        """From here on a control that is moved by hand changes what is shown, and a page gives the figure its width."""
        page = InPage()
        page.observe(self._fit, "width")
        self.widget.children = (*self.widget.children, page)
        for control in self.controls.values():
            control.observe(self._on_change, "value")

    def say(self, refusal: str) -> None:
        """Show a refusal, or none."""
        self.message = refusal
        self._refusal.value = f"<b>Refused.</b> {html.escape(refusal)}" if refusal else ""

    def say_sentence(self) -> None:
        """Show the sentence as it is now."""
        self._sentence.value = f'<div style="line-height: 1.5">{html.escape(self.sentence)}</div>'

    def reset_button(self) -> widgets.Button:
        """A button that resets."""
        button = widgets.Button(description="Reset", tooltip="Put every control back to where it started")
        button.on_click(lambda _: self.reset())
        return button

    def preset_row(self, names: Iterable[str], use: Callable[[str], None]) -> widgets.HBox:
        """A button for every preset, which calls `use` with its name."""
        buttons = []
        for name in names:
            button = widgets.Button(description=name, tooltip=f"Fill all controls: {name}")
            button.layout.width = "auto"
            button.on_click(lambda _, name=name: use(name))
            buttons.append(button)
        return widgets.HBox([widgets.HTML("presets"), *buttons], layout=widgets.Layout(flex_flow="row wrap"))

    def grid(self, column: str) -> widgets.GridBox:
        """The controls in columns of at least a width such as 320px, as many as fit, which share the page."""
        layout = widgets.Layout(grid_template_columns=f"repeat(auto-fit, minmax({column}, 1fr))")
        for control in self.controls.values():
            control.layout.width = "auto"
        return widgets.GridBox(list(self.controls.values()), layout=layout)

    def _fit(self, change: Any) -> None:
        self.figure.layout.width = change["new"] - SIDES

    def _on_change(self, _: object = None) -> None:
        if not self._is_setting:
            self.show()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live widget, and beside it the figure as it is now, which a saved notebook shows without a kernel."""
        still = go.Figure(self.figure).to_plotly_json()
        for trace in still["data"]:
            del trace["uid"]  # drawn anew for every live figure
        live: dict[str, Any] = self.widget._repr_mimebundle_(**kwargs)
        sentence = f"{self.sentence} (The controls appear when this cell is run.)"
        return {**live, "application/vnd.plotly.v1+json": still, "text/plain": sentence}


def live_figure(figure: go.Figure) -> go.FigureWidget:
    """The figure as a widget that is as wide as its cell."""
    live = go.FigureWidget(figure)
    live.layout.autosize = True
    return live


def html_table(frame: pd.DataFrame) -> str:
    """The frame as HTML that looks beside the controls as it does as a cell's output."""
    return f'<div class="jp-RenderedHTMLCommon">{frame.to_html(border=0)}</div>'
