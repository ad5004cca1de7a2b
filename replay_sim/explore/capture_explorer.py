"""The capture explorer: layers, breaks, mode and sizes; segments, breaks and launches of a real capture follow live."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from replay_sim.explore.explorer import Explorer, live_figure
from replay_sim.explore.figures_capture import counted, redraw_stack, stack_figure
from replay_sim.explore.layer_stack import BREAKS, MOST_ROWS, StackCapture, capture_stack

SOURCE = "captured and replayed by replay_sim on the host backend as the controls say; counted, not timed"
MOST_LAYERS = 8
SIZES = (8, 16, 32, MOST_ROWS)
MENUS = {"breaks": tuple(BREAKS), "cudagraph_mode": ("PIECEWISE", "FULL"), "size": SIZES}
SLIDERS = {"num_layers": ("num_layers", 1, MOST_LAYERS), "num_tokens": ("num_tokens of the step", 1, MOST_ROWS)}
USUAL = {"num_layers": 4, "breaks": "attention", "cudagraph_mode": "PIECEWISE", "size": 16, "num_tokens": 11}
PRESETS: dict[str, dict[str, Any]] = {
    "attention breaks": USUAL,
    "FULL, its own size": {**USUAL, "cudagraph_mode": "FULL", "num_tokens": 16},
    "FULL, a smaller step": {**USUAL, "cudagraph_mode": "FULL"},
    "every break": {**USUAL, "breaks": "attention, KV write, experts"},
    "no break": {**USUAL, "breaks": "none"},
}
"""Values of all controls, by name."""


class CaptureExplorer(Explorer):
    """Controls for a small stack of layers; `made` and the figure are those of the last values that could be used.

    `size` is the padded rows of the graph, `num_tokens` the real rows of the step that is replayed on it.
    """

    made: StackCapture

    def __init__(self, **values: Any) -> None:
        """Start with `values`; raises ValueError, with the sentence, for one that cannot be used."""
        for name, value in values.items():
            if self.refusal(name, value):
                raise ValueError(self.refusal(name, value))
        super().__init__(_controls(USUAL | values))
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = live_figure(stack_figure(self.made, SOURCE))
        self.widget = self._assemble()
        self.listen()

    @property
    def sentence(self) -> str:
        """What was captured, what a step launches, and whether a replay is right."""
        made, state = self.made, self.state
        breaks = f"{counted(made.num_breaks, 'break')} with {made.break_operations}" if made.num_breaks else "no breaks"
        counts = (
            f"A {state['cudagraph_mode']} graph of {state['size']} rows over {counted(state['num_layers'], 'layer')}: "
            f"{counted(made.num_segments, 'segment')} with {made.operations} operations, {breaks}. "
            f"Launches of a step: {made.launches} instead of {made.eager_operations}."
        )
        if not made.differing:
            return f"{counts} A step of {state['num_tokens']} tokens equals eager in all {made.compared} elements."
        return (
            f"{counts} A step of {state['num_tokens']} tokens differs from eager in {made.differing} of "
            f"{made.compared} elements: attention was captured with the {state['size']} rows of the capture."
        )

    def use_preset(self, name: str) -> None:
        """Set all controls to those of a preset; a name that there is not is refused in `message`."""
        if name not in PRESETS:
            self.say(f"preset: {name!r} is not allowed; it must be one of {', '.join(PRESETS)}")
            return
        self.set(**PRESETS[name])

    def refusal(self, name: str, value: object) -> str:
        """Why a control cannot take the value, in a sentence; empty if it can."""
        if name in MENUS:
            allowed = MENUS[name]
            if isinstance(value, bool) or value not in allowed:
                return f"{name}: {value!r} is not allowed; it must be one of {'; '.join(map(str, allowed))}"
            return ""
        if name not in SLIDERS:
            return f"{name} is no control; the controls are {', '.join(USUAL)}"
        _, least, most = SLIDERS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return f"{name}: {value!r} is not allowed; it must be an integer from {least} to {most}"
        return ""

    def _refresh(self) -> None:
        """Capture what the controls say, or say why it cannot be."""
        state = self.state
        if state["num_tokens"] > state["size"]:
            self.say(f"num_tokens: {state['num_tokens']} is not allowed; a graph of size {state['size']} holds no more")
            return
        self.say("")
        self.made = capture_stack(
            state["num_layers"], state["breaks"], state["cudagraph_mode"], state["size"], state["num_tokens"]
        )
        self.say_sentence()

    def show(self) -> None:
        """Capture and draw what the controls say; what cannot be used leaves the picture as it was."""
        self._refresh()
        if not self.message:
            redraw_stack(self.figure, self.made)

    def _assemble(self) -> widgets.VBox:
        row = self.preset_row(PRESETS, self.use_preset)
        parts = [row, self.grid("380px"), self.reset_button(), self._refusal, self._sentence, self.figure]
        return widgets.VBox(parts)


def _controls(values: dict[str, Any]) -> dict[str, Any]:
    style, layout = {"description_width": "170px"}, widgets.Layout(width="370px")
    labels = {"breaks": "breaks of each layer", "size": "capture size (rows)"}
    controls: dict[str, Any] = {}
    for name, value in values.items():
        if name in MENUS:
            controls[name] = widgets.Dropdown(
                options=MENUS[name], value=value, description=labels.get(name, name), style=style, layout=layout
            )
        else:
            label, least, most = SLIDERS[name]
            controls[name] = widgets.IntSlider(
                value, min=least, max=most, description=label, style=style, layout=layout
            )
    return controls
