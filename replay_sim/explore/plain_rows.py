"""The kept rows by a plain rule, one row at a time: what of a row can still be read, and what is held of a request."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from replay_sim.batch.metadata import BlockTables
from replay_sim.batch.request import Batch, Phase, Request


@attrs.frozen
class PlainRow:
    """One kept row of the step: its index in the step, its position, slot and request, and where its windows start.

    `window_start_first` is the first replay layer's, `window_start_rest` that of the layers after it.
    """

    row: int
    position: int
    slot: int
    request: int
    window_start_first: int
    window_start_rest: int


@attrs.frozen
class PlainRows:
    """The kept rows of a batch, the cumulative kept length, and the lowest position that each request holds (S2-S4)."""

    rows: tuple[PlainRow, ...]
    query_start_loc: tuple[int, ...]
    window_starts: tuple[int, ...]


def is_needed(request: Request, position: int, window: int) -> bool:
    """Whether anything can still read what the replay layers make of the row at `position` (S1).

    Its output is read if it is the request's last, a decode's, or asked for. Its KV is read if it lies in the window
    of the request's last row: no later row looks further back.
    """
    last = request.seq_len - 1
    output_is_read = position == last or request.phase is Phase.DECODE or request.all_rows_read
    return output_is_read or position > last - window


def lowest_held(request: Request, kept: Sequence[int]) -> int:
    """Where the unbroken run of positions begins that ends at the last one and whose KV the later layers hold (S4).

    They hold what was held before the step, and the positions `kept` in it.
    """
    position = request.seq_len
    while position - 1 in kept or request.window_start <= position - 1 < request.computed:
        position -= 1
    return position


def plain_rows(batch: Batch, window: int, block_tables: BlockTables, block_size: int) -> PlainRows:
    """All that `select_rows` and the metadata buffers say of a batch, by the two rules above (S1-S4, S7)."""
    rows: list[PlainRow] = []
    starts, window_starts, first_row = [0], [], 0
    for index, request in enumerate(batch.requests):
        positions = range(request.computed, request.seq_len)
        kept = [position for position in positions if is_needed(request, position, window)]
        held = lowest_held(request, kept)
        for position in kept:
            rows.append(
                PlainRow(
                    row=first_row + position - request.computed,
                    position=position,
                    slot=int(block_tables[index][position // block_size]) * block_size + position % block_size,
                    request=index,
                    window_start_first=max(request.window_start, position - window + 1),
                    window_start_rest=max(held, position - window + 1),
                )
            )
        first_row += request.query_len
        starts.append(len(rows))
        window_starts.append(held)
    return PlainRows(tuple(rows), tuple(starts), tuple(window_starts))
