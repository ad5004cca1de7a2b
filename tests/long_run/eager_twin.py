"""The eager twin: the decoder run without dispatch, capture, graphs or movement of rows, on metadata made plainly.

It shares the decoder's operations and weights with the system and nothing else, so that a step of as many padded rows
must equal it bit for bit. Its cache is its own, its pads hold zeros, and it holds no poison.
"""

from collections.abc import Sequence

import attrs
import torch
from long_run.plain_step import PlainRecord, PlainRow
from long_run.worlds import POISONED_IDS, World
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.metadata import AttentionMetadata
from replay_sim.decoder.kv_cache import KVCache
from replay_sim.decoder.layer import FIRST_REPLAY_WINDOW_KEY, REPLAY_WINDOW_KEY, WINDOW_KEY
from replay_sim.decoder.model import Decoder
from replay_sim.decoder.weights import DecoderWeights
from replay_sim.replay.context import ForwardContext, use_forward_context


@attrs.frozen
class TwinOutput:
    """Rows of the step without pads: the replay layers' outputs, zero where trimmed, and early aux states."""

    replay: tuple[Tensor, ...]
    early_aux: tuple[Tensor, ...]


class EagerTwin:
    """Runs a world's steps eagerly over a KV cache of its own."""

    def __init__(self, world: World, weights: DecoderWeights) -> None:
        self.world, self.device = world, weights.embed.device
        embed = weights.embed.clone()
        embed[:POISONED_IDS] = 0
        cache = KVCache(world.shape, world.num_blocks * world.block_size, self.device)
        self.caches = [*cache.window, cache.shared]
        self.decoder = Decoder(world.shape, attrs.evolve(weights, embed=embed), cache)

    @torch.no_grad()
    def step(
        self, rows: Sequence[PlainRow], ids: Sequence[int], tables: Sequence[Sequence[int]], record: PlainRecord
    ) -> TwinOutput:
        """The step on as many padded rows as `record` says; one token id a row, a block table a request."""
        table = torch.zeros((len(tables) + 1, self.world.max_blocks), dtype=torch.int32)
        for index, blocks in enumerate(tables):
            table[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        table = table.to(self.device)
        padded = record.padded_tokens
        whole = self._metadata(rows, [row.start for row in rows], padded, table)
        keys = (WINDOW_KEY, FIRST_REPLAY_WINDOW_KEY, REPLAY_WINDOW_KEY)
        context = self._context(len(rows), padded, dict.fromkeys(keys, whole))
        with use_forward_context(context):
            state = self.decoder.embed_and_start(self._column(ids, padded, 0, torch.int32), whole.positions)
            early_aux = self.decoder.run_first_layers(state)
            inputs = state.row_tensors()
            if record.replay_mode is None:
                outputs = self.decoder.run_replay_layers(inputs)
            else:
                self.decoder.write_batch_kv(inputs)
        if record.replay_mode is not None:
            outputs = self._replay(inputs, rows, record.padded_rows, table)
        count = len(rows)
        return TwinOutput(tuple(o[:count] for o in outputs), tuple(aux[:count] for aux in early_aux))

    def _replay(self, inputs: dict, rows: Sequence[PlainRow], padded: int, table: Tensor) -> tuple[Tensor, ...]:
        """The replay layers on the kept rows with zero rows after them, and their outputs at the step's rows."""
        kept = [index for index, row in enumerate(rows) if row.kept]
        gathered = {name: value.new_zeros((padded, *value.shape[1:])) for name, value in inputs.items()}
        for name, value in inputs.items():
            gathered[name][: len(kept)] = value[kept]
        kept_rows = [rows[index] for index in kept]
        metadata = {
            FIRST_REPLAY_WINDOW_KEY: self._metadata(kept_rows, [row.start for row in kept_rows], padded, table),
            REPLAY_WINDOW_KEY: self._metadata(kept_rows, [row.start_rest for row in kept_rows], padded, table),
        }
        with use_forward_context(self._context(len(kept), padded, metadata, kv_written=True)):
            outputs = self.decoder.run_replay_layers(gathered)
        scattered = []
        for output in outputs:
            target = output.new_zeros((len(rows), *output.shape[1:]))
            target[kept] = output[: len(kept)]
            scattered.append(target)
        return tuple(scattered)

    def _metadata(
        self, rows: Sequence[PlainRow], starts: Sequence[int], padded: int, table: Tensor
    ) -> AttentionMetadata:
        return AttentionMetadata(
            self._column([row.position for row in rows], padded, 0, torch.int64),
            self._column([row.slot for row in rows], padded, -1, torch.int64),
            self._column([row.request for row in rows], padded, -1, torch.int32),
            self._column(starts, padded, 0, torch.int64),
            table,
            self.world.block_size,
        )

    def _context(
        self, rows: int, padded: int, metadata: dict[str, AttentionMetadata], *, kv_written: bool = False
    ) -> ForwardContext:
        return ForwardContext(
            mode=CudagraphMode.NONE,
            num_tokens=rows,
            padded_tokens=padded,
            metadata=metadata,
            num_rows=self._column([rows], 1, 0, torch.int32),
            first_layer_kv_written=kv_written,
        )

    def _column(self, values: Sequence[int], padded: int, pad: int, dtype: torch.dtype) -> Tensor:
        return torch.tensor([*values, *[pad] * (padded - len(values))], dtype=dtype, device=self.device)
