"""The kept rows of one batch under a plan: gather map, metadata as a step writes it, and how the step is dispatched."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from replay_sim.batch.dispatch import StepRecord, dispatch_step
from replay_sim.batch.metadata import BatchMetadataBuffers, ReplayMetadataBuffers
from replay_sim.batch.request import Batch
from replay_sim.batch.rows import ReplayRows, kept_lengths, select_rows
from replay_sim.config import TINY, ServingConfig
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.replay.movement import gather_into
from replay_sim.replay.row_tensors import input_specs
from replay_sim.replay.static_buffers import StaticBuffers
from replay_sim.workload.simulation import planned_dispatch

BLOCK_SIZE = 4
ROW_COLUMNS = ("rows", "positions", "slot_mapping", "request_of_row", "window_start_first", "window_start_rest")


def dealt_block_tables(batch: Batch, block_size: int) -> list[npt.NDArray[np.int32]]:
    """The KV blocks of each request, dealt to the requests in turn, so that no request's blocks lie side by side."""
    counts = -(-batch.seq_lens // block_size)
    dealt: list[list[int]] = [[] for _ in counts]
    turns = (index for turn in range(int(counts.max(initial=0))) for index in np.flatnonzero(counts > turn))
    for block, index in enumerate(turns):
        dealt[index].append(block)
    return [np.array(blocks, np.int32) for blocks in dealt]


class KeptRows:
    """One batch under the plan of `config`, with every planned graph captured; counted on a CPU, nothing is run.

    Raises ValueError for settings that cannot be planned and for a batch above max_num_seqs or the token budget.
    """

    def __init__(self, batch: Batch, config: ServingConfig) -> None:
        self.batch, self.config = batch, config
        self.plan: CapturePlan = make_plan(config)
        if batch.num_tokens > config.max_num_batched_tokens:
            raise ValueError(
                f"num_tokens: {batch.num_tokens} is not allowed; a step takes at most max_num_batched_tokens "
                f"{config.max_num_batched_tokens}"
            )
        if batch.num_reqs > config.max_num_seqs:
            raise ValueError(
                f"num_reqs: {batch.num_reqs} is not allowed; a step takes at most max_num_seqs {config.max_num_seqs}"
            )
        self.rows: ReplayRows = select_rows(batch, config.window)
        self.record: StepRecord = planned_dispatch(self.plan)(batch)

    @property
    def names(self) -> list[str]:
        """The requests' ids, or their numbers where they have none."""
        return [name or str(index) for index, name in enumerate(self.batch.request_ids)]

    @property
    def padded_rows(self) -> int:
        """Rows of the replay batch with its pads; of the kept rows alone where the step has no replay batch."""
        return self.record.padded_rows if self.record.has_replay_batch else self.rows.num_rows

    def gather_map(self) -> list[int | None]:
        """For each row of the static buffers the step's row gathered into it, None for a pad; empty if none is (B2)."""
        pads = self.record.padded_rows - self.record.replay_rows
        return [*self.rows.rows.tolist(), *[None] * pads] if self.record.has_replay_batch else []

    def by_request(self) -> pd.DataFrame:
        """A line a request: what it asks and keeps, offsets in step and replay batch, window starts (S1-S4, S7)."""
        batch, rows = self.batch, self.rows
        columns = {
            "phase": ["decode" if decode else "prefill" for decode in batch.is_decode.tolist()],
            "query_len": batch.query_lens,
            "computed": batch.computed,
            "seq_len": batch.seq_lens,
            "all rows read": batch.all_rows_read,
            "rows kept": kept_lengths(batch, self.config.window),
            "query_start_loc": batch.query_start_loc[:-1],
            "replay query_start_loc": rows.query_start_loc[:-1],
            "window start, first layer": batch.window_starts,
            "window start, rest": rows.window_starts,
        }
        return pd.DataFrame(columns, index=pd.Index(self.names, name="request"))

    @cached_property
    def buffers(self) -> ReplayMetadataBuffers:
        """The replay batch's metadata buffers, written as a step writes them (S3, S4, S8)."""
        batch, config = self.batch, self.config
        rows, device = max(config.max_num_batched_tokens, self.plan.largest_size), torch.device("cpu")
        source = BatchMetadataBuffers(
            max_rows=rows,
            max_num_seqs=config.max_num_seqs,
            max_blocks=-(-int(batch.seq_lens.max(initial=1)) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            window=config.window,
            device=device,
        )
        ids = np.zeros(batch.num_tokens, np.int32)
        source.write(batch, dealt_block_tables(batch, BLOCK_SIZE), ids, max(self.record.padded_tokens, len(ids)))
        target = ReplayMetadataBuffers(max_rows=rows, max_num_seqs=config.max_num_seqs, device=device)
        target.write(batch, source, self.padded_rows)
        return target

    def by_row(self) -> pd.DataFrame:
        """A line for each row of the replay batch and each pad: step's row, position, slot, request, window starts."""
        columns = {name: getattr(self.buffers, name)[: self.padded_rows].numpy() for name in ROW_COLUMNS}
        return pd.DataFrame(columns).rename_axis("buffer row")


def replay_batch_table(batches: dict[str, Batch], config: ServingConfig) -> pd.DataFrame:
    """When a step has a replay batch, by batch and by how the model runs: the rows it has, or a dash (S5, D2).

    The PIECEWISE columns are of a graph that does not break for replay, and of one that does; the last is of the plan
    of `config` as it is.
    """
    plan = make_plan(config)
    never, breaking = attrs.evolve(plan, trim_threshold=None), attrs.evolve(plan, model_sizes=plan.breaking_sizes)
    ways = {
        "eager": (plan, (), ()),
        "PIECEWISE, below the threshold": (never, never.model_sizes, ()),
        "PIECEWISE, from the threshold on": (breaking, breaking.model_sizes, ()),
        "as planned": (plan, plan.model_sizes, plan.full_sizes),
    }
    lines = {
        name: {
            way: _said(dispatch_step(batch, of, model_sizes=model, full_sizes=full, replay_sizes=of.replay_sizes))
            for way, (of, model, full) in ways.items()
        }
        for name, batch in batches.items()
    }
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("batch")


def _said(record: StepRecord) -> str:
    return f"{record.replay_rows} rows" if record.has_replay_batch else "–"


def gather_table(earlier: KeptRows, later: KeptRows, seed: int = 0) -> pd.DataFrame:
    """What the static buffers hold after two gathers, of `earlier` and then of `later`, a line a tensor (B2).

    Columns: rows of [0, r) that differ from the step's rows; elements of the pads [r, n) that are not zero; rows of
    the earlier batch that are still there beyond n, which no graph of size n reads.
    """
    specs = input_specs(TINY.hidden_size, TINY.hc_mult, torch.float32)
    buffers = StaticBuffers(specs, max(kept.plan.replay_sizes[-1] for kept in (earlier, later)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for kept in (earlier, later):
        tokens = kept.batch.num_tokens
        inputs = {
            spec.name: torch.randint(1, 999, (tokens, *spec.row_shape), generator=generator).to(spec.dtype)
            for spec in specs
        }
        rows = torch.from_numpy(kept.rows.rows)
        gather_into(rows, inputs, buffers.tensors, kept.padded_rows)
    r, n = later.rows.num_rows, later.padded_rows
    lines = {}
    for name, buffer in buffers.tensors.items():
        wrong = int((buffer[:r] != inputs[name][rows]).reshape(r, -1).any(1).sum())
        left = int(buffer[n:].reshape(buffer.shape[0] - n, -1).ne(0).any(1).sum())
        lines[name] = [wrong, int(buffer[r:n].count_nonzero()), left]
    columns = ["kept rows that differ", "pad elements not zero", "earlier rows beyond the size"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis("static buffer")
