"""The arms of a measured step as figures show them: the same name, colour, dash and symbol everywhere."""

from __future__ import annotations

import attrs

from replay_sim.explore.theme import Meaning


@attrs.frozen
class ArmLook:
    """How an arm is called and drawn; `dash` and `symbol` tell curves apart without colour."""

    meaning: Meaning
    dash: str
    symbol: str

    @property
    def label(self) -> str:
        """The arm in words."""
        return self.meaning.value


ARM_LOOKS = {
    "eager_off": ArmLook(Meaning.EAGER_OFF, "dash", "circle-open"),
    "eager_replay": ArmLook(Meaning.EAGER_REPLAY, "dash", "circle"),
    "piecewise_off": ArmLook(Meaning.PIECEWISE_OFF, "solid", "square-open"),
    "piecewise_replay_eager": ArmLook(Meaning.PIECEWISE_REPLAY_EAGER, "dashdot", "diamond"),
    "piecewise_replay_graphs": ArmLook(Meaning.PIECEWISE_REPLAY_GRAPHS, "solid", "square"),
    "piecewise_replay_one_launch": ArmLook(Meaning.PIECEWISE_REPLAY_ONE_LAUNCH, "dot", "star"),
    "full": ArmLook(Meaning.FULL, "longdash", "x"),
}
"""By the arms' names in records, in their order (product.md, Measuring)."""
