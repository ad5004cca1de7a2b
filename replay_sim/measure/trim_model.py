"""The trim threshold that the step-time model gives: where the break begins to pay, on a host of any speed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config.shapes import DecoderShape
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_features import HOST_LAUNCH_US, ModelStep, step_arrays
from replay_sim.measure.step_form import step_times
from replay_sim.measure.step_model import StepModel
from replay_sim.measure.trim_curve import crossing_of

_MODES = {
    "eager_replay": (CudagraphMode.NONE, CudagraphMode.NONE),
    "piecewise_replay_eager": (CudagraphMode.PIECEWISE, CudagraphMode.NONE),
    "piecewise_replay_graphs": (CudagraphMode.PIECEWISE, CudagraphMode.PIECEWISE),
    "piecewise_replay_one_launch": (CudagraphMode.PIECEWISE, CudagraphMode.PIECEWISE),
}
"""The arms that break: how the model runs, and how the replay batch does."""


def modelled_crossings(
    model: StepModel,
    shape: DecoderShape,
    arm: str,
    tokens: Sequence[int],
    launch_us: Sequence[float],
    num_reqs: int = 1,
) -> list[float]:
    """The token count from which on the break of `arm` pays, among the ascending `tokens` and between them.

    One for each of `launch_us`, the speeds of hosts. Prompts of `num_reqs` equal requests from their start, in graphs
    without pads. Infinity where the break does not pay at the largest count, the smallest where it always does.
    """
    cases = [make(shape, arm, count, num_reqs) for make in (_broken, _whole) for count in tokens]
    arrays = step_arrays([ModelStep(shape, case, model.rates) for case in cases])
    found = []
    for speed in launch_us:
        pace = np.full(len(cases), speed / HOST_LAUNCH_US)
        broken, whole = step_times(attrs.evolve(arrays, host_pace=pace), model.coefficients).step.reshape(2, -1)
        found.append(crossing_of(np.array(tokens), 1 - broken / whole))
    return found


def _broken(shape: DecoderShape, arm: str, tokens: int, num_reqs: int) -> StepCase:
    mode, replay_mode = _MODES[arm]
    rows = min(tokens, num_reqs * shape.window)
    return StepCase(
        num_tokens=tokens,
        padded_tokens=tokens,
        mode=mode,
        replay_rows=rows,
        padded_rows=rows,
        replay_mode=replay_mode,
        num_reqs=num_reqs,
        computed=0,
        one_launch=arm == "piecewise_replay_one_launch",
    )


def _whole(shape: DecoderShape, arm: str, tokens: int, num_reqs: int) -> StepCase:
    return StepCase(
        num_tokens=tokens,
        padded_tokens=tokens,
        mode=_MODES[arm][0],
        replay_rows=0,
        padded_rows=0,
        replay_mode=None,
        num_reqs=num_reqs,
        computed=0,
    )
