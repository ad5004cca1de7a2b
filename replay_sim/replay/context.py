"""The forward context: what one step's layers and eager breaks read, live, beside their tensors (C5, L5)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager

import attrs
import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.metadata import AttentionMetadata


@attrs.frozen
class ReplayBatch:
    """The kept rows of one step, with a forward context of their own, like a microbatch (S2, S3).

    `rows` int64 (r,) are the batch's rows that are kept, ascending; `output_row_of` int32 (max rows,) is their inverse,
    the kept row that lands at each of the step's rows or -1. `context` is padded to the replay graph's size, or to r
    rows where the replay layers run eagerly. A one-launch graph writes what all of them hold on the device, so that its
    `rows` are all of its size, the pads too, and so are its context's `num_tokens`.
    """

    rows: torch.Tensor
    context: ForwardContext
    output_row_of: torch.Tensor


@attrs.frozen
class ForwardContext:
    """One step as its layers see it.

    `metadata` is keyed by KV group, each padded to `padded_tokens` rows. `num_rows` int32 (1,) is the count of real
    rows on the device, at an address that never changes, because a graph cannot read the host.
    `first_layer_kv_written` says that the first replay layer's KV was written before for every row (L3).
    """

    mode: CudagraphMode
    num_tokens: int
    padded_tokens: int
    metadata: Mapping[str, AttentionMetadata]
    num_rows: torch.Tensor
    replay_batch: ReplayBatch | None = None
    first_layer_kv_written: bool = False


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


def get_forward_context() -> ForwardContext:
    """The forward context of the step that runs in this thread; RuntimeError outside a step."""
    if _current.context is None:
        raise RuntimeError("no forward context is set: run layers inside `with use_forward_context(context):`")
    return _current.context


def has_forward_context() -> bool:
    """Whether a step runs in this thread."""
    return _current.context is not None


class _Use:
    """A context manager of its own: a generator's costs a step several microseconds."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before = _current.context
        _current.context = self._context

    def __exit__(self, *_: object) -> None:
        _current.context = self._before


def use_forward_context(context: ForwardContext) -> AbstractContextManager[None]:
    """Makes `context` this thread's forward context inside, and the one before it again after."""
    return _Use(context)
