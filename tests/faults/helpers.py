"""Steps run in graphs and eagerly side by side, pools looked into, and small plans: what the fault tests share."""

import attrs
import torch
from decoder.serving import Asked, Serving, make_runner

from replay_sim.batch.dispatch import StepRecord
from replay_sim.capture import CaptureBackend
from replay_sim.config.shapes import TINY, DecoderShape
from replay_sim.decoder.step import StepOutput
from replay_sim.plan import CapturePlan

# Every row chooses all experts: the choice of some may turn on the last bit of a router's logit.
SMOOTH = attrs.evolve(TINY, num_experts_per_tok=TINY.num_experts)
TOLERANCE = 1e-3


def outputs_of(output: StepOutput) -> list[torch.Tensor]:
    return [output.hidden_states, output.pre_mix, *output.late_aux, *output.early_aux]


def run_beside_eager(
    backend: CaptureBackend,
    plan: CapturePlan,
    steps: list[list[Asked]],
    shape: DecoderShape = SMOOTH,
    **settings,
) -> list[StepRecord]:
    """Run the steps in the plan's graphs and without any, and compare all outputs; what ran in graphs."""
    graphs = Serving(make_runner(backend, plan, shape, **settings))
    eager = Serving(make_runner(backend, plan, shape, captured=False, **settings))
    records = []
    for asked in steps:
        one, other = graphs.step(asked), eager.step(asked)
        for actual, expected in zip(outputs_of(one), outputs_of(other), strict=True):
            assert bool(actual.isfinite().all())
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
        records.append(one.record)
    return records


def live_pool_bytes(backend: CaptureBackend, pool) -> int:
    """Bytes of the pool's blocks that are not free."""
    if backend.name == "host":
        return backend.arena.allocator.allocated_bytes(pool)
    snapshot = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in snapshot if tuple(s["segment_pool_id"]) in pool.handles)


def place_of(backend: CaptureBackend, pool=None, stream=None) -> dict:
    """Where a capture goes: backend, pool and stream, new ones unless given."""
    return {
        "backend": backend,
        "pool": backend.make_pool() if pool is None else pool,
        "stream": backend.make_stream() if stream is None else stream,
    }
