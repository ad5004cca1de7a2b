"""The explorer of pool reuse: preset, arrangement, order and outputs; the address map and the bytes follow live."""

from __future__ import annotations

import html
from functools import lru_cache
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.config import FLASH_RANK, load_config, preset_names
from replay_sim.explore.figures_pool import SENTENCES, address_map_figure
from replay_sim.explore.pool_map import PoolMap, pool_maps, recorded
from replay_sim.plan import make_plan
from replay_sim.replay.sharing import PoolSharing

MIB = 1 << 20
ORDERS = {"largest_first": True, "smallest_first": False}
OUTPUTS = {"dropped": False, "held": True}
CHOICES = {
    "preset": tuple(preset_names()),
    "arrangement": tuple(sharing.value for sharing in PoolSharing),
    "order": tuple(ORDERS),
    "outputs": tuple(OUTPUTS),
}
START = {"preset": "default", "arrangement": "shared", "order": "largest_first", "outputs": "dropped"}
MAY_USE = {
    PoolSharing.SHARED: "A model whose early aux states are read after the replay layers must not use it; "
    "any other takes it by itself.",
    PoolSharing.OWN_STREAM: "Any model may use it; one with early aux states takes it by itself.",
    PoolSharing.OWN_POOL: "Any model may use it; none takes it by itself.",
}


class PoolExplorer:
    """Menus, a sentence and the address map; `set` and `state` do from Python what hands do with the menus.

    `pool_map` and `figure` are those of the menus' values. A preset is recorded by shapes on the decoder of one rank
    when it is first asked for, which takes seconds; after that every change is drawn from what is kept. `message` says
    in a sentence what was refused, or is empty. `widget` is what a notebook shows.
    """

    def __init__(self, **values: str) -> None:
        """Start with `values`; raises ValueError, with the sentence, for one that no menu has."""
        self.message = _refusal(values)
        if self.message:
            raise ValueError(self.message)
        self._start = START | values
        self.menus = {
            name: widgets.Dropdown(options=options, value=self._start[name], description=name)
            for name, options in CHOICES.items()
        }
        self._sentence, self._refusal = widgets.HTML(), widgets.HTML()
        self._is_setting = False
        self.pool_map: PoolMap = self._map()
        self.figure = go.FigureWidget(self._draw())
        self.figure.layout.autosize = True  # as wide as the cell
        self.widget = self._assemble()
        for menu in self.menus.values():
            menu.observe(self._on_change, "value")

    @property
    def state(self) -> dict[str, str]:
        """The menus' values by name; `set(**state)` brings them back."""
        return {name: menu.value for name, menu in self.menus.items()}

    @property
    def sentence(self) -> str:
        """What the map comes to, and which models may use its arrangement (O1-O4)."""
        model, replay = (self.pool_map.reserved_bytes(group) / MIB for group in ("model", "replay"))
        arrangement = self.pool_map.arrangement
        return (
            f"{self.state['preset']}, {SENTENCES[arrangement]}: model graphs {model:,.0f} MiB, replay graphs "
            f"{replay:+,.0f} MiB. {MAY_USE[arrangement]}"
        )

    def set(self, **values: str) -> None:
        """Choose in the menus; a value that a menu does not have changes none of them and is refused in `message`."""
        refusal = _refusal(values)
        self._say(refusal)
        if refusal:
            return
        self._is_setting = True
        try:
            for name, value in values.items():
                self.menus[name].value = value
        finally:
            self._is_setting = False
        self._on_change()

    def reset(self) -> None:
        """Put every menu back to where it started."""
        self.set(**self._start)

    def _map(self) -> PoolMap:
        state = self.state
        maps = _maps(state["preset"])
        return maps[PoolSharing(state["arrangement"]), state["order"], state["outputs"]]

    def _draw(self) -> go.Figure:
        self._sentence.value = html.escape(self.sentence)
        source = (
            f"modelled by replay_sim from the shapes of {FLASH_RANK.name} and the plan of {self.state['preset']}; "
            "no device was used"
        )
        return address_map_figure(self.pool_map, source)

    def _on_change(self, _: object = None) -> None:
        if self._is_setting:
            return
        self._say("")
        self.pool_map = self._map()
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update(x=new.x, y=new.y, customdata=new.customdata, showlegend=new.showlegend)
                if new.type == "bar":
                    trace.base = new.base
            layout = self.figure.layout
            layout.title.text = drawn.layout.title.text
            layout.shapes, layout.annotations = drawn.layout.shapes, drawn.layout.annotations
            layout.xaxis.update(drawn.layout.xaxis)
            layout.xaxis2.update(drawn.layout.xaxis2)

    def _say(self, refusal: str) -> None:
        self.message = refusal
        self._refusal.value = f"<b>Refused.</b> {html.escape(refusal)}" if refusal else ""

    def _assemble(self) -> widgets.VBox:
        reset = widgets.Button(description="Reset", tooltip="Put every menu back to where it started")
        reset.on_click(lambda _: self.reset())
        grid = widgets.GridBox(
            list(self.menus.values()), layout=widgets.Layout(grid_template_columns="repeat(auto-fit, 320px)")
        )
        return widgets.VBox([grid, reset, self._refusal, self._sentence, self.figure])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live widget, and beside it the figure as it is now, which a saved notebook shows without a kernel."""
        still = go.Figure(self.figure).to_plotly_json()
        for trace in still["data"]:
            del trace["uid"]  # drawn anew for every live figure
        live: dict[str, Any] = self.widget._repr_mimebundle_(**kwargs)
        sentence = f"{self.sentence} (The menus appear when this cell is run.)"
        return {**live, "application/vnd.plotly.v1+json": still, "text/plain": sentence}


@lru_cache(maxsize=8)
def _maps(preset: str) -> dict[tuple[PoolSharing, str, str], PoolMap]:
    """The maps of all values of the other menus."""
    memory = recorded(FLASH_RANK, make_plan(load_config(preset)))
    return {
        (sharing, order, outputs): pool_map
        for order, largest_first in ORDERS.items()
        for outputs, hold in OUTPUTS.items()
        for sharing, pool_map in pool_maps(memory, largest_first=largest_first, hold_outputs=hold).items()
    }


def _refusal(values: dict[str, str]) -> str:
    """Why the menus cannot take the values, in a sentence; empty if they can."""
    for name, value in values.items():
        if name not in CHOICES:
            return f"{name} is no menu; the menus are {', '.join(CHOICES)}"
        if value not in CHOICES[name]:
            return f"{name}: {value!r} is not allowed; it must be one of {', '.join(CHOICES[name])}"
    return ""
