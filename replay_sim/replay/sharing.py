"""Pool sharing: which memory the replay graphs may reuse, chosen from the model (O1-O4)."""

from __future__ import annotations

import enum

import attrs


class PoolSharing(enum.Enum):
    """Where the replay graphs' memory lives beside the model graphs'."""

    SHARED = "shared"
    """The model graphs' pool and stream: free blocks of model graphs are reused (O1)."""
    OWN_STREAM = "own_stream"
    """The same pool on another stream: nothing is reused, as a segment belongs to its stream (O2)."""
    OWN_POOL = "own_pool"
    """A pool of their own."""


@attrs.frozen
class SharingChoice:
    """An arrangement and why it was taken."""

    sharing: PoolSharing
    reason: str


def choose_sharing(*, has_early_aux: bool, override: PoolSharing | None = None) -> SharingChoice:
    """The arrangement for a model: shared unless early aux states are read after the replay layers (O3, O4)."""
    if override is not None:
        return SharingChoice(override, "set by hand")
    if has_early_aux:
        return SharingChoice(
            PoolSharing.OWN_STREAM,
            "early aux states live in the pool across the replay layers: sharing would overwrite them",
        )
    return SharingChoice(PoolSharing.SHARED, "no model-graph tensor in the pool is live while the replay layers run")
