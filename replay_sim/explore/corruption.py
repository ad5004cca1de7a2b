"""The corruption that forced pool sharing makes: early aux states overwritten by a replay graph, shown and caught.

Early aux states are made before the replay layers and read after them, so they live while a replay graph runs (O3).
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import pandas as pd
import torch

from replay_sim.batch.dispatch import StepRecord
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture.checker import Checker, StaleRead
from replay_sim.capture.host import HostBackend
from replay_sim.capture.ledger import Allocation
from replay_sim.config import TINY
from replay_sim.decoder.step import StepRunner
from replay_sim.explore.padded_eager import PaddedEagerRunner
from replay_sim.plan import CapturePlan
from replay_sim.replay.sharing import PoolSharing, SharingChoice, choose_sharing
from replay_sim.workload.token_ids import token_ids

ARENA_BYTES = 4 << 30
BLOCKS_OF_A_REQUEST, BLOCK_SIZE = 4, 16
EARLY_AUX_LAYERS = (0, 2)
WINDOW = 8
PLAN = CapturePlan(
    window=WINDOW,
    model_sizes=(32, 64),
    full_sizes=(),
    replay_sizes=(16, 32),
    trim_threshold=32,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
PROMPTS = ((32, 32), (20, 12, 9, 3), (8, 8, 8, 8))
"""Prompt lengths of each step: with the sizes above, none, one and both of the two early aux states are overwritten."""


@attrs.frozen
class EarlyAuxStep:
    """One step's early aux states, a (T, h) tensor a layer, as they are read right after the step.

    `right` ran without graphs on the same padded rows; `shared` in graphs that share pool and stream by force;
    `chosen` in the arrangement that the system picks.
    """

    prompts: tuple[int, ...]
    record: StepRecord
    right: tuple[torch.Tensor, ...]
    shared: tuple[torch.Tensor, ...]
    chosen: tuple[torch.Tensor, ...]

    def wrong_rows(self, arrangement: str) -> list[list[int]]:
        """For each layer the rows of `arrangement`, shared or chosen, that differ in any bit from what is right."""
        states = getattr(self, arrangement)
        return [_differing_rows(read, right) for read, right in zip(states, self.right, strict=True)]


class CorruptionDemo:
    """The tiny decoder with early aux states, run step by step in forced sharing and as the system would.

    Everything runs on the host backend, whose memory is reused as a GPU's pool is. Takes seconds, when first asked.
    """

    def __init__(
        self, prompts: tuple[tuple[int, ...], ...] = PROMPTS, layers: tuple[int, ...] = EARLY_AUX_LAYERS
    ) -> None:
        self.prompts, self.layers = prompts, layers
        self.shape = attrs.evolve(TINY, window=WINDOW, early_aux_layers=layers)
        self.choice: SharingChoice = choose_sharing(has_early_aux=bool(layers))

    @cached_property
    def _ran(self) -> tuple[tuple[EarlyAuxStep, ...], tuple[StaleRead, ...], tuple[StaleRead, ...]]:
        """The steps, and what the checker finds under forced sharing and in the system's arrangement."""
        right, _ = self._run(PaddedEagerRunner, None)
        shared, findings = self._run(StepRunner, PoolSharing.SHARED)
        chosen, clean = self._run(StepRunner, None)
        steps = []
        for prompts, *runs in zip(self.prompts, right, shared, chosen, strict=True):
            (record, *_), states = zip(*runs, strict=True)
            steps.append(EarlyAuxStep(prompts, record, *states))
        return tuple(steps), findings, clean

    @property
    def steps(self) -> tuple[EarlyAuxStep, ...]:
        """One for each of `prompts`."""
        return self._ran[0]

    @property
    def findings(self) -> tuple[StaleRead, ...]:
        """What the checker finds under forced sharing."""
        return self._ran[1]

    @property
    def findings_chosen(self) -> tuple[StaleRead, ...]:
        """What the checker finds in the arrangement that the system picks."""
        return self._ran[2]

    def _run(
        self, kind: type[StepRunner], sharing: PoolSharing | None
    ) -> tuple[list[tuple[StepRecord, tuple[torch.Tensor, ...]]], tuple[StaleRead, ...]]:
        """Every step's record and early aux states, copied at once, and what the checker finds."""
        backend = HostBackend(ARENA_BYTES)
        checker = Checker(backend)
        runner = kind(
            self.shape,
            PLAN,
            backend,
            num_blocks=BLOCKS_OF_A_REQUEST * PLAN.max_num_seqs,
            max_blocks=BLOCKS_OF_A_REQUEST,
            block_size=BLOCK_SIZE,
            sharing=sharing,
        )
        runner.capture_model_graphs()
        runner.capture_replay_graphs()
        done = []
        with checker.watching():
            for prompts in self.prompts:
                requests = (Request(n, 0, Phase.PREFILL, request_id=str(i)) for i, n in enumerate(prompts))
                batch = Batch(tuple(requests))
                tables = [
                    np.arange(BLOCKS_OF_A_REQUEST, dtype=np.int32) + BLOCKS_OF_A_REQUEST * i
                    for i in range(len(prompts))
                ]
                output = runner.step(batch, list(tables), token_ids(batch, self.shape.vocab_size))
                done.append((output.record, tuple(state.clone() for state in output.early_aux)))
        return done, tuple(checker.findings)

    def steps_table(self) -> pd.DataFrame:
        """A line a step: its graphs, and how many rows are wrong in each early aux state, by arrangement."""
        return pd.DataFrame(
            {
                " + ".join(map(str, step.prompts)): {
                    "model graph": f"{step.record.padded_tokens} tokens",
                    "replay graph": f"{step.record.padded_rows} rows",
                    **{
                        f"{label}: wrong rows, layer {layer}": f"{len(rows)} of {step.record.num_tokens}"
                        for arrangement, label in (("shared", "forced shared"), ("chosen", self.choice.sharing.value))
                        for layer, rows in zip(self.layers, step.wrong_rows(arrangement), strict=True)
                    },
                }
                for step in self.steps
            }
        ).rename_axis("prompts (tokens)", axis="columns")

    def findings_table(self) -> pd.DataFrame:
        """A column for each finding under forced sharing: what is read, what lies over it now, and what to do."""
        findings = {
            number: {
                "is read": f"{_made(finding.tensor)}, by {finding.operation} in {finding.reader}",
                "but was overwritten by": _made(finding.writer),
                "at": _overlap(finding.tensor, finding.writer),
                "what to do": finding.remedy,
            }
            for number, finding in enumerate(self.findings, 1)
        }
        return pd.DataFrame(findings).rename_axis("finding", axis="columns")


def _made(allocation: Allocation) -> str:
    """The tensor, its graph and the line of code that made it, without a line number, which moves."""
    line = f" at `{allocation.source.text}`" if allocation.source is not None else ""
    return f"{allocation.operation} {allocation.shape} of {allocation.graph}{line}"


def _overlap(tensor: Allocation, writer: Allocation) -> str:
    """The address and the bytes that both have had."""
    start = max(tensor.address, writer.address)
    end = min(tensor.address + tensor.nbytes, writer.address + writer.nbytes)
    return f"{start:#x}, {end - start:,} bytes"


def _differing_rows(read: torch.Tensor, right: torch.Tensor) -> list[int]:
    differs = (read.view(torch.int32) != right.view(torch.int32)).any(1)
    return [int(row) for row in differs.nonzero().flatten()]
