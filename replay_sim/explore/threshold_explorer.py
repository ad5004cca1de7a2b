"""The threshold tuner: arm, window, requests, experts, lengths and threshold; curves, crossing and costs follow."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.explorer import Explorer, live_figure
from replay_sim.explore.figures_threshold import redraw_threshold, threshold_figure, threshold_name
from replay_sim.explore.threshold_curves import (
    EVERY_SIZE,
    PUBLISHED_THRESHOLD,
    SIZES,
    ShownCurve,
    ThresholdCurves,
    costs_of,
    curve_key,
    step_histogram,
)
from replay_sim.measure.trim_curve import PAIRS, ThresholdCosts
from replay_sim.workload.profiles import profile_names

NO_BREAK = 2 * SIZES[-1]
"""A threshold above every graph: none breaks."""
THRESHOLD = "decoder_replay_trim_threshold"
CHOICES: dict[str, tuple[Any, ...]] = {
    "arm": tuple(PAIRS),
    "window": (64, 128, 256, 512, 1024),
    "num_reqs": (1, 2, 4, 8, 16, 32),
    "num_local_experts": (8, 16, 24, 48, 96),
    "lengths": (EVERY_SIZE, *profile_names()),
    THRESHOLD: (*SIZES, NO_BREAK),
}
USUAL: dict[str, Any] = {
    "arm": "piecewise_replay_graphs",
    "window": 128,
    "num_reqs": 1,
    "num_local_experts": 48,
    "lengths": EVERY_SIZE,
    THRESHOLD: PUBLISHED_THRESHOLD,
}
PRESETS: dict[str, dict[str, Any]] = {
    "one prompt a step": USUAL,
    "conversations": {**USUAL, "lengths": "conversation"},
    "16 prompts a step": {**USUAL, "num_reqs": 16},
    "16 prompts, a threshold that fits": {**USUAL, "num_reqs": 16, THRESHOLD: 3072},
    "eager, few experts": {**USUAL, "arm": "eager_replay", "num_local_experts": 8},
    "window 1,024": {**USUAL, "window": 1024, THRESHOLD: 1280},
    "no break": {**USUAL, THRESHOLD: NO_BREAK},
}
"""Values of all controls, by name."""
LABELS = {
    "arm": "arm with the break",
    "window": "window (rows)",
    "num_reqs": "num_reqs (requests a step)",
    "num_local_experts": "experts of the rank",
    "lengths": "prompt lengths",
    THRESHOLD: f"{THRESHOLD} (tokens)",
}


class ThresholdExplorer(Explorer):
    """Menus and sliders; `shown`, `costs` and the figure are those of the last values that could be used."""

    shown: ShownCurve
    costs: ThresholdCosts

    def __init__(self, curves: ThresholdCurves, **values: Any) -> None:
        """Start with `values`; raises ValueError, with the sentence, for one that cannot be used."""
        for name, value in values.items():
            if self.refusal(name, value):
                raise ValueError(self.refusal(name, value))
        super().__init__({name: _control(name, value) for name, value in (USUAL | values).items()})
        self.curves = curves
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = live_figure(self._draw())
        self.widget = widgets.VBox(
            [
                self.preset_row(PRESETS, self.use_preset),
                self.grid("410px"),
                self.reset_button(),
                self._refusal,
                self._sentence,
                self.figure,
            ]
        )
        self.listen()

    @property
    def sentence(self) -> str:
        """Where the break begins to pay, what the threshold costs, and what both come from."""
        state, costs = self.state, self.costs
        threshold = state[THRESHOLD]
        start = f"{state['arm']}, {self.shown.kind.value}: the break {self.shown.verdict}."
        if not self.shown.curve.key.in_graphs:
            return f"{start} No threshold concerns an eager step: it trims whenever a prefill exceeds the window."
        return (
            f"{start} On these steps threshold {threshold_name(threshold)} costs {costs.of(threshold) / 1e3:.2f} ms "
            f"a step, {costs.regret(threshold):.1%} more than the best, {threshold_name(costs.best)}; "
            f"{PUBLISHED_THRESHOLD} costs {costs.regret(PUBLISHED_THRESHOLD):.1%} more."
        )

    def use_preset(self, name: str) -> None:
        """Set all controls to those of a preset; a name that there is not is refused in `message`."""
        if name not in PRESETS:
            self.say(f"preset: {name!r} is not allowed; it must be one of {', '.join(PRESETS)}")
            return
        self.set(**PRESETS[name])

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
        self._refresh()
        if not self.message:
            redraw_threshold(self.figure, self._draw())

    def _refresh(self) -> None:
        """Find the curve and the costs of the controls' values, or say why there are none (P5)."""
        state = self.state
        window, reqs = state["window"], state["num_reqs"]
        if state[THRESHOLD] <= window:
            self.say(f"{THRESHOLD}: {state[THRESHOLD]} is not allowed; it must exceed the window, {window}")
            return
        key = curve_key(state["arm"], window=window, num_reqs=reqs, num_local_experts=state["num_local_experts"])
        shown = self.curves.shown(key)
        if isinstance(shown, str):
            self.say(f"no curve: {shown}")
            return
        try:
            costs = costs_of(shown, step_histogram(state["lengths"], reqs, window))
        except ValueError as error:
            self.say(str(error))
            return
        self.say("")
        self.shown, self.costs = shown, costs
        self.say_sentence()

    def _draw(self) -> go.Figure:
        state = self.state
        lengths = state["lengths"]
        steps = lengths if lengths == EVERY_SIZE else f"the prompt lengths of profile {lengths}"
        source = f"{self.shown.source}. Steps of the lowest panel: {steps}"
        return threshold_figure(self.shown, state[THRESHOLD], self.costs, source)


def _control(name: str, value: Any) -> widgets.Dropdown | widgets.SelectionSlider:
    """A menu for words, a slider over its values for a number."""
    style, layout = {"description_width": "270px"}, widgets.Layout(width="450px")
    if isinstance(value, str):
        shown = [
            (f"{choice} ({ARM_LOOKS[choice].label})" if name == "arm" else choice, choice) for choice in CHOICES[name]
        ]
        return widgets.Dropdown(options=shown, value=value, description=LABELS[name], style=style, layout=layout)
    options = [("none breaks" if choice == NO_BREAK else f"{choice:,}", choice) for choice in CHOICES[name]]
    return widgets.SelectionSlider(options=options, value=value, description=LABELS[name], style=style, layout=layout)
