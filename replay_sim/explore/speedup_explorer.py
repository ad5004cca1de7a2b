"""The speedup explorer: any arm against any other over any two settings, measured and modelled cells told apart."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.explorer import Explorer, live_figure
from replay_sim.explore.figures_capture import counted
from replay_sim.explore.figures_heat import AXIS_TITLES, heat_figure, redraw_heat
from replay_sim.explore.live_measure import LiveRun, live_run, measure_panel
from replay_sim.explore.speedup_cells import PREFILL_ARMS, Cell, CellKind, PrefillSettings, SpeedupCells
from replay_sim.measure.records import Point

VALUES = {
    "window": (64, 128, 256, 512, 1024),
    "num_reqs": (1, 2, 4, 8, 16, 32, 64),
    "max_num_batched_tokens": (2048, 4096, 8192, 16384),
    "prompt_tokens": tuple(1 << power for power in range(8, 18)),
    "num_local_experts": (8, 16, 24, 48, 96),
}
"""The values of each setting, on an axis and off it."""
AXES = tuple(VALUES)
CHOICES: dict[str, tuple[Any, ...]] = {
    "x_axis": AXES,
    "y_axis": AXES,
    "arm": PREFILL_ARMS,
    "against": PREFILL_ARMS,
    **VALUES,
}
USUAL: dict[str, Any] = {
    "x_axis": "prompt_tokens",
    "y_axis": "window",
    "arm": "piecewise_replay_graphs",
    "against": "eager_off",
    "window": 128,
    "num_reqs": 1,
    "max_num_batched_tokens": 8192,
    "prompt_tokens": 8192,
    "num_local_experts": 48,
}
PRESETS: dict[str, dict[str, Any]] = {
    "window × prompt": USUAL,
    "launch-bound to weight-bound": {**USUAL, "y_axis": "num_local_experts"},
    "eager replay, does it lose?": {**USUAL, "y_axis": "num_local_experts", "arm": "eager_replay"},
    "requests a step": {**USUAL, "y_axis": "num_reqs", "against": "piecewise_off"},
    "window × token budget": {**USUAL, "x_axis": "max_num_batched_tokens", "prompt_tokens": 32768},
    "what the graphs add": {**USUAL, "y_axis": "num_local_experts", "against": "piecewise_replay_eager"},
}
"""Values of all controls, by name."""
LABELS = {"x_axis": "x axis", "y_axis": "y axis", "against": "against", **AXIS_TITLES}


class SpeedupExplorer(Explorer):
    """Menus for both axes and both arms, and the settings that are no axis; the heat map follows.

    On a machine with a GPU there is a Measure button too, whose points join the map.

    `shown` are the cells of the last values that could be used, by the y axis' values, then the x axis'.
    """

    def __init__(self, cells: SpeedupCells, **values: Any) -> None:
        """Start with `values`; raises ValueError, with the sentence, for one that cannot be used."""
        for name, value in values.items():
            if self.refusal(name, value):
                raise ValueError(self.refusal(name, value))
        super().__init__({name: _menu(name, value) for name, value in (USUAL | values).items()})
        self.cells = cells
        self._drawing = threading.RLock()
        self.shown: list[list[Cell]] = []
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = live_figure(self._draw())
        self.widget = widgets.VBox(
            [
                self.preset_row(PRESETS, self.use_preset),
                self.grid("400px"),
                self.reset_button(),
                self._refusal,
                self._sentence,
                measure_panel(self.add_points, self.live_run),
                self.figure,
            ]
        )
        self.listen()

    @property
    def sentence(self) -> str:
        """The cell of the controls' own values, and how many cells of each kind are shown."""
        state = self.state
        cell = self.cell(**{name: state[name] for name in AXES})
        kinds = [shown.kind for row in self.shown for shown in row]
        counts = ", ".join(f"{kinds.count(kind)} {kind.value}" for kind in CellKind if kind in kinds)
        at = (
            f"At {cell.settings.prompt_tokens:,} tokens of {counted(cell.settings.num_reqs, 'request')}, window "
            f"{cell.settings.window:,}, token budget {cell.settings.max_num_batched_tokens:,} and "
            f"{cell.settings.num_local_experts} experts"
        )
        number = "no number" if cell.ratio is None else f"{cell.ratio:.1%} of the time"
        return f"{at}: {number} ({cell.source}). Of {len(kinds)} cells: {counts}."

    def cell(self, **changes: int) -> Cell:
        """The cell of the controls' values with `changes`, for the arms that are chosen."""
        state = self.state
        settings = PrefillSettings(**{name: state[name] for name in AXES} | changes)
        return self.cells.cell(settings, state["arm"], state["against"])

    def use_preset(self, name: str) -> None:
        """Set all controls to those of a preset; a name that there is not is refused in `message`."""
        if name not in PRESETS:
            self.say(f"preset: {name!r} is not allowed; it must be one of {', '.join(PRESETS)}")
            return
        self.set(**PRESETS[name])

    def live_run(self) -> LiveRun:
        """What the Measure button runs: prompts at the window and experts that the controls say, on an axis or not."""
        state = self.state
        return live_run(state["window"], state["num_local_experts"])

    def add_points(self, points: list[Point], run: str) -> None:
        """Show points that were just measured too; may be called on another thread than the controls'."""
        with self._drawing:
            self.cells.add_live(points, run)
            self.show()

    def refusal(self, name: str, value: object) -> str:
        """Why a control cannot take the value, in a sentence; empty if it can."""
        if name not in CHOICES:
            return f"{name} is no control; the controls are {', '.join(CHOICES)}"
        allowed = CHOICES[name]
        if isinstance(value, bool) or value not in allowed:
            return f"{name}: {value!r} is not allowed; it must be one of {', '.join(map(str, allowed))}"
        return ""

    def show(self) -> None:
        """Draw what the controls say; what cannot be used leaves the picture as it was."""
        with self._drawing:
            self._refresh()
            if not self.message:
                redraw_heat(self.figure, self._draw())

    def _refresh(self) -> None:
        """Find the cells of the controls' values, or say why they cannot be shown."""
        state = self.state
        x, y = state["x_axis"], state["y_axis"]
        if x == y:
            self.say(f"y_axis: {y} is the x axis already; choose two different settings")
            return
        if state["arm"] == state["against"]:
            self.say(f"against: {state['against']} is the arm itself; choose two different arms")
            return
        self.say("")
        self.shown = [[self.cell(**{x: column, y: row}) for column in VALUES[x]] for row in VALUES[y]]
        for name in AXES:
            self.controls[name].disabled = name in (x, y)
        self.say_sentence()

    def _draw(self) -> go.Figure:
        state = self.state
        axes = state["x_axis"], state["y_axis"]
        return heat_figure(self.shown, axes, state["arm"], state["against"], self.cells.source)


def _menu(name: str, value: Any) -> widgets.Dropdown | widgets.SelectionSlider:
    """A menu for axes and arms, a slider over its values for a setting."""
    style, layout = {"description_width": "250px"}, widgets.Layout(width="430px")
    label = LABELS.get(name, name)
    if name in VALUES:
        return widgets.SelectionSlider(
            options=[(f"{choice:,}", choice) for choice in VALUES[name]],
            value=value,
            description=label,
            style=style,
            layout=layout,
        )
    shown = {axis: axis for axis in AXES} if name in ("x_axis", "y_axis") else _arm_names()
    return widgets.Dropdown(
        options=[(text, choice) for choice, text in shown.items()],
        value=value,
        description=label,
        style=style,
        layout=layout,
    )


def _arm_names() -> dict[str, str]:
    return {name: f"{name} ({ARM_LOOKS[name].label})" for name in PREFILL_ARMS}
