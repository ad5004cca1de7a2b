"""The state between sublayers: the seven tensors that flow into the replay layers."""

from typing import Self

import attrs
from torch import Tensor

from replay_sim.replay.row_tensors import RowTensors


@attrs.define
class DecoderState:
    """T rows between two sublayers, pads included; sublayers replace its tensors and write into none of them.

    `hidden_states` (T, h) act: the last sublayer's output, not merged yet. `positions` (T) int64.
    `input_ids` (T) int32 or int64, or None. `pre_mix` (T, hc), `post_mix` (T, hc, 1), `res_mix` (T, hc, hc)
    float32. `residual` (T, hc, h) act: the streams.
    """

    hidden_states: Tensor
    positions: Tensor
    input_ids: Tensor | None
    pre_mix: Tensor
    post_mix: Tensor
    res_mix: Tensor
    residual: Tensor

    @classmethod
    def of(cls, inputs: RowTensors) -> Self:
        """The state of the seven tensors by name; TypeError names one that is missing or unknown."""
        return cls(**inputs)  # type: ignore[arg-type]

    def row_tensors(self) -> dict[str, Tensor | None]:
        """The tensors by name, as the replay layers take them."""
        return attrs.asdict(self, recurse=False)
