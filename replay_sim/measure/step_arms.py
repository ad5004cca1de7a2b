"""The arms of a step, side by side over the same weights: what runs eagerly and what in graphs (issue 4)."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import attrs
import torch

from replay_sim.batch.dispatch import CudagraphMode, StepRecord, dispatch_step
from replay_sim.batch.request import Batch
from replay_sim.capture import CaptureBackend
from replay_sim.config import DecoderShape
from replay_sim.decoder.step import StepRunner
from replay_sim.decoder.weights import DecoderWeights
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.progress import Progress, no_progress
from replay_sim.replay.graphs import ReplayForm
from replay_sim.workload.kv_blocks import BLOCK_SIZE


@attrs.frozen(kw_only=True)
class RigSpec:
    """What a pair of runners is made for: sizes as in a plan, the window, the experts of the rank, the KV blocks.

    `query_len_decode` are the tokens of a decode in FULL graphs.
    """

    window: int
    num_local_experts: int
    model_sizes: tuple[int, ...]
    full_sizes: tuple[int, ...]
    replay_sizes: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    max_blocks: int
    query_len_decode: int = 1

    def covers(self, other: RigSpec) -> bool:
        """Whether a pair made for this one can run what `other` asks for."""
        sizes = ("model_sizes", "full_sizes", "replay_sizes")
        alike = {field.name for field in attrs.fields(RigSpec)} - {*sizes}
        return all(getattr(self, name) == getattr(other, name) for name in alike) and all(
            set(getattr(self, name)) >= set(getattr(other, name)) for name in sizes
        )

    def plan(self) -> CapturePlan:
        """The plan whose every size above the window breaks for replay."""
        return CapturePlan(
            window=self.window,
            model_sizes=self.model_sizes,
            full_sizes=self.full_sizes,
            replay_sizes=self.replay_sizes,
            trim_threshold=min((size for size in self.model_sizes if size > self.window), default=None),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            query_len_decode=self.query_len_decode,
        )


class Rig:
    """Two runners over one set of weights: the graphs of `off` never break for replay, those of `on` all do.

    `on` has replay graphs of the forms that `arms` run. The KV caches hold random values, so that attention reads no
    zeros. Raises what a runner or a capture raises.
    """

    def __init__(
        self,
        spec: RigSpec,
        shape: DecoderShape,
        backend: CaptureBackend,
        seed: int,
        arms: Sequence[Arm],
        weights: DecoderWeights | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.spec, self.plan, self.arms = spec, spec.plan(), arms
        self.shape = attrs.evolve(shape, window=spec.window, num_local_experts=spec.num_local_experts)
        off = attrs.evolve(self.plan, trim_threshold=None, replay_sizes=())
        on = attrs.evolve(self.plan, model_sizes=self.plan.breaking_sizes, full_sizes=())
        self.off = self._make_runner(off, backend, seed, weights)
        self.on = self._make_runner(on, backend, seed, self.off.decoder.weights)
        for runner in (self.off, self.on):
            _fill_caches(runner, seed)
            runner.capture_model_graphs(progress)
        for form in dict.fromkeys(arm.form for arm in arms if arm.replay_mode is CudagraphMode.PIECEWISE):
            self.on.use_replay_form(form)
            self.on.capture_replay_graphs(progress)

    def _make_runner(
        self, plan: CapturePlan, backend: CaptureBackend, seed: int, weights: DecoderWeights | None
    ) -> StepRunner:
        return StepRunner(
            self.shape,
            plan,
            backend,
            num_blocks=self.spec.num_blocks,
            max_blocks=self.spec.max_blocks,
            block_size=BLOCK_SIZE,
            seed=seed,
            weights=weights,
        )


def _fill_caches(runner: StepRunner, seed: int) -> None:
    cache = runner.decoder.cache
    generator = torch.Generator(runner.backend.device).manual_seed(seed)
    for tensor in (*cache.window, cache.shared):
        tensor.normal_(generator=generator)


class Rigs:
    """Makes pairs of runners on demand and keeps the last one, whose weights the next may take over."""

    def __init__(
        self, shape: DecoderShape, backend: CaptureBackend, seed: int, arms: Sequence[Arm], progress: Progress
    ) -> None:
        self.shape, self.backend, self.seed = shape, backend, seed
        self._arms, self._progress = arms, progress
        self._rig: Rig | None = None

    def rig(self, spec: RigSpec) -> Rig:
        """A pair that covers `spec`: the one at hand if it does, else a new one after that one's memory is freed."""
        if self._rig is not None and self._rig.spec.covers(spec):
            return self._rig
        weights = None
        if self._rig is not None and self._rig.spec.num_local_experts == spec.num_local_experts:
            weights = self._rig.off.decoder.weights
        self.free()
        self._rig = Rig(spec, self.shape, self.backend, self.seed, self._arms, weights, self._progress)
        return self._rig

    def free(self) -> None:
        """Drops the pair at hand and returns its memory to the device; its graphs lie in reference cycles."""
        self._rig = None
        self.backend.synchronize()
        gc.collect()
        self.backend.empty_cache()


@attrs.frozen(kw_only=True)
class Arm:
    """One way to run a step: the model's mode, the replay batch's mode (None: the layers run on the whole batch).

    `form` is that of the replay graphs, if it runs any.
    """

    name: str
    mode: CudagraphMode
    replay_mode: CudagraphMode | None
    form: ReplayForm = ReplayForm.BREAKABLE

    def runner(self, rig: Rig) -> StepRunner:
        """The runner of the pair whose graphs this arm takes, set to run them."""
        runner = rig.off if self.replay_mode is None else rig.on
        runner.use_replay_form(self.form)
        return runner

    def record(self, rig: Rig, batch: Batch) -> StepRecord | None:
        """How the batch runs as this arm; None if the arm does not apply to it."""
        runner = self.runner(rig)
        record = dispatch_step(
            batch,
            runner.plan if self.replay_mode is None else rig.plan,
            model_sizes=runner.model_graphs.keys() if self.mode is CudagraphMode.PIECEWISE else (),
            full_sizes=runner.full_graphs.keys() if self.mode is CudagraphMode.FULL else (),
            replay_sizes=runner.replay_graphs.sizes if self.replay_mode is CudagraphMode.PIECEWISE else (),
            replay=self.replay_mode is not None,
        )
        return record if (record.mode, record.replay_mode) == (self.mode, self.replay_mode) else None


_NONE, _PIECEWISE, _FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
ONE_LAUNCH_ARM = "piecewise_replay_one_launch"
ARMS = (
    Arm(name="eager_off", mode=_NONE, replay_mode=None),
    Arm(name="eager_replay", mode=_NONE, replay_mode=_NONE),
    Arm(name="piecewise_off", mode=_PIECEWISE, replay_mode=None),
    Arm(name="piecewise_replay_eager", mode=_PIECEWISE, replay_mode=_NONE),
    Arm(name="piecewise_replay_graphs", mode=_PIECEWISE, replay_mode=_PIECEWISE),
    Arm(name=ONE_LAUNCH_ARM, mode=_PIECEWISE, replay_mode=_PIECEWISE, form=ReplayForm.ONE_LAUNCH),
    Arm(name="full", mode=_FULL, replay_mode=None),
)
"""All arms, in the order in which figures show them; one more way to run a step is one more row here."""
