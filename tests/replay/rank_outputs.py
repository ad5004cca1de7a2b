"""Ranks that run the tiny decoder beside single-rank runners, with collectives inside of its layers."""

import random
from typing import Any

import attrs
import numpy as np
import torch
from decoder.serving import BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS, Asked, Serving, decode, make_runner, prefill
from faults.helpers import SMOOTH, TOLERANCE, outputs_of
from torch import distributed as dist

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.request import Batch
from replay_sim.capture import eager_break
from replay_sim.capture.host import HostBackend
from replay_sim.decoder.model import Decoder
from replay_sim.decoder.step import StepOutput, StepRunner
from replay_sim.explore.padded_eager import PaddedEagerRunner
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.replay.ranks import RankAgreement

NOTHING = (Batch(), [], np.empty(0, np.int32))


@attrs.define
class Meeting:
    """A collective inside of the layers: while `open`, every rank's rows are gathered where layers begin."""

    open: bool = False
    gathered: list[tuple[int, ...]] = attrs.field(factory=list)

    def gather(self, rows: int) -> None:
        if self.open:
            everyones = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, torch.tensor([rows]))
            self.gathered.append(tuple(int(count) for count in everyones))


MEETING = Meeting()


@eager_break
def meet(values: torch.Tensor) -> None:
    """Meets the other ranks in the middle of a PIECEWISE graph, and in eager layers."""
    MEETING.gather(values.shape[0])


def add_collectives() -> None:
    """From now on the first layers and the replay layers of every decoder begin with a collective."""
    first, replay = Decoder.run_first_layers, Decoder.run_replay_layers

    def run_first_layers(self, state):
        meet(state.residual)
        return first(self, state)

    def run_replay_layers(self, inputs):
        meet(inputs["residual"])
        return replay(self, inputs)

    Decoder.run_first_layers, Decoder.run_replay_layers = run_first_layers, run_replay_layers


@attrs.frozen
class Ran:
    """What one rank ran in a step: its record, the padded rows of all ranks, and those that its collectives saw."""

    record: StepRecord
    rank_tokens: tuple[int, ...]
    rank_rows: tuple[int, ...]
    met: list[tuple[int, ...]]


@attrs.define
class Compared:
    """One rank's runner with graphs beside two without: one runs on the agreed sizes, one on no pads."""

    agreed: StepRunner
    same_sizes: StepRunner
    unpadded: StepRunner

    @property
    def block_size(self) -> int:
        return self.agreed.block_size

    def step(self, *arguments: Any) -> StepOutput:
        return self._compare(arguments, self.agreed.step)

    def idle_step(self) -> StepOutput:
        caches = [tensor.clone() for tensor in self.agreed._named_caches().values()]
        output = self._compare(NOTHING, lambda *_: self.agreed.idle_step())
        for before, after in zip(caches, self.agreed._named_caches().values(), strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
        return output

    def _compare(self, arguments: tuple, step) -> StepOutput:
        MEETING.open = True
        output = step(*arguments)
        MEETING.open = False
        record, eager = output.record, CudagraphMode.NONE
        bits = outputs_of(self.same_sizes.run(*arguments, record))
        without_pads = attrs.evolve(
            record,
            mode=eager,
            padded_tokens=record.num_tokens,
            padded_rows=record.replay_rows,
            replay_mode=eager if record.has_replay_batch and record.num_tokens else None,
        )
        near = outputs_of(self.unpadded.run(*arguments, without_pads))
        for actual, exact, close in zip(outputs_of(output), bits, near, strict=True):
            assert len(actual) == record.num_tokens
            assert torch.equal(actual, exact)
            torch.testing.assert_close(actual, close, rtol=TOLERANCE, atol=TOLERANCE)
        return output


def make_compared(plan: CapturePlan, lacks: dict[str, int]) -> tuple[Serving, RankAgreement]:
    """This rank's three runners; `lacks` are sizes by graph kind whose graphs it loses."""
    add_collectives()
    agreement, backend = RankAgreement(plan), HostBackend(1 << 32)
    agreed = make_runner(backend, plan, SMOOTH, agreement=agreement)
    bounds = {"num_blocks": NUM_BLOCKS, "max_blocks": MAX_BLOCKS, "block_size": BLOCK_SIZE}
    same_sizes = PaddedEagerRunner(SMOOTH, plan, backend, weights=agreed.decoder.weights, **bounds)
    same_sizes.capture_model_graphs()
    same_sizes.capture_replay_graphs()
    unpadded = make_runner(backend, plan, SMOOTH, captured=False, weights=agreed.decoder.weights)
    graphs = {"model": agreed.model_graphs, "full": agreed.full_graphs, "replay": agreed.replay_graphs._graphs}
    for kind, size in lacks.items():
        del graphs[kind][size]
    return Serving(Compared(agreed, same_sizes, unpadded)), agreement


def run_outputs(
    store: dist.Store, plan: CapturePlan, lacks: list[dict[str, int]], seed: int, num_steps: int
) -> list[Ran]:
    """Run and compare random steps."""
    rank = dist.get_rank()
    serving, agreement = make_compared(plan, lacks[rank])
    ran = []
    for step in range(num_steps):
        mood = random.Random(seed + step).choice(("decode", "short", "long"))
        asked = _random_asks(random.Random(f"{seed} {step} {rank}"), mood, serving, step)
        ran.append(_run(serving, agreement, asked))
    return ran


def run_asked(
    store: dist.Store, plan: CapturePlan, lacks: list[dict[str, int]], steps: list[list[list[Asked] | None]]
) -> list[Ran]:
    """Run and compare given steps, per step a part for each rank, None for one that is idle."""
    rank = dist.get_rank()
    serving, agreement = make_compared(plan, lacks[rank])
    return [_run(serving, agreement, parts[rank]) for parts in steps]


def _run(serving: Serving, agreement: RankAgreement, asked: list[Asked] | None) -> Ran:
    MEETING.gathered.clear()
    output = serving.runner.idle_step() if asked is None else serving.step(asked)
    return Ran(output.record, agreement.rank_tokens, agreement.rank_rows, list(MEETING.gathered))


def _random_asks(draw: random.Random, mood: str, serving: Serving, step: int) -> list[Asked] | None:
    """Decodes of requests that have run, beside new prompts; or None, an idle rank."""
    if draw.random() < 0.25:
        return None
    known = [name for name, computed in serving.computed.items() if 0 < computed < 300]
    asked = [decode(name) for name in draw.sample(known, min(len(known), draw.randint(1, 4)))]
    if mood == "decode" and asked:
        return asked
    length = draw.choice((1, 7, 12, 16)) if mood == "short" else draw.choice((20, 40, 50, 130))
    return [*asked, prefill(f"p{step}", length, keeps=draw.random() < 0.4)]
