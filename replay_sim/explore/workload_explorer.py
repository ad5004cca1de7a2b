"""The explorer of tuned workloads: fewer graphs, or sizes of one's own, and what they do to expected step time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.config import FLASH_RANK, ServingConfig
from replay_sim.explore.explorer import Explorer, live_figure
from replay_sim.explore.figures_tuning import plans_on_steps_figure
from replay_sim.explore.tuning_limits import MIB, CaptureSeconds, measured_capture_seconds
from replay_sim.explore.tuning_plans import config_with
from replay_sim.explore.tuning_score import PlanScore, score
from replay_sim.explore.workload_steps import TunedWorkload
from replay_sim.plan import CapturePlan, make_plan, plan_cost

HALVES = ("tuned on", "unseen")
SIZES = "decoder_replay_cudagraph_capture_sizes"
LABEL, WIDTH = "250px", "450px"


class WorkloadExplorer(Explorer):
    """A workload, the most graphs of each kind, replay sizes of one's own, and the half of the steps to judge on.

    Without sizes of one's own the plan is the best of so many graphs, from the trade-off that tuning made; with them
    it keeps the model sizes and threshold of that. A workload moves both counts to the tuned ones. `plan`, `score` and
    `figure` are those of the last values that could be used.
    """

    def __init__(self, workloads: Mapping[str, TunedWorkload]) -> None:
        """Start with the first workload; ValueError if there is none, or none of its steps leaves a choice."""
        self.workloads = {name: workload for name, workload in workloads.items() if workload.tuning.grid}
        if not self.workloads:
            raise ValueError(f"workloads: {list(workloads)} is not allowed; one must leave a choice of sizes")
        first = next(iter(self.workloads))
        start = self._filled(first)
        super().__init__(
            {
                "workload": _menu("workload", tuple(self.workloads), first),
                "max_graphs": _slider("at most (replay graphs)", self._most(0), start["max_graphs"]),
                "max_model_graphs": _slider("at most (PIECEWISE graphs)", self._most(1), start["max_model_graphs"]),
                SIZES: _text("replay sizes of your own (rows)"),
                "judged_on": _menu("judged on the steps", HALVES, HALVES[1]),
            }
        )
        self.plan: CapturePlan
        self.score: PlanScore
        self._capture: CaptureSeconds = measured_capture_seconds()
        self._references: dict[str, PlanScore] = {}
        self._refresh()
        self.figure = live_figure(self._draw())
        self.widget = widgets.VBox(
            [self.grid("400px"), self.reset_button(), self._refusal, self._sentence, self.figure]
        )
        self.listen()

    @property
    def sentence(self) -> str:
        """Step time against default and own plan, graphs, sizes and what the plan costs at start-up."""
        ms, plan = self.score.expected_step_ms, self.plan
        less = {name: 1 - ms / self._references[name].expected_step_ms for name in ("own", "default")}
        sizes = " ".join(map(str, plan.replay_sizes)) or "none"
        buffers = plan_cost(plan, FLASH_RANK).static_buffer_bytes / MIB
        return (
            f"{ms:.3f} ms a step, {less['own']:.2%} less than the config's own and {less['default']:.2%} less than "
            f"the default; {len(plan.model_sizes)} PIECEWISE and {len(plan.replay_sizes)} replay graphs, sizes "
            f"{sizes}, trim threshold {plan.trim_threshold}; {buffers:,.0f} MiB of input buffers, about "
            f"{self._capture.of(plan):.0f} s to capture."
        )

    def set(self, **values: Any) -> None:
        """Move controls, as every explorer does; a workload moves both counts first."""
        workload = values.get("workload")
        if "workload" in values and not self.refusal("workload", workload):
            values = {"workload": workload} | self._filled(str(workload)) | values
        super().set(**values)

    def refusal(self, name: str, value: object) -> str:
        """Why a control cannot take the value, in a sentence; empty if it can."""
        control = self.controls.get(name)
        if control is None:
            return f"{name} is no control; the controls are {', '.join(self.controls)}"
        if name == SIZES:
            return _refused_sizes(value)
        if name in ("workload", "judged_on"):
            allowed = ", ".join(control.options)
            return "" if value in control.options else f"{name}: {value!r} is not allowed; it must be one of {allowed}"
        if isinstance(value, bool) or not isinstance(value, int) or not control.min <= value <= control.max:
            return f"{name}: {value!r} is not allowed; it must be an integer from {control.min} to {control.max}"
        return ""

    def show(self) -> None:
        """Score and draw the plan of the controls' values; what cannot be used leaves the picture as it was."""
        self._refresh()
        if self.message:
            return
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update({key: new[key] for key in ("x", "y", "customdata", "text") if new[key] is not None})
            self.figure.layout.title.text, self.figure.layout.margin = drawn.layout.title.text, drawn.layout.margin
            self.figure.layout.annotations = drawn.layout.annotations
            for axis in ("xaxis", "xaxis2", "yaxis", "yaxis2"):
                self.figure.layout[axis].range = drawn.layout[axis].range

    def _on_change(self, change: Any = None) -> None:
        """A workload chosen by hand moves the counts; all else is shown as it is."""
        by_hand = change is not None and not self._is_setting
        if by_hand and change["owner"] is self.controls["workload"]:
            self.set(workload=change["new"])
        else:
            super()._on_change(change)

    def _filled(self, workload: str) -> dict[str, Any]:
        """The counts that tuning chose for a workload."""
        plan = self.workloads[workload].tuning.tuned.plan
        return {"max_graphs": len(plan.replay_sizes), "max_model_graphs": len(plan.model_sizes)}

    def _most(self, kind: int) -> int:
        """The most replay graphs (0) or PIECEWISE graphs (1) that any workload's trade-off has."""
        points = [point for one in self.workloads.values() for row in one.tuning.grid for point in row]
        return max(len((point.replay_sizes, point.model_sizes)[kind]) for point in points)

    def _refresh(self) -> None:
        """Plan and score the controls' values, or say why they cannot be used."""
        state = self.state
        workload = self.workloads[state["workload"]]
        try:
            refusal = _refused_sizes(state[SIZES]) or self._refused_counts(workload)
            if refusal:
                raise ValueError(refusal)
            plan = make_plan(self._config(workload))
        except ValueError as error:
            self.say(str(error))
            return
        self.say("")
        half = workload.seen if state["judged_on"] == HALVES[0] else workload.unseen
        self.plan, self.score = plan, score(plan, half, workload.costs)
        judged = {one.name: one.seen if half is workload.seen else one.unseen for one in workload.tuning.plans}
        self._references = {name: found for name, found in judged.items() if found is not None}
        self.say_sentence()

    def _refused_counts(self, workload: TunedWorkload) -> str:
        least = min(len(row[0].model_sizes) for row in workload.tuning.grid)
        most = self.state["max_model_graphs"]
        if most >= least:
            return ""
        return f"max_model_graphs: {most} is not allowed; FULL graphs and threshold need at least {least} here"

    def _config(self, workload: TunedWorkload) -> ServingConfig:
        """The config of the best choice within the counts, with sizes of one's own if there are any."""
        state = self.state
        allowed = [
            point
            for row in workload.tuning.grid
            for point in row
            if len(point.replay_sizes) <= state["max_graphs"] and len(point.model_sizes) <= state["max_model_graphs"]
        ]
        best = min(allowed, key=lambda point: point.expected_us)
        own = _parsed(state[SIZES])
        return config_with(workload.config, best if own is None else attrs.evolve(best, replay_sizes=own))

    def _draw(self) -> go.Figure:
        state = self.state
        workload = self.workloads[state["workload"]]
        half = workload.seen if state["judged_on"] == HALVES[0] else workload.unseen
        scores = {name: self._references[name] for name in ("default", "own")} | {"tuned": self.score}
        source = f"{workload.source}; step times are {self.score.source}"
        return plans_on_steps_figure(half, self.plan, scores, source)


def _parsed(text: str) -> tuple[int, ...] | None:
    """The sizes of a list in which commas or spaces stand between integers, ascending; None if there are none."""
    return tuple(sorted({int(word) for word in text.replace(",", " ").split()})) or None


def _refused_sizes(value: object) -> str:
    """Why a text is no list of sizes, in a sentence; empty if it is one."""
    words = value.replace(",", " ").split() if isinstance(value, str) else ["no text"]
    wrong = next((word for word in words if not (word.isascii() and word.isdigit() and 0 < int(word) < 10**7)), None)
    if wrong is None:
        return ""
    return f"{SIZES}: {wrong!r} is not allowed; it must be positive integers with commas or spaces between, or nothing"


def _slider(label: str, most: int, start: int) -> widgets.IntSlider:
    style, layout = {"description_width": LABEL}, widgets.Layout(width=WIDTH)
    return widgets.IntSlider(value=start, min=0, max=most, description=label, style=style, layout=layout)


def _menu(label: str, options: tuple[str, ...], start: str) -> widgets.Dropdown:
    style, layout = {"description_width": LABEL}, widgets.Layout(width=WIDTH)
    return widgets.Dropdown(options=options, value=start, description=label, style=style, layout=layout)


def _text(label: str) -> widgets.Text:
    style, layout = {"description_width": LABEL}, widgets.Layout(width=WIDTH)
    hint = "none: the best of so many graphs"
    return widgets.Text(
        value="", description=label, placeholder=hint, continuous_update=False, style=style, layout=layout
    )
