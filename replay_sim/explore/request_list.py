"""A control that lists a step's requests: rows of fields to add, change and remove; Python sets and reads its value."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import traitlets

from replay_sim.batch.request import Phase, Request

RequestFields = dict[str, Any]
START: RequestFields = {"phase": "prefill", "query_len": 12, "computed": 0, "all_rows_read": False, "window_start": 0}
MOST_TOKENS = 999
FIELD_WIDTHS = {
    "phase": "96px",
    "query_len": "96px",
    "computed": "96px",
    "all_rows_read": "96px",
    "window_start": "96px",
}
HEADERS = {
    "phase": "phase",
    "query_len": "query_len<br>(tokens)",
    "computed": "computed<br>(tokens)",
    "all_rows_read": "all rows<br>read",
    "window_start": "window_start<br>(position)",
}


def request_name(index: int) -> str:
    """The id of the request at `index`: A, B, C and so on."""
    return chr(ord("A") + index)


def make_request(fields: RequestFields, index: int) -> Request:
    """The request that the fields describe; ValueError names a field that cannot be."""
    return Request(**{**fields, "phase": Phase(fields["phase"])}, request_id=request_name(index))


def fields_refusal(value: object, most_requests: int) -> str:
    """Why a value cannot be a list of requests, in a sentence; empty if it can."""
    if not isinstance(value, list | tuple) or not all(isinstance(fields, dict) for fields in value):
        return f"requests: {value!r} is not allowed; it must be a list of dicts with the keys {', '.join(START)}"
    if len(value) > most_requests:
        return f"requests: {len(value)} are not allowed; at most max_num_seqs {most_requests} are"
    for index, fields in enumerate(value):
        if set(fields) != set(START):
            return f"request {request_name(index)}: the keys must be {', '.join(START)}; they are {', '.join(fields)}"
        if fields["phase"] not in [phase.value for phase in Phase]:
            return f"request {request_name(index)}: phase {fields['phase']!r} is not allowed; prefill or decode is"
        if not isinstance(fields["all_rows_read"], bool):
            return f"request {request_name(index)}: all_rows_read must be True or False"
        try:
            request = make_request(fields, index)
        except ValueError as error:
            return f"request {request_name(index)}: {error}"
        if request.seq_len > MOST_TOKENS:
            return f"request {request_name(index)}: seq_len {request.seq_len} is not allowed; at most {MOST_TOKENS} is"
    return ""


class RequestList(widgets.VBox):
    """At most `most_requests` requests, a row of fields each; `value` is a tuple of dicts with the keys of START.

    A field changed by hand changes `value`; a `value` that is set changes the fields. It takes any numbers that the
    fields can hold: whether they make a batch is for its explorer to say.
    """

    value = traitlets.Tuple()

    def __init__(self, value: tuple[RequestFields, ...], most_requests: int) -> None:
        self._rows = [_Row(self, index) for index in range(most_requests)]
        self._add = widgets.Button(description="Add a request", icon="plus", tooltip="Add a prefill of 12 tokens")
        self._add.on_click(lambda _: self.add())
        self._header = widgets.HBox(
            [_cell(""), *(_cell(HEADERS[name], width) for name, width in FIELD_WIDTHS.items())],
        )
        self._is_filling = False
        super().__init__(value=())
        self.value = tuple(value)
        self._fill()

    def add(self, **fields: Any) -> None:
        """Add a request like START but for `fields`; nothing if the list is full."""
        if len(self.value) < len(self._rows):
            self.value = (*self.value, START | fields)

    def remove(self, index: int) -> None:
        """Remove the request at `index`; those after it move up."""
        self.value = (*self.value[:index], *self.value[index + 1 :])

    @traitlets.validate("value")
    def _copied(self, proposal: Any) -> tuple[RequestFields, ...]:
        return tuple(dict(fields) for fields in proposal["value"])

    @traitlets.observe("value")
    def _fill(self, _: object = None) -> None:
        """Show the value in the fields."""
        self._is_filling = True
        try:
            for row, fields in zip(self._rows, self.value, strict=False):
                row.show(fields)
        finally:
            self._is_filling = False
        self.children = [self._header, *(row.box for row in self._rows[: len(self.value)]), self._add]
        self._add.disabled = len(self.value) == len(self._rows)

    def field_changed(self) -> None:
        """Take the fields' values, unless it is the value that changes them."""
        if not self._is_filling:
            self.value = tuple(row.fields for row in self._rows[: len(self.value)])


class _Row:
    """The fields of one request, with a button that removes it."""

    def __init__(self, owner: RequestList, index: int) -> None:
        layouts = {name: widgets.Layout(width=width) for name, width in FIELD_WIDTHS.items()}
        numbers = {
            name: widgets.BoundedIntText(START[name], min=0, max=MOST_TOKENS, layout=layouts[name])
            for name in ("query_len", "computed", "window_start")
        }
        self.controls: dict[str, Any] = {
            "phase": widgets.Dropdown(options=[phase.value for phase in Phase], layout=layouts["phase"]),
            "all_rows_read": widgets.Checkbox(indent=False, layout=layouts["all_rows_read"]),
            **numbers,
        }
        for control in self.controls.values():
            control.observe(lambda _: owner.field_changed(), "value")
        name = request_name(index)
        remove = widgets.Button(icon="times", tooltip=f"Remove request {name}", layout=widgets.Layout(width="36px"))
        remove.on_click(lambda _: owner.remove(index))
        self.box = widgets.HBox([_cell(f"<b>{name}</b>"), *(self.controls[field] for field in FIELD_WIDTHS), remove])

    @property
    def fields(self) -> RequestFields:
        return {name: self.controls[name].value for name in START}

    def show(self, fields: RequestFields) -> None:
        for name, value in fields.items():
            self.controls[name].value = value


def _cell(words: str, width: str = "24px") -> widgets.HTML:
    return widgets.HTML(words, layout=widgets.Layout(width=width, margin="2px"))
