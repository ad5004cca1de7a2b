"""The explorer of one step: controls for requests, window and threshold; what is kept and dispatched follows live."""

from __future__ import annotations

import html

import attrs
import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.explore.explorer import Explorer, live_figure
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


class TourExplorer(Explorer):
    """Sliders for requests, window and threshold; the batch's figure follows, and a sentence with its dispatch.

    `record` and `figure` are those of the last values that could be used. `run` runs the step for real.
    """

    def __init__(self, config: ServingConfig = TOUR_CONFIG) -> None:
        super().__init__({name: _slider(control) for name, control in CONTROLS.items()})
        self.config = config
        self._result = widgets.HTML()
        self.record: StepRecord
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = live_figure(self._draw())
        self.widget = self._assemble()
        self.listen()

    @property
    def sentence(self) -> str:
        """How the batch would be dispatched."""
        return record_sentence(self.record)

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

    def refusal(self, name: str, value: object) -> str:
        """Why a slider cannot take the value, in a sentence; empty if it can."""
        control = CONTROLS.get(name)
        if control is None:
            return f"{name} is no control; the controls are {', '.join(CONTROLS)}"
        if isinstance(value, bool) or not isinstance(value, int) or not control.least <= value <= control.most:
            return f"{name}: {value!r} is not allowed; it must be an integer from {control.least} to {control.most}"
        return ""

    def run(self) -> StepTour | None:
        """Capture and run the step of the controls' values; None if they were refused, as `message` says."""
        self._refresh()
        if not self.message and not self.batch.num_tokens:
            self.say("the batch has no tokens: there is nothing to run")
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
            self.say(str(error))
            return
        self.say("")
        self.record = planned_dispatch(plan)(self.batch)
        self.say_sentence()

    def _draw(self) -> go.Figure:
        return batch_figure(self.batch, self.state["window"], SOURCE)

    def show(self) -> None:
        """Plan, dispatch and draw the controls' values; what cannot be used leaves the picture as it was."""
        self._refresh()
        if self.message:
            return
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update(x=new.x, y=new.y, base=new.base)
            self.figure.layout.title.update(drawn.layout.title)
            self.figure.layout.height = drawn.layout.height

    def _assemble(self) -> widgets.VBox:
        run = widgets.Button(description="Run this step", tooltip="Capture the graphs, run, compare with eager")
        run.on_click(lambda _: self.run())
        buttons = widgets.HBox([self.reset_button(), run])
        return widgets.VBox([self.grid("380px"), buttons, self._refusal, self._sentence, self._result, self.figure])


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
