"""Poison where a step must not look: buffers of the step before, and this step's pads once written (B2, S8)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from long_run.histories import Poison
from long_run.worlds import POISONED_IDS
from torch import Tensor

from replay_sim.decoder.layer import DecoderLayer
from replay_sim.decoder.step import StepRunner
from replay_sim.replay import graphs
from replay_sim.replay.context import ForwardContext

BATCH_BUFFERS = (
    *("positions", "slot_mapping", "window_start", "request_of_row", "input_ids", "num_rows"),
    *("query_start_loc", "computed", "request_window_start", "keeps_all"),
)
EXTREME_POSITIONS = (2**40, -5, -(2**63), 2**63 - 1)


class Interrupt(BaseException):
    """Stands for a keyboard interrupt."""


def fill(tensor: Tensor, poison: Poison) -> None:
    """Fill floats with the poison's float and integers with its integer."""
    value, integer = poison.value
    tensor.fill_(value if tensor.is_floating_point() else integer)


def poison_leftovers(runner: StepRunner, poison: Poison) -> None:
    """Fill all that a step leaves behind and the next one writes before it reads it.

    Break buffers are zero where no row was written, so only the rows that their flags name are filled.
    """
    for tensor in runner.replay_layers.inputs.tensors.values():
        fill(tensor, poison)
    outputs = runner.replay_layers.break_buffers
    written = outputs.written.amax(0).bool()
    for tensor in outputs.tensors.values():
        tensor[written] = poison.value[0]
    for name in BATCH_BUFFERS:
        fill(getattr(runner.contexts.batch, name), poison)
    for tensor in vars(runner.contexts.replay).values():
        if isinstance(tensor, Tensor):
            fill(tensor, poison)


@contextmanager
def poisoned_pads(runner: StepRunner, poison: Poison | None) -> Iterator[None]:
    """Inside, what a step writes into its pads is poison, all but what says that they are pads: slot and request.

    Pads of the model have ids whose embedding is poison. A breakable replay graph's rows are poisoned after the gather.
    In a one-launch graph nothing is: it writes the metadata of its pads and gathers by itself, over what
    `poison_leftovers` put there, and its replay batch counts its pads among its tokens.
    """
    if poison is None:
        yield
        return
    build, gather_into = runner.contexts.build, graphs.gather_into

    def build_and_poison(batch: Any, *rest: Any) -> ForwardContext:
        context = build(batch, *rest)
        _poison_rows(runner.contexts.batch, ("window_start",), context, poison)
        runner.contexts.batch.input_ids[context.num_tokens : context.padded_tokens] = list(Poison).index(poison)
        replayed = context.replay_batch
        if replayed is not None:
            _poison_rows(runner.contexts.replay, ("window_start_first", "window_start_rest"), replayed.context, poison)
        return context

    def gather_and_poison(rows: Tensor, inputs: Any, buffers: dict[str, Tensor], padded: int) -> None:
        gather_into(rows, inputs, buffers, padded)
        for tensor in buffers.values():
            assert not bool(tensor[len(rows) : padded].any()), (
                "a pad of the static buffers is not zero after the gather"
            )
            fill(tensor[len(rows) : padded], poison)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(runner.contexts, "build", build_and_poison))
        patches.enter_context(mock.patch.object(graphs, "gather_into", gather_and_poison))
        yield


def _poison_rows(buffers: Any, starts: tuple[str, ...], context: ForwardContext, poison: Poison) -> None:
    """Positions and window starts of the pads of a batch's or a replay batch's metadata."""
    pads = slice(context.num_tokens, context.padded_tokens)
    buffers.positions[pads] = EXTREME_POSITIONS[list(Poison).index(poison)]
    for name in starts:
        fill(getattr(buffers, name)[pads], poison)


@contextmanager
def interrupted_after(kv_writes: int) -> Iterator[None]:
    """Inside, an Interrupt comes instead of the KV write after so many, if the host writes that many."""
    write_kv = DecoderLayer.write_kv
    done: list[None] = []

    def write_or_interrupt(*arguments: Any) -> None:
        if len(done) == kv_writes:
            raise Interrupt
        done.append(None)
        write_kv(*arguments)

    with mock.patch.object(DecoderLayer, "write_kv", write_or_interrupt):
        yield


def nan_out(caches: list[Tensor], slots: Any) -> None:
    """Make every cache hold NaN in these slots."""
    for cache in caches:
        cache[slots] = torch.nan


assert len(EXTREME_POSITIONS) == len(Poison) == POISONED_IDS
