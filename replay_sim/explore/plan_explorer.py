"""The explorer of plans: settings and a list of sizes; default, explicit and optimal plan follow beside each other."""

from __future__ import annotations

import html
from typing import Any

import attrs
import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.config import ServingConfig, load_config, preset_names
from replay_sim.explore.explorer import Explorer, html_table, live_figure
from replay_sim.explore.figures_sizes import plans_figure
from replay_sim.explore.plan_comparison import (
    COST,
    MIB,
    JudgedPlan,
    RowWeights,
    compared_plans,
    default_plan,
    judged,
    judged_table,
    reachable_weights,
    workload_weights,
)
from replay_sim.workload.profiles import profile_names

REACHABLE = "all reachable"
ROWS = (REACHABLE, *profile_names())
WORKLOAD_STEPS = 200
"""So few that a moved slider shows at once also with a workload; the notebook counts more."""

DRAWN = {
    "scatter": ("x", "y", "customdata", "hovertemplate", "showlegend"),
    "bar": ("x", "y", "width", "customdata"),
}
"""What changes in a trace when a control moves."""

LABEL, WIDTH = "250px", "450px"
SIZES = "decoder_replay_cudagraph_capture_sizes"


@attrs.frozen
class Range:
    """A slider: its label with the unit, and the values that it allows unless a config asks for more."""

    label: str
    least: int
    most: int
    step: int = 1


RANGES = {
    "window": Range("window (rows)", 16, 1024, 16),
    "max_num_seqs": Range("max_num_seqs (requests)", 1, 512),
    "max_num_batched_tokens": Range("max_num_batched_tokens (tokens)", 256, 16384, 64),
    "max_cudagraph_capture_size": Range("max_cudagraph_capture_size (tokens)", 2, 16384, 2),
    "num_speculative_tokens": Range("num_speculative_tokens", 0, 15),
    "max_graphs": Range("optimal: at most (graphs)", 1, 64),
}


class PlanExplorer(Explorer):
    """Sliders for the settings that decide the sizes, a list of explicit sizes, and the rows that plans are judged on.

    A preset fills all other controls. What they leave open, such as mode and trim threshold, stays the preset's; its
    model sizes end at the maximum, which is always one of them. `judgements` and `figure` are those of the last values
    that could be used.
    """

    def __init__(self, config: ServingConfig | None = None, name: str = "default") -> None:
        """Start with `config` as the preset `name`, or with the bundled preset of that name.

        Raises ValueError for an unknown name or a config that cannot be planned.
        """
        bundled = {preset: load_config(preset) for preset in preset_names()}
        self.presets = bundled if config is None else {name: config} | bundled | {name: config}
        if name not in self.presets:
            raise ValueError(f"preset: {name!r} is not allowed; it must be one of {', '.join(self.presets)}")
        start = self._filled(name)
        super().__init__(
            {
                "preset": _menu("preset", tuple(self.presets), name),
                **{key: _slider(range_, start[key]) for key, range_ in RANGES.items()},
                SIZES: _text("explicit sizes (rows)", start[SIZES]),
                "rows": _menu("rows judged on", ROWS, REACHABLE),
            }
        )
        self.judgements: dict[str, JudgedPlan] = {}
        self.weights: RowWeights
        self._table = widgets.HTML()
        self._refresh()
        if self.message:
            raise ValueError(self.message)
        self.figure = live_figure(self._draw())
        self.widget = widgets.VBox(
            [self.grid("400px"), self.reset_button(), self._refusal, self._sentence, self._table, self.figure]
        )
        self.listen()

    @property
    def sentence(self) -> str:
        """Replay graphs, padding and static-buffer bytes of every plan (P7)."""
        return "; ".join(f"{name}: {_described(judgement)}" for name, judgement in self.judgements.items()) + "."

    @property
    def notes(self) -> list[str]:
        """What the plans say aloud, a sentence each with the plan's name; unreachable sizes among it (P6)."""
        return [f"{name}: {note}" for name, judgement in self.judgements.items() for note in judgement.plan.notes]

    @property
    def config(self) -> ServingConfig:
        """The serving config of the controls' values; raises ValueError if they contradict each other."""
        state = self.state
        base = self.presets[state["preset"]]
        maximum = state["max_cudagraph_capture_size"]
        explicit = base.cudagraph_capture_sizes
        return attrs.evolve(
            base,
            window=state["window"],
            max_num_seqs=state["max_num_seqs"],
            max_num_batched_tokens=state["max_num_batched_tokens"],
            max_cudagraph_capture_size=maximum,
            num_speculative_tokens=state["num_speculative_tokens"],
            cudagraph_capture_sizes=explicit and (*(size for size in explicit if size < maximum), maximum),
            decoder_replay_cudagraph_capture_sizes=_parsed(state[SIZES]),
        )

    def set(self, **values: Any) -> None:
        """Move controls, as every explorer does; a preset fills all others first, but for the rows."""
        preset = values.get("preset")
        if "preset" in values and not self.refusal("preset", preset):
            values = {"preset": preset} | self._filled(str(preset)) | values
        super().set(**values)

    def refusal(self, name: str, value: object) -> str:
        """Why a control cannot take the value, in a sentence; empty if it can."""
        control = self.controls.get(name)
        if control is None:
            return f"{name} is no control; the controls are {', '.join(self.controls)}"
        if name == SIZES:
            return _refused_sizes(value)
        if name not in RANGES:
            allowed = ", ".join(control.options)
            return "" if value in control.options else f"{name}: {value!r} is not allowed; it must be one of {allowed}"
        if isinstance(value, bool) or not isinstance(value, int) or not control.min <= value <= control.max:
            return f"{name}: {value!r} is not allowed; it must be an integer from {control.min} to {control.max}"
        return ""

    def show(self) -> None:
        """Plan, judge and draw the controls' values; what cannot be used leaves the picture as it was."""
        self._refresh()
        if self.message:
            return
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update({key: new[key] for key in DRAWN[new.type]})
                if new.type == "scatter":
                    trace.marker.symbol, trace.marker.size = new.marker.symbol, new.marker.size
            layout = self.figure.layout
            layout.title.text, layout.margin = drawn.layout.title.text, drawn.layout.margin
            layout.shapes, layout.annotations = drawn.layout.shapes, drawn.layout.annotations
            layout.yaxis.range = drawn.layout.yaxis.range
            layout.xaxis3.title.text = drawn.layout.xaxis3.title.text
            for axis in ("xaxis", "xaxis2", "xaxis3"):
                layout[axis].update({key: drawn.layout[axis][key] for key in ("range", "tickvals", "ticktext")})

    def _filled(self, preset: str) -> dict[str, Any]:
        """The values with which a preset fills the controls; ValueError for a config that cannot be planned."""
        config = self.presets[preset]
        return {
            "window": config.window,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_cudagraph_capture_size": config.capture_size_limit,
            "num_speculative_tokens": config.num_speculative_tokens,
            "max_graphs": max(1, min(len(default_plan(config).replay_sizes), RANGES["max_graphs"].most)),
            SIZES: ", ".join(map(str, config.decoder_replay_cudagraph_capture_sizes or ())),
        }

    def _on_change(self, change: Any = None) -> None:
        """A preset chosen by hand fills the other controls; all else is shown as it is."""
        by_hand = change is not None and not self._is_setting
        if by_hand and change["owner"] is self.controls["preset"]:
            self.set(preset=change["new"])
        else:
            super()._on_change(change)

    def _refresh(self) -> None:
        """Plan and judge the controls' values, or say why they cannot be used."""
        refusal = _refused_sizes(self.state[SIZES])
        try:
            if refusal:
                raise ValueError(refusal)
            config, rows = self.config, self.state["rows"]
            if rows == REACHABLE:
                weights = reachable_weights(default_plan(config))
            else:
                weights = workload_weights(config, rows, num_steps=WORKLOAD_STEPS)
            plans = compared_plans(config, weights, self.state["max_graphs"])
        except ValueError as error:
            self.say(str(error))
            return
        self.say("")
        self.weights, self.judgements = weights, judged(plans, weights)
        self.say_sentence()
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        listed = f'<ul style="line-height: 1.5">{notes}</ul>' if notes else ""
        self._table.value = html_table(judged_table(self.judgements)) + listed

    def _draw(self) -> go.Figure:
        source = f"computed by replay_sim.plan from the controls' values; pads over {self.weights.source}; {COST}"
        return plans_figure(self.judgements, self.weights, source)


def _described(judgement: JudgedPlan) -> str:
    cost = judgement.cost
    if not judgement.plan.replay_sizes:
        return "no replay graphs"
    return (
        f"{cost.num_replay_graphs} replay graphs, {cost.mean_padding:.1%} pads, "
        f"{cost.static_buffer_bytes / MIB:,.0f} MiB of static buffers"
    )


def _parsed(text: str) -> tuple[int, ...] | None:
    """The sizes of a list in which commas or spaces stand between integers; None if there are none."""
    return tuple(int(word) for word in text.replace(",", " ").split()) or None


def _refused_sizes(value: object) -> str:
    """Why a text is no list of sizes, in a sentence; empty if it is one."""
    words = value.replace(",", " ").split() if isinstance(value, str) else ["no text"]
    wrong = next((word for word in words if not (word.isascii() and word.isdigit() and 0 < len(word) < 8)), None)
    if wrong is None:
        return ""
    shown = repr(value if not isinstance(value, str) else wrong)
    return f"{SIZES}: {shown} is not allowed; it must be integers, with commas or spaces between, or nothing"


def _slider(range_: Range, start: int) -> widgets.IntSlider:
    return widgets.IntSlider(
        value=start,
        min=min(range_.least, start),
        max=max(range_.most, start),
        step=range_.step,
        description=range_.label,
        style={"description_width": LABEL},
        layout=widgets.Layout(width=WIDTH),
    )


def _menu(label: str, options: tuple[str, ...], start: str) -> widgets.Dropdown:
    return widgets.Dropdown(
        options=options,
        value=start,
        description=label,
        style={"description_width": LABEL},
        layout=widgets.Layout(width=WIDTH),
    )


def _text(label: str, start: str) -> widgets.Text:
    return widgets.Text(
        value=start,
        description=label,
        placeholder="none: the default rule alone",
        continuous_update=False,
        style={"description_width": LABEL},
        layout=widgets.Layout(width=WIDTH),
    )
