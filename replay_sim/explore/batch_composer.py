"""The batch composer: add and remove requests of any kind; kept rows, gather map, metadata and dispatch follow live."""

from __future__ import annotations

from typing import Any

import attrs
import ipywidgets as widgets

from replay_sim.batch.request import Batch
from replay_sim.config import ServingConfig
from replay_sim.config.serving import CUDAGRAPH_MODES
from replay_sim.explore.explorer import Explorer, html_table, live_figure
from replay_sim.explore.figures_composer import composer_figure, redraw
from replay_sim.explore.kept_rows import KeptRows
from replay_sim.explore.request_list import RequestFields, RequestList, fields_refusal, make_request
from replay_sim.explore.tour import TOUR_CONFIG
from replay_sim.explore.tour_explorer import record_sentence

SOURCE = "computed by replay_sim from the controls' values; counted, not timed"
MODES = tuple(mode for mode in CUDAGRAPH_MODES if mode != "FULL")
"""The engine's modes but the one that captures prefills in full, which no plan of decoder replay uses."""
SLIDERS = {"window": ("window (rows)", 1, 24), "decoder_replay_trim_threshold": ("trim threshold (tokens)", 2, 65)}


def prefill(query_len: int, computed: int = 0, *, window_start: int = 0, all_rows_read: bool = False) -> RequestFields:
    """The fields of a prefill."""
    return _fields("prefill", query_len, computed, window_start, all_rows_read)


def decode(query_len: int, computed: int, *, window_start: int = 0) -> RequestFields:
    """The fields of a decode of `query_len` tokens, the speculative ones included."""
    return _fields("decode", query_len, computed, window_start, False)


def _fields(phase: str, query_len: int, computed: int, window_start: int, all_rows_read: bool) -> RequestFields:
    return {
        "phase": phase,
        "query_len": query_len,
        "computed": computed,
        "all_rows_read": all_rows_read,
        "window_start": window_start,
    }


USUAL = {"window": 8, "decoder_replay_trim_threshold": 16, "cudagraph_mode": "FULL_AND_PIECEWISE"}
PRESETS: dict[str, dict[str, Any]] = {
    "one of each": {**USUAL, "requests": (prefill(23), prefill(14, 10), prefill(5), decode(1, 12))},
    "decodes": {**USUAL, "requests": tuple(decode(1, 9 + 7 * index) for index in range(4))},
    "phase, not length": {**USUAL, "requests": (prefill(12, 30), decode(12, 30))},
    "all rows read": {**USUAL, "requests": (prefill(20, all_rows_read=True), prefill(20))},
    "chunks": {**USUAL, "requests": (prefill(12, 24, window_start=16), prefill(4, 32, window_start=24), prefill(30))},
    "nothing trims": {**USUAL, "requests": (prefill(5), prefill(8), prefill(1))},
    "eager": {**USUAL, "requests": (prefill(23), prefill(14, 10)), "cudagraph_mode": "NONE"},
    "no request": {**USUAL, "requests": ()},
}
"""Values of all controls, by name: the kinds of batch that a step meets."""


def preset_batches() -> dict[str, Batch]:
    """The batch of each preset."""
    return {
        name: Batch(make_request(fields, index) for index, fields in enumerate(values["requests"]))
        for name, values in PRESETS.items()
    }


class BatchComposer(Explorer):
    """Requests, window, threshold and mode; `kept` and the figure are those of the last values that could be used."""

    def __init__(self, config: ServingConfig = TOUR_CONFIG, preset: str = "one of each") -> None:
        """Start with the values of a preset; raises ValueError, with the sentence, for what cannot be used."""
        if preset not in PRESETS:
            raise ValueError(f"preset: {preset!r} is not allowed; it must be one of {', '.join(PRESETS)}")
        super().__init__(_controls(PRESETS[preset], config.max_num_seqs))
        self.config = config
        self._requests_table, self._rows_table = widgets.HTML(), widgets.HTML()
        self.kept: KeptRows
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = live_figure(composer_figure(self.kept, SOURCE))
        self._say_tables()
        self.widget = self._assemble()
        self.listen()

    @property
    def batch(self) -> Batch:
        """The batch of the list's values; ValueError names the request and the field that cannot be."""
        refused = fields_refusal(self.state["requests"], self.config.max_num_seqs)
        if refused:
            raise ValueError(refused)
        return Batch(make_request(fields, index) for index, fields in enumerate(self.state["requests"]))

    @property
    def sentence(self) -> str:
        """How the step would be dispatched, and why."""
        return record_sentence(self.kept.record)

    def use_preset(self, name: str) -> None:
        """Set all controls to those of a preset; a name that there is not is refused in `message`."""
        if name not in PRESETS:
            self.say(f"preset: {name!r} is not allowed; it must be one of {', '.join(PRESETS)}")
            return
        self.set(**PRESETS[name])

    def add(self, fields: RequestFields) -> None:
        """Add a request at the end of the batch, such as `prefill(30)`; refused in `message` where it cannot be."""
        self.set(requests=(*self.state["requests"], fields))

    def remove(self, index: int) -> None:
        """Remove the request at `index`, counted from 0; one that there is not is refused in `message`."""
        requests = self.state["requests"]
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(requests):
            self.say(f"request {index!r} cannot be removed: the batch has requests 0 to {len(requests) - 1}")
            return
        self.set(requests=(*requests[:index], *requests[index + 1 :]))

    def refusal(self, name: str, value: object) -> str:
        """Why a control cannot take the value, in a sentence; empty if it can."""
        if name == "requests":
            return fields_refusal(value, self.config.max_num_seqs)
        if name == "cudagraph_mode":
            return "" if value in MODES else f"{name}: {value!r} is not allowed; it must be one of {', '.join(MODES)}"
        if name not in SLIDERS:
            return f"{name} is no control; the controls are {', '.join(self.controls)}"
        _, least, most = SLIDERS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return f"{name}: {value!r} is not allowed; it must be an integer from {least} to {most}"
        return ""

    def _refresh(self) -> None:
        """Plan and dispatch the controls' values, or say why they cannot be used."""
        changes = {name: self.state[name] for name in (*SLIDERS, "cudagraph_mode")}
        try:
            self.kept = KeptRows(self.batch, attrs.evolve(self.config, **changes))
        except ValueError as error:
            self.say(str(error))
            return
        self.say("")
        self.say_sentence()

    def show(self) -> None:
        """Draw what the controls say; what cannot be used leaves the picture as it was."""
        self._refresh()
        if self.message:
            return
        self._say_tables()
        redraw(self.figure, self.kept)

    def _say_tables(self) -> None:
        self._requests_table.value = html_table(self.kept.by_request())
        self._rows_table.value = html_table(self.kept.by_row())

    def _assemble(self) -> widgets.VBox:
        others = [control for name, control in self.controls.items() if name != "requests"]
        tables = widgets.Accordion(
            [self._requests_table, _scrolling(self._rows_table)],
            titles=("Metadata by request", "Metadata of the replay batch, row by row"),
        )
        return widgets.VBox(
            [
                self.preset_row(PRESETS, self.use_preset),
                self.controls["requests"],
                widgets.HBox(others, layout=widgets.Layout(flex_flow="row wrap")),
                self.reset_button(),
                self._refusal,
                self._sentence,
                self.figure,
                tables,
            ]
        )


def _controls(values: dict[str, Any], most_requests: int) -> dict[str, Any]:
    style, layout = {"description_width": "150px"}, widgets.Layout(width="370px")
    sliders = {
        name: widgets.IntSlider(values[name], min=least, max=most, description=label, style=style, layout=layout)
        for name, (label, least, most) in SLIDERS.items()
    }
    mode = widgets.Dropdown(
        options=MODES, value=values["cudagraph_mode"], description="cudagraph_mode", style=style, layout=layout
    )
    return {"requests": RequestList(values["requests"], most_requests), **sliders, "cudagraph_mode": mode}


def _scrolling(table: widgets.HTML) -> widgets.Box:
    return widgets.Box([table], layout=widgets.Layout(max_height="320px", overflow="auto"))
