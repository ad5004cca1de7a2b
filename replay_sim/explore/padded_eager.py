"""Steps on the very padded rows that graphs run on, without any graph: what replay must equal bit for bit (G5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replay_sim.batch.dispatch import dispatch_step
from replay_sim.batch.request import Batch
from replay_sim.capture.breakable_graph import BreakableGraph, EagerBreak
from replay_sim.decoder.step import StepRunner
from replay_sim.replay.graphs import ReplayGraphs


class PaddedEagerReplay(ReplayGraphs):
    """Replay graphs whose every replay calls the layers; gather, buffers and dispatch are those of the real ones."""

    def _capture_one(self, size: int) -> BreakableGraph:
        inputs = self.buffers.view(size)
        return _calling(lambda: self._run_layers(inputs), f"eager replay layers of {size} rows")


class PaddedEagerRunner(StepRunner):
    """A StepRunner that dispatches, pads, gathers and scatters as one with graphs does, and captures none."""

    def _make_replay_graphs(self) -> ReplayGraphs:
        return PaddedEagerReplay(**self._make_replay_place(), prepare=self.prepare_replay)

    def _capture(self, batch: Batch, captured: dict[str, Any], *, full: bool) -> BreakableGraph:
        sizes = {"model_sizes": (), "full_sizes": (), "replay_sizes": ()} | captured
        size = dispatch_step(batch, self.plan, **sizes).padded_tokens
        return _calling(lambda: self._forward(size), f"eager model of {size} tokens")


class _Outputs:
    """The outputs of the last call, read like the mapping or tuple that they are."""

    value: Any = None

    def __getitem__(self, key: Any) -> Any:
        return self.value[key]

    def __iter__(self) -> Any:
        return iter(self.value)


def _calling(function: Callable[[], Any], name: str) -> BreakableGraph:
    """A graph of no segment and one break: a replay calls `function`."""
    outputs = _Outputs()

    def call() -> None:
        outputs.value = function()

    return BreakableGraph(name, (EagerBreak(call, (), {}),), outputs)
