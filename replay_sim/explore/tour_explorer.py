"""The explorer of one step: controls for requests, window and threshold; what is kept and dispatched follows live."""

from __future__ import annotations

import html
from typing import Any

import attrs
import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.explore.figures_batch import batch_figure
from replay_sim.explore.tour import TOUR_CONFIG, StepTour
from replay_sim.plan import make_plan
from replay_sim.workload.simulation import planned_dispatch

SOURCE = "computed by replay_sim from the controls' values; counted, not timed"
CHUNK_COMPUTED, DECODE_COMPUTED = 10, 12


@attrs.frozen
class Control:
    """A slider: its label with the unit, the values that it allows, and the one that it starts with."""

    label: str
    least: int
    most: int
    start: int


CONTROLS = {
    "query_len_a": Control("prompt A (tokens)", 0, 40, 23),
    "query_len_b": Control(f"chunk B after {CHUNK_COMPUTED} (tokens)", 0, 40, 14),
    "query_len_c": Control("prompt C (tokens)", 0, 40, 5),
    "num_decodes": Control("decodes (requests)", 0, 5, 1),
    "window": Control("window (rows)", 1, 24, TOUR_CONFIG.window),
    "decoder_replay_trim_threshold": Control("trim threshold (tokens)", 2, 65, 16),
}


class TourExplorer:
    """Sliders, a sentence, and the batch's figure; `set` and `state` do from Python what hands do with the sliders.

    `record` and `figure` are those of the last values that could be used, `message` says what was refused, in a
    sentence, or is empty. `run` runs the step for real. `widget` is what a notebook shows.
    """

    def __init__(self, config: ServingConfig = TOUR_CONFIG) -> None:
        self.config = config
        self.message = ""
        self.sliders = {name: _slider(control) for name, control in CONTROLS.items()}
        self._sentence, self._refusal, self._result = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._is_setting = False
        self.record: StepRecord
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = go.FigureWidget(self._draw())
        self.figure.layout.autosize = True  # as wide as the cell
        self.widget = self._assemble()
        for slider in self.sliders.values():
            slider.observe(self._on_change, "value")

    @property
    def state(self) -> dict[str, int]:
        """The controls' values by name; `set(**state)` brings them back."""
        return {name: slider.value for name, slider in self.sliders.items()}

    @property
    def batch(self) -> Batch:
        """The batch of the controls' values; requests of no tokens are left out."""
        state = self.state
        requests = [
            Request(state["query_len_a"], 0, Phase.PREFILL, request_id="A"),
            Request(state["query_len_b"], CHUNK_COMPUTED, Phase.PREFILL, request_id="B"),
            Request(state["query_len_c"], 0, Phase.PREFILL, request_id="C"),
        ]
        decodes = (Request(1, DECODE_COMPUTED, Phase.DECODE, request_id=f"D{i}") for i in range(state["num_decodes"]))
        return Batch([request for request in (*requests, *decodes) if request.query_len])

    def set(self, **values: int) -> None:
        """Move controls; a value that a control does not have changes none of them and is refused in `message`."""
        refusal = next(filter(None, (_refusal(name, value) for name, value in values.items())), "")
        if refusal:
            self._say(refusal)
            return
        self._is_setting = True
        try:
            for name, value in values.items():
                self.sliders[name].value = value
        finally:
            self._is_setting = False
        self._on_change()

    def reset(self) -> None:
        """Put every control back to where it started."""
        self.set(**{name: control.start for name, control in CONTROLS.items()})

    def run(self) -> StepTour | None:
        """Capture and run the step of the controls' values; None if they were refused, as `message` says."""
        self._refresh()
        if not self.message and not self.batch.num_tokens:
            self._say("the batch has no tokens: there is nothing to run")
        if self.message:
            return None
        tour = StepTour(self.batch, self._config)
        tour.capture()
        tour.run()
        self._result.value = html.escape(
            f"Ran it on the {tour.backend.name} backend: {sum(tour.differing.values())} of {tour.compared:,} "
            "elements differ in any bit between graphs and eager."
        )
        return tour

    @property
    def _config(self) -> ServingConfig:
        state = self.state
        threshold = state["decoder_replay_trim_threshold"]
        return attrs.evolve(self.config, window=state["window"], decoder_replay_trim_threshold=threshold)

    def _refresh(self) -> None:
        """Plan and dispatch the controls' values, or say why they cannot be used."""
        self._result.value = ""
        try:
            plan = make_plan(self._config)
            tokens = self.batch.num_tokens
            if tokens > plan.max_num_batched_tokens:
                raise ValueError(
                    f"num_tokens: {tokens} is not allowed; a step takes at most max_num_batched_tokens "
                    f"{plan.max_num_batched_tokens}"
                )
        except ValueError as error:
            self._say(str(error))
            return
        self._say("")
        self.record = planned_dispatch(plan)(self.batch)
        self._sentence.value = html.escape(record_sentence(self.record))

    def _say(self, refusal: str) -> None:
        self.message = refusal
        self._refusal.value = f"<b>Refused.</b> {html.escape(refusal)}" if refusal else ""

    def _draw(self) -> go.Figure:
        return batch_figure(self.batch, self.state["window"], SOURCE)

    def _on_change(self, _: object = None) -> None:
        if self._is_setting:
            return
        self._refresh()
        if self.message:
            return
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update(x=new.x, y=new.y, base=new.base)
            self.figure.layout.title.text = drawn.layout.title.text
            self.figure.layout.height = drawn.layout.height

    def _assemble(self) -> widgets.VBox:
        reset = widgets.Button(description="Reset", tooltip="Put every control back to where it started")
        reset.on_click(lambda _: self.reset())
        run = widgets.Button(description="Run this step", tooltip="Capture the graphs, run, compare with eager")
        run.on_click(lambda _: self.run())
        grid = widgets.GridBox(
            list(self.sliders.values()), layout=widgets.Layout(grid_template_columns="repeat(auto-fit, 380px)")
        )
        buttons = widgets.HBox([reset, run])
        return widgets.VBox([grid, buttons, self._refusal, self._sentence, self._result, self.figure])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live widget, and beside it the figure as it is now, which a saved notebook shows without a kernel."""
        still = go.Figure(self.figure).to_plotly_json()
        for trace in still["data"]:
            del trace["uid"]  # drawn anew for every live figure
        live: dict[str, Any] = self.widget._repr_mimebundle_(**kwargs)
        sentence = f"{record_sentence(self.record)} (The controls appear when this cell is run.)"
        return {**live, "application/vnd.plotly.v1+json": still, "text/plain": sentence}


def record_sentence(record: StepRecord) -> str:
    """What a step's record says, in a sentence or two (D4)."""
    mode = {
        CudagraphMode.FULL: f"in a FULL graph of {record.padded_tokens}",
        CudagraphMode.PIECEWISE: f"in a PIECEWISE graph of {record.padded_tokens}",
        CudagraphMode.NONE: "eagerly",
    }[record.mode]
    model = f"{record.num_tokens} tokens of {record.num_reqs} requests run {mode}: {record.model_reason.value}."
    if not record.has_replay_batch:
        return f"{model} No replay batch: {record.reason.value}."
    ran = f"in a replay graph of {record.padded_rows}" if record.replay_mode is CudagraphMode.PIECEWISE else "eagerly"
    return f"{model} The replay batch has {record.replay_rows} rows and runs {ran}: {record.reason.value}."


def _slider(control: Control) -> widgets.IntSlider:
    return widgets.IntSlider(
        value=control.start,
        min=control.least,
        max=control.most,
        description=control.label,
        style={"description_width": "170px"},
        layout=widgets.Layout(width="370px"),
    )


def _refusal(name: str, value: object) -> str:
    """Why a control cannot take the value, in a sentence; empty if it can."""
    control = CONTROLS.get(name)
    if control is None:
        return f"{name} is no control; the controls are {', '.join(CONTROLS)}"
    if isinstance(value, bool) or not isinstance(value, int) or not control.least <= value <= control.most:
        return f"{name}: {value!r} is not allowed; it must be an integer from {control.least} to {control.most}"
    return ""
