"""The fitted step-time model: predictions of a step's times with their source, their error and what they reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config.shapes import SHAPES, DecoderShape
from replay_sim.measure.roofline import Rates, step_limit_us
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_features import ModelStep, step_arrays
from replay_sim.measure.step_form import step_times
from replay_sim.whole_file import write_whole

FITTED_FILE = "step_model.json"
"""The bundled model, beside this module."""

_ARMS = {
    (CudagraphMode.NONE, None): "eager_off",
    (CudagraphMode.NONE, CudagraphMode.NONE): "eager_replay",
    (CudagraphMode.NONE, CudagraphMode.PIECEWISE): "eager_replay_graphs",
    (CudagraphMode.PIECEWISE, None): "piecewise_off",
    (CudagraphMode.PIECEWISE, CudagraphMode.NONE): "piecewise_replay_eager",
    (CudagraphMode.PIECEWISE, CudagraphMode.PIECEWISE): "piecewise_replay_graphs",
    (CudagraphMode.FULL, None): "full",
}


HOST_BOUND = "host_bound"
"""Of `errors`: those of steps that the host bounds, whose time is as unsteady as the host's speed."""
HOST_SHARE = 0.97
"""The share of step time from which on the host bounds it."""


def arm_of(case: StepCase) -> str:
    """The name of the arm that runs its steps as `case` does."""
    if case.one_launch and case.mode is CudagraphMode.PIECEWISE:
        return "piecewise_replay_one_launch"
    return _ARMS[case.mode, case.replay_mode]


def compared(shape: DecoderShape, case: StepCase) -> dict[str, int]:
    """What a step is compared by with those that a model saw."""
    return {
        "num_tokens": case.num_tokens,
        "num_reqs": case.num_reqs,
        "window": shape.window,
        "num_local_experts": shape.num_local_experts,
        "replay_rows": case.replay_rows,
    }


@attrs.frozen(kw_only=True)
class ArmError:
    """Absolute relative error of step time on `n` points: median and 95th percentile."""

    median: float
    p95: float
    n: int


@attrs.frozen(kw_only=True)
class Prediction:
    """One step's modelled microseconds: until all is done, until the call returns, kernels busy; its roofline.

    `source` says what the model was fitted to, `error` how wrong it was on held-out points of the arm, or on all steps
    that the host bounds if it bounds this one; None where it saw none. `outside` is why the model is asked outside what
    it saw; None if it is not.
    """

    arm: str
    step_us: float
    host_us: float
    device_us: float
    limit_us: float
    source: str
    error: ArmError | None
    outside: str | None

    @property
    def inside(self) -> bool:
        """Whether the model saw steps around this one."""
        return self.outside is None


@attrs.frozen(kw_only=True)
class StepModel:
    """Coefficients of the form, at the `rates` and the host's speed, `launch_us`, of the runs that they were fitted to.

    The host's speed was within `launch_bounds`.
    `shape` is what was measured, at any of the windows and local experts of `domain`, which holds per arm the least and
    the most of what steps are compared by. `errors` are those on held-out points by arm, and of `all` together; few
    steps are `host_bound`, and fitted ones are counted among them too.
    """

    shape: str
    rates: Rates
    launch_us: float
    launch_bounds: tuple[float, float]
    provenance: str
    seed: int
    coefficients: Mapping[str, float]
    errors: Mapping[str, ArmError]
    domain: Mapping[str, Mapping[str, tuple[int, int]]]

    @property
    def source(self) -> str:
        """The caption of every prediction."""
        return f"modelled, fitted to {self.provenance}"

    def predict(self, shape: DecoderShape, case: StepCase, launch_us: float | None = None) -> Prediction:
        """The times of one step on `shape`, on a host whose small launch costs `launch_us`; None: the records' median.

        `replay_sim.measure.rates.launch_us` measures a host's.
        """
        step = ModelStep(shape, case, self.rates, launch_us or self.launch_us)
        times = step_times(step_arrays([step]), self.coefficients)
        arm = arm_of(case)
        host_bound = HOST_BOUND in self.errors and times.host[0] >= HOST_SHARE * times.step[0]
        return Prediction(
            arm=arm,
            step_us=float(times.step[0]),
            host_us=float(times.host[0]),
            device_us=float(times.device[0]),
            limit_us=step_limit_us(shape, case, self.rates),
            source=self.source,
            error=self.errors.get(HOST_BOUND if host_bound else arm),
            outside=self._outside(step, arm),
        )

    def _outside(self, step: ModelStep, arm: str) -> str | None:
        """Why the model cannot know this step; None if it can."""
        shape, (fast, slow) = step.shape, self.launch_bounds
        measured = SHAPES[self.shape]
        free = {name: getattr(shape, name) for name in ("name", "window", "num_local_experts", "first_local_expert")}
        if attrs.evolve(measured, **free, max_position=shape.max_position) != shape:
            return f"model {shape.name} differs from {self.shape}, which was measured"
        if arm not in self.domain:
            return f"arm {arm} was not measured"
        if not fast <= step.launch_us <= slow:
            return (
                f"launch_us {step.launch_us} is outside of {fast} to {slow}, the speeds of the host that was measured"
            )
        asked = compared(shape, step.case)
        for key, (least, most) in self.domain[arm].items():
            if not least <= asked[key] <= most:
                return f"{key} {asked[key]} is outside of {least} to {most}, which were measured for arm {arm}"
        return None


def model_text(model: StepModel) -> str:
    """The model as the text of its file, a coefficient a line."""
    return json.dumps(attrs.asdict(model), indent=1) + "\n"


def write_model(model: StepModel, path: Path) -> None:
    """Write the model's file, whole or not at all."""
    write_whole(path, model_text(model))


def read_model(text: str) -> StepModel:
    """The model of a file that `write_model` wrote."""
    data: dict[str, Any] = json.loads(text)
    errors = {arm: ArmError(**error) for arm, error in data["errors"].items()}
    domain = {arm: {key: tuple(ends) for key, ends in keys.items()} for arm, keys in data["domain"].items()}
    bounds = tuple(data["launch_bounds"])
    fields = {"rates": Rates(**data["rates"]), "launch_bounds": bounds, "errors": errors, "domain": domain}
    return StepModel(**data | fields)


def bundled_model() -> StepModel | None:
    """The model that was fitted to the bundled records; None where the package has none."""
    file = resources.files("replay_sim.measure") / FITTED_FILE
    return read_model(file.read_text(encoding="utf-8")) if file.is_file() else None
