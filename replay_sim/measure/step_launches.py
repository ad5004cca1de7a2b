"""What the host does for each part of a step: graph launches, eager breaks and eager kernels (issue 4, point 4)."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.config.shapes import DecoderShape
from replay_sim.measure.step_case import StepCase
from replay_sim.measure.step_ops import Op

BROKEN_OUT = ("KV write", "window attention", "shared attention")
"""Operations that run in eager breaks of a PIECEWISE graph, because they read live metadata."""


@attrs.frozen(kw_only=True)
class Launches:
    """Of one part: graph launches, eager breaks between them, kernels launched one by one, kernels inside graphs."""

    graphs: int = 0
    breaks: int = 0
    eager_kernels: int = 0
    graph_kernels: int = 0


def step_launches(shape: DecoderShape, case: StepCase, parts: dict[str, tuple[Op, ...]]) -> dict[str, Launches]:
    """The launches of each part of `parts`, which are those of the step.

    A PIECEWISE graph has a segment before each attention and one after the last of them. One that breaks for replay
    ends with the KV write of the batch, a break of its own, and a last segment before the replay region.
    """
    first = _stretch(case.mode, parts["first_layers"], shape.cut, trailing=0)
    late = shape.num_replay_layers
    if not case.has_replay_batch:
        replay = _stretch(case.mode, parts["replay_layers"], late, trailing=1)
        if case.mode is CudagraphMode.FULL:
            replay = attrs.evolve(replay, graphs=0)
        return {
            "first_layers": first,
            "kv_write": Launches(),
            "movement": Launches(),
            "replay_layers": replay,
        }
    kv_write = _stretch(case.mode, parts["kv_write"], 1, trailing=1)
    movement = Launches(eager_kernels=_kernels(parts["movement"]))
    if case.one_launch:
        layers = _stretch(CudagraphMode.FULL, parts["replay_layers"], late, trailing=0)
        moved = Launches(graph_kernels=_kernels(parts["movement"]))
        return {"first_layers": first, "kv_write": kv_write, "movement": moved, "replay_layers": layers}
    assert case.replay_mode is not None
    layers = _stretch(case.replay_mode, parts["replay_layers"], late, trailing=1)
    return {"first_layers": first, "kv_write": kv_write, "movement": movement, "replay_layers": layers}


def _stretch(mode: CudagraphMode, ops: tuple[Op, ...], breaks: int, *, trailing: int) -> Launches:
    """A stretch with `breaks` eager breaks, and `trailing` segments after the last of them."""
    kernels = _kernels(ops)
    if mode is CudagraphMode.NONE:
        return Launches(eager_kernels=kernels)
    if mode is CudagraphMode.FULL:
        return Launches(graphs=1, graph_kernels=kernels)
    eager = _kernels(op for op in ops if op.name in BROKEN_OUT)
    return Launches(graphs=breaks + trailing, breaks=breaks, eager_kernels=eager, graph_kernels=kernels - eager)


def _kernels(ops: Iterable[Op]) -> int:
    return sum(op.count * op.kernels for op in ops)
