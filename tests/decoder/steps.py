"""Forward contexts of small steps over one KV cache, built row by row without the batch package."""

import attrs
import torch
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.metadata import AttentionMetadata
from replay_sim.config.shapes import DecoderShape
from replay_sim.replay.context import ForwardContext

BLOCK_SIZE, BLOCKS_PER_REQUEST, MAX_REQUESTS = 4, 16, 4
NUM_SLOTS = BLOCK_SIZE * BLOCKS_PER_REQUEST * MAX_REQUESTS
KEYS = ("window", "first_replay_window", "replay_window")


@attrs.frozen
class Step:
    """The rows of one step, padded: ids int32, positions int64 (T,), and its layers' context."""

    input_ids: Tensor
    positions: Tensor
    context: ForwardContext
    num_rows: int


def block_table() -> Tensor:
    """The blocks of MAX_REQUESTS requests, dealt in a scattered order."""
    blocks = torch.randperm(MAX_REQUESTS * BLOCKS_PER_REQUEST, generator=torch.Generator().manual_seed(3))
    return blocks.view(MAX_REQUESTS, BLOCKS_PER_REQUEST).int()


def make_step(shape: DecoderShape, spans: list[tuple[int, int]], padded: int, kv_written: bool = False) -> Step:
    """A step in which request r computes positions spans[r]; an id depends on its place alone."""
    table = block_table()
    rows = [(request, p) for request, (start, end) in enumerate(spans) for p in range(start, end)]
    pads = padded - len(rows)
    slots = [int(table[request, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for request, p in rows]
    metadata = AttentionMetadata(
        positions=torch.tensor([p for _, p in rows] + [0] * pads),
        slot_mapping=torch.tensor(slots + [-1] * pads),
        request_of_row=torch.tensor([request for request, _ in rows] + [-1] * pads, dtype=torch.int32),
        window_start=torch.tensor([max(0, p - shape.window + 1) for _, p in rows] + [0] * pads),
        block_table=table,
        block_size=BLOCK_SIZE,
    )
    ids = [(31 * request + 7 * p) % shape.vocab_size for request, p in rows] + [0] * pads
    context = ForwardContext(
        mode=CudagraphMode.NONE,
        num_tokens=len(rows),
        padded_tokens=padded,
        metadata={key: metadata for key in KEYS},
        num_rows=torch.tensor([len(rows)], dtype=torch.int32),
        first_layer_kv_written=kv_written,
    )
    return Step(torch.tensor(ids, dtype=torch.int32), metadata.positions, context, len(rows))
