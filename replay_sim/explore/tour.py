"""The tour of one step: a small decoder runs one batch, in graphs and eagerly, and every stage can be looked at."""

from __future__ import annotations

import statistics
import time
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import ReplayRows, select_rows
from replay_sim.capture import CaptureBackend
from replay_sim.config import TINY, ServingConfig
from replay_sim.decoder.step import StepOutput, StepRunner
from replay_sim.explore.padded_eager import PaddedEagerRunner
from replay_sim.explore.timeline import TimelineEntry, timeline_of
from replay_sim.measure.environment import describe_environment
from replay_sim.measure.run_steps import make_backend
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.workload.kv_blocks import blocks_for
from replay_sim.workload.simulation import planned_dispatch
from replay_sim.workload.token_ids import token_ids

BLOCK_SIZE = 16
TOUR_CONFIG = ServingConfig(
    model="tiny",
    window=8,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    cudagraph_capture_sizes=(4, 16, 32, 64),
    decoder_replay_cudagraph_capture_sizes=(8, 16, 24, 32),
    decoder_replay_trim_threshold=16,
)
"""Sizes small enough to draw every row, with every part of a real plan."""

TOUR_BATCH = Batch(
    (
        Request(23, 0, Phase.PREFILL, request_id="A"),
        Request(14, 10, Phase.PREFILL, request_id="B"),
        Request(5, 0, Phase.PREFILL, request_id="C"),
        Request(1, 12, Phase.DECODE, request_id="D"),
    )
)
"""A whole prompt, a later chunk of one, a prompt shorter than the window, and a decode."""


@attrs.frozen
class StepData:
    """What one run of the step left, copied out of the runner's buffers.

    outputs: tensors by name, a row for each token. caches: KV by name, without the scratch block of dummy batches.
    """

    record: StepRecord
    outputs: dict[str, torch.Tensor]
    caches: dict[str, torch.Tensor]


class StepTour:
    """One step of the tiny decoder by the plan of `config`, with its graphs and without.

    Call `capture` and then `run`; the batch, the rows and the planned record are there before. Requests that have
    computed tokens get them by earlier steps. Raises ValueError for a batch or config that cannot be run.
    """

    def __init__(
        self,
        batch: Batch = TOUR_BATCH,
        config: ServingConfig = TOUR_CONFIG,
        *,
        backend: CaptureBackend | None = None,
        seed: int = 0,
    ) -> None:
        if batch.num_reqs > config.max_num_seqs or batch.num_tokens > config.max_num_batched_tokens:
            raise ValueError(
                f"batch of {batch.num_reqs} requests and {batch.num_tokens} tokens is not allowed; at most "
                f"max_num_seqs {config.max_num_seqs} and max_num_batched_tokens {config.max_num_batched_tokens}"
            )
        self.batch, self.config, self.seed = batch, config, seed
        self.shape = attrs.evolve(TINY, window=config.window)
        self.plan: CapturePlan = make_plan(config)
        self.backend = backend or make_backend("auto")
        self.graphs = self._runner(StepRunner)
        self.eager = self._runner(PaddedEagerRunner)
        self._ran: tuple[StepData, StepData] | None = None

    def _runner(self, kind: type[StepRunner]) -> StepRunner:
        plan = self.plan
        longest = max(*self.batch.seq_lens.tolist(), *plan.model_sizes, *plan.replay_sizes, 1)
        blocks = blocks_for(longest, BLOCK_SIZE)
        return kind(
            self.shape,
            plan,
            self.backend,
            num_blocks=blocks * plan.max_num_seqs,
            max_blocks=blocks,
            block_size=BLOCK_SIZE,
            seed=self.seed,
        )

    @cached_property
    def rows(self) -> ReplayRows:
        """The rows that the replay layers keep (S1-S4)."""
        return select_rows(self.batch, self.config.window)

    @cached_property
    def planned(self) -> StepRecord:
        """How the plan says that this batch runs (D1-D3)."""
        return planned_dispatch(self.plan)(self.batch)

    def capture(self) -> str:
        """Capture all graphs of the plan; returns a line that says what was captured."""
        for runner in (self.graphs, self.eager):
            runner.capture_model_graphs()
            runner.capture_replay_graphs()
        replay = self.graphs.replay_graphs.graphs
        model = [*self.graphs.model_graphs.values(), *self.graphs.full_graphs.values()]
        segments = sum(len(graph.segments) for graph in (*model, *replay))
        breaks = sum(graph.num_breaks for graph in (*model, *replay))
        return (
            f"captured {len(model)} model graphs and {len(replay)} replay graphs on the {self.backend.name} backend: "
            f"{segments} segments, {breaks} breaks"
        )

    def run(self) -> StepRecord:
        """Run the step in graphs and eagerly on the same padded rows; returns the record of the one in graphs (D4)."""
        with_graphs, eagerly = self._run(self.graphs), self._run(self.eager)
        self._ran = with_graphs, eagerly
        return with_graphs.record

    @property
    def data(self) -> StepData:
        """What the step in graphs left; RuntimeError before `run`."""
        return self._both[0]

    @property
    def differing(self) -> dict[str, int]:
        """For every output and every KV cache, how many elements differ in any bit from the eager run (G5)."""
        with_graphs, eagerly = ({**data.outputs, **data.caches} for data in self._both)
        return {name: _differing(with_graphs[name], eagerly[name]) for name in with_graphs}

    @property
    def compared(self) -> int:
        """How many elements `differing` compares."""
        return sum(
            tensor.numel() for data in self._both[:1] for tensor in (*data.outputs.values(), *data.caches.values())
        )

    @property
    def written_rows(self) -> npt.NDArray[np.int64]:
        """The rows of the step that the scatter wrote: those whose output is not all zero (L6)."""
        hidden = self.data.outputs["hidden_states"]
        return hidden.flatten(1).ne(0).any(1).nonzero().flatten().cpu().numpy()

    @property
    def _both(self) -> tuple[StepData, StepData]:
        if self._ran is None:
            raise RuntimeError("the step has not run yet: call capture() and then run()")
        return self._ran

    def gather_map(self) -> list[int | None]:
        """For each row of the static buffers in use, the step's row that is gathered into it; None for a pad (B2)."""
        pads = self.planned.padded_rows - self.planned.replay_rows
        return [*self.rows.rows.tolist(), *[None] * pads] if self.planned.has_replay_batch else []

    def replay_metadata(self) -> pd.DataFrame:
        """The replay batch's metadata as the step left it on the device, a line for each padded row (S3, S4, S8)."""
        buffers, padded = self.graphs.contexts.replay, self.data.record.padded_rows
        names = "rows positions slot_mapping request_of_row window_start_first window_start_rest".split()
        columns = {name: getattr(buffers, name)[:padded].cpu().numpy() for name in names}
        return pd.DataFrame(columns).rename_axis("buffer row")

    def model_timeline(self) -> tuple[TimelineEntry, ...]:
        """Segments and breaks of the PIECEWISE graph that the step takes (C1); empty if it takes none."""
        takes_one = self.planned.mode is CudagraphMode.PIECEWISE
        graph = self.graphs.model_graphs.get(self.planned.padded_tokens) if takes_one else None
        return timeline_of(graph, self.graphs.decoder.layers) if graph else ()

    def replay_timeline(self) -> tuple[TimelineEntry, ...]:
        """Segments and breaks of the replay graph that the step takes (C1); empty if it takes none."""
        sizes = dict(zip(self.graphs.replay_graphs.sizes, self.graphs.replay_graphs.graphs, strict=True))
        graph = sizes.get(self.planned.padded_rows)
        return timeline_of(graph, self.graphs.decoder.layers) if graph else ()

    def record_table(self) -> pd.DataFrame:
        """The record of the step in graphs, a line for each field (D4)."""
        record = attrs.asdict(self.data.record, value_serializer=lambda _, __, value: getattr(value, "value", value))
        return pd.DataFrame({"value": record}).rename_axis("field")

    def times_here(self, rounds: int = 20) -> pd.DataFrame:
        """Wall time of a step on this machine in ms, in graphs and eagerly, interleaved, the order flipped each round.

        The KV that a step writes is the same each time, so a step can be repeated. Columns: median, p10, p90, n.
        """
        runners = {"in graphs": self.graphs, "eager, same padded rows": self.eager}
        samples: dict[str, list[float]] = {arm: [] for arm in runners}
        for index in range(rounds + 2):
            for arm, runner in list(runners.items())[:: 1 if index % 2 else -1]:
                self.backend.synchronize()
                began = time.perf_counter()
                self._step(runner, self.batch)
                self.backend.synchronize()
                if index >= 2:
                    samples[arm].append((time.perf_counter() - began) * 1e3)
        rows = {
            arm: [statistics.median(values), *np.quantile(values, (0.1, 0.9)), rounds]
            for arm, values in samples.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=["median ms", "p10 ms", "p90 ms", "n"]).round(2)

    @property
    def machine(self) -> str:
        """Where `times_here` measures, in one line."""
        about = describe_environment(self.backend.device)
        device = about["gpu"] or "a CPU, where the host backend replays its record call by call"
        return f"measured on {device}, torch {about['torch']}, {about['date']}"

    def _run(self, runner: StepRunner) -> StepData:
        for batch, index in self._earlier():
            tables = [self._table(index, int(batch.seq_lens[0]))]
            runner.step(batch, tables, token_ids(batch, self.shape.vocab_size, self.seed))
        output = self._step(runner, self.batch)
        slots = runner.num_blocks * BLOCK_SIZE
        caches = {f"window KV, layer {i}": cache[:slots] for i, cache in enumerate(runner.decoder.cache.window)}
        caches["shared KV"] = runner.decoder.cache.shared[:slots]
        late = {f"late aux {i}": tensor for i, tensor in enumerate(output.late_aux)}
        outputs = {"hidden_states": output.hidden_states, "pre_mix": output.pre_mix, **late}
        return StepData(
            output.record,
            {name: tensor.clone() for name, tensor in outputs.items()},
            {name: tensor.clone() for name, tensor in caches.items()},
        )

    def _step(self, runner: StepRunner, batch: Batch) -> StepOutput:
        tables = [self._table(index, length) for index, length in enumerate(batch.seq_lens.tolist())]
        return runner.step(batch, tables, token_ids(batch, self.shape.vocab_size, self.seed))

    def _earlier(self) -> list[tuple[Batch, int]]:
        """Steps that compute what the requests have computed before, one request and one chunk each, with its index."""
        budget = self.config.max_num_batched_tokens
        return [
            (
                Batch(
                    (
                        Request(
                            min(budget, request.computed - start), start, Phase.PREFILL, request_id=request.request_id
                        ),
                    )
                ),
                index,
            )
            for index, request in enumerate(self.batch.requests)
            for start in range(0, request.computed, budget)
        ]

    def _table(self, index: int, seq_len: int) -> npt.NDArray[np.int32]:
        """The KV blocks of the request at `index`: its own, in order."""
        first = index * self.graphs.contexts.batch.max_blocks
        return np.arange(first, first + blocks_for(seq_len, BLOCK_SIZE), dtype=np.int32)


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements of two tensors of one dtype that differ in any bit; NaNs of the same bits are equal."""
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return int((left.view(bits) != right.view(bits)).sum())
