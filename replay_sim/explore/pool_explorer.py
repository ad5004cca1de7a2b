"""The explorer of pool reuse: preset, arrangement, order and outputs; the address map and the bytes follow live."""

from __future__ import annotations

from functools import lru_cache

import ipywidgets as widgets
import plotly.graph_objects as go

from replay_sim.config import FLASH_RANK, load_config, preset_names
from replay_sim.explore.explorer import Explorer, live_figure
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
STYLE = {"description_width": "110px"}
MAY_USE = {
    PoolSharing.SHARED: "A model whose early aux states are read after the replay layers must not use it; "
    "any other takes it by itself.",
    PoolSharing.OWN_STREAM: "Any model may use it; one with early aux states takes it by itself.",
    PoolSharing.OWN_POOL: "Any model may use it; none takes it by itself.",
}


class PoolExplorer(Explorer):
    """Menus for preset, arrangement, order and outputs; the address map follows, and a sentence with its bytes.

    `pool_map` and `figure` are those of the menus' values. A preset is recorded by shapes on the decoder of one rank
    when it is first asked for, which takes seconds; after that every change is drawn from what is kept.
    """

    def __init__(self, **values: str) -> None:
        """Start with `values`; raises ValueError, with the sentence, for one that no menu has."""
        for name, value in values.items():
            if self.refusal(name, value):
                raise ValueError(self.refusal(name, value))
        super().__init__(
            {
                name: widgets.Dropdown(options=options, value=(START | values)[name], description=name, style=STYLE)
                for name, options in CHOICES.items()
            }
        )
        self.pool_map: PoolMap = self._map()
        self.figure = live_figure(self._draw())
        self.widget = widgets.VBox(
            [self.grid("320px"), self.reset_button(), self._refusal, self._sentence, self.figure]
        )
        self.listen()

    @property
    def sentence(self) -> str:
        """What the map comes to, and which models may use its arrangement (O1-O4)."""
        model, replay = (self.pool_map.reserved_bytes(group) / MIB for group in ("model", "replay"))
        arrangement = self.pool_map.arrangement
        return (
            f"{self.state['preset']}, {SENTENCES[arrangement]}: model graphs {model:,.0f} MiB, replay graphs "
            f"{replay:+,.0f} MiB. {MAY_USE[arrangement]}"
        )

    def refusal(self, name: str, value: object) -> str:
        """Why a menu cannot take the value, in a sentence; empty if it can."""
        if name not in CHOICES:
            return f"{name} is no menu; the menus are {', '.join(CHOICES)}"
        if value not in CHOICES[name]:
            return f"{name}: {value!r} is not allowed; it must be one of {', '.join(CHOICES[name])}"
        return ""

    def _map(self) -> PoolMap:
        state = self.state
        maps = _maps(state["preset"])
        return maps[PoolSharing(state["arrangement"]), state["order"], state["outputs"]]

    def _draw(self) -> go.Figure:
        self.say_sentence()
        source = (
            f"modelled by replay_sim from the shapes of {FLASH_RANK.name} and the plan of {self.state['preset']}; "
            "no device was used"
        )
        return address_map_figure(self.pool_map, source)

    def show(self) -> None:
        """Draw the map of the menus' values."""
        self.say("")
        self.pool_map = self._map()
        drawn = self._draw()
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, drawn.data, strict=True):
                trace.update(x=new.x, y=new.y, customdata=new.customdata, showlegend=new.showlegend)
                if new.type == "bar":
                    trace.base = new.base
            layout = self.figure.layout
            layout.title.update(drawn.layout.title)
            layout.shapes, layout.annotations = drawn.layout.shapes, drawn.layout.annotations
            layout.xaxis.update(drawn.layout.xaxis)
            layout.xaxis2.update(drawn.layout.xaxis2)


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
