"""A captured graph as plain data: its segments and eager breaks in order, each with a name that a reader knows."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from replay_sim.capture.breakable_graph import BreakableGraph, EagerBreak
from replay_sim.decoder.layer import DecoderLayer

NAMES = {"attention_break": "attention", "kv_write_break": "KV write", "replay_break": "replay layers"}


@attrs.frozen
class TimelineEntry:
    """One entry of a graph: `operations` captured in a segment, 0 in a break, which runs live."""

    is_break: bool
    label: str
    operations: int


def timeline_of(graph: BreakableGraph, layers: Sequence[DecoderLayer]) -> tuple[TimelineEntry, ...]:
    """The entries of `graph` in the order in which a replay runs them (C1); breaks name their layer of `layers`."""
    entries = []
    for entry in graph.entries:
        if isinstance(entry, EagerBreak):
            entries.append(TimelineEntry(True, _break_label(entry, layers), 0))
        else:
            number = sum(not earlier.is_break for earlier in entries) + 1
            entries.append(TimelineEntry(False, f"segment {number}", entry.num_operations))
    return tuple(entries)


def _break_label(entry: EagerBreak, layers: Sequence[DecoderLayer]) -> str:
    function = entry.function.__name__
    owners = [index for index, layer in enumerate(layers) if any(layer is argument for argument in entry.args)]
    where = f", layer {owners[0]}" if owners else ""
    return NAMES.get(function, function) + where
