"""What steps cost by the fitted model: the view of schedulers and of those that choose sizes."""

from __future__ import annotations

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.config.shapes import DecoderShape
from replay_sim.measure.roofline import PARTS
from replay_sim.measure.step_case import StepCase, case_of_record, long_context
from replay_sim.measure.step_features import ModelStep, step_arrays
from replay_sim.measure.step_form import step_times
from replay_sim.measure.step_model import Prediction, StepModel

REGION_TOKENS = 4096
"""Tokens of the step in which `replay_us` takes a replay region of fewer rows to run."""


class StepCosts:
    """Microseconds and seconds of steps on `shape` by `model`; replay graphs of a single launch if `one_launch`.

    A step's record has no context lengths: every request is taken to have so long a context that each of its rows
    attends as many keys as it may (long_context). Costs are kept: asking again for a step is a look-up.
    """

    def __init__(self, model: StepModel, shape: DecoderShape, *, one_launch: bool = False) -> None:
        self.model, self.shape, self.one_launch = model, shape, one_launch
        self._steps: dict[StepCase, tuple[float, float]] = {}

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return self.model.source

    def seconds(self, record: StepRecord) -> float:
        """Seconds of one dispatched step; 0 for an empty one."""
        return self._step_us(self._case_of(record)) / 1e6 if record.num_tokens else 0.0

    def prediction(self, record: StepRecord) -> Prediction:
        """The whole prediction of one dispatched step; ValueError for an empty one."""
        return self.model.predict(self.shape, self._case_of(record))

    def model_us(self, padded_tokens: int, mode: CudagraphMode, breaks: bool) -> float:
        """Microseconds of a step of `padded_tokens`; with `breaks` all of it but its replay region.

        `model_us(tokens, mode, True) + replay_us(rows, graph)` is the step's time: exactly for a replay batch of one
        window and in a step of REGION_TOKENS, and elsewhere as far as parts add up while the host runs ahead.
        """
        if not breaks:
            return self._step_us(self._case(padded_tokens, mode, 0, None))
        case = self._case(padded_tokens, mode, min(self.shape.window, padded_tokens), CudagraphMode.PIECEWISE)
        return self._step_us(case) - self._window_region_us()

    def replay_us(self, padded_rows: int, graph: bool) -> float:
        """Microseconds that a replay region of `padded_rows` adds to a step, in its graph or eagerly.

        Movement of rows is part of it; the step has REGION_TOKENS, or as many tokens as rows.
        """
        tokens = max(REGION_TOKENS, padded_rows)
        replay_mode = CudagraphMode.PIECEWISE if graph else CudagraphMode.NONE
        asked = self._case(tokens, CudagraphMode.PIECEWISE, padded_rows, replay_mode)
        window = self._case(tokens, CudagraphMode.PIECEWISE, self.shape.window, CudagraphMode.PIECEWISE)
        return self._window_region_us() + self._step_us(asked) - self._step_us(window)

    def _window_region_us(self) -> float:
        """Kernel time of the region of one window's rows: what of a step is said to be its region's."""
        case = self._case(REGION_TOKENS, CudagraphMode.PIECEWISE, self.shape.window, CudagraphMode.PIECEWISE)
        return self._times(case)[1]

    def _case_of(self, record: StepRecord) -> StepCase:
        one_launch = self.one_launch and record.replay_mode is CudagraphMode.PIECEWISE
        return case_of_record(record, long_context(self.shape), one_launch=one_launch)

    def _case(self, tokens: int, mode: CudagraphMode, rows: int, replay_mode: CudagraphMode | None) -> StepCase:
        """A step of so many tokens and kept rows: decodes in a FULL graph, else as few prompts as keep these rows."""
        return StepCase(
            num_tokens=tokens,
            padded_tokens=tokens,
            mode=mode,
            replay_rows=rows,
            padded_rows=rows,
            replay_mode=replay_mode,
            num_reqs=tokens if mode is CudagraphMode.FULL else max(1, -(-rows // self.shape.window)),
            computed=long_context(self.shape),
            one_launch=self.one_launch and replay_mode is CudagraphMode.PIECEWISE,
        )

    def _step_us(self, case: StepCase) -> float:
        return self._times(case)[0]

    def _times(self, case: StepCase) -> tuple[float, float]:
        """Microseconds of a step, and of the kernels of its replay region."""
        if case not in self._steps:
            arrays = step_arrays([ModelStep(self.shape, case, self.model.rates, self.model.launch_us)])
            times = step_times(arrays, self.model.coefficients)
            region = times.busy[0, PARTS.index("movement") :].sum()
            self._steps[case] = float(times.step[0]), float(region)
        return self._steps[case]
