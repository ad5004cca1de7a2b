"""One step by the clauses in plain Python: how it is dispatched, its rows, slots and window starts (S1-S8, D1-D4).

Nothing of the system is imported. Sizes, rows and positions are counts; modes and reasons are names of enum members.
"""

from collections.abc import Collection, Mapping, Sequence

import attrs


@attrs.frozen
class PlainRequest:
    """A request's part in one step: `length` tokens after `computed`, and the blocks that its cache slots lie in."""

    name: str
    length: int
    computed: int
    decodes: bool
    all_rows_read: bool
    window_start: int
    blocks: tuple[int, ...]

    def num_kept(self, window: int) -> int:
        """S1: a prefill keeps its last `window` rows, unless all are read; a decode keeps all."""
        return self.length if self.decodes or self.all_rows_read else min(self.length, window)


@attrs.frozen
class PlainRow:
    """A row of the step: its request's place in the batch, position, slot, and the lowest positions that it attends.

    `start` is of the layers up to the first replay layer, `start_rest` of those after it (S4).
    """

    request: int
    position: int
    slot: int
    start: int
    start_rest: int
    kept: bool


def rows_of(requests: Sequence[PlainRequest], window: int, block_size: int) -> list[PlainRow]:
    """The step's rows in batch order, pads left out."""
    rows = []
    for place, request in enumerate(requests):
        end = request.computed + request.length
        first_kept = end - request.num_kept(window)
        start_rest = request.window_start
        if first_kept > request.computed:
            start_rest = max(start_rest, end - window)
        for position in range(request.computed, end):
            block, offset = divmod(position, block_size)
            lowest = position - window + 1
            rows.append(
                PlainRow(
                    place,
                    position,
                    request.blocks[block] * block_size + offset,
                    max(request.window_start, lowest),
                    max(start_rest, lowest),
                    position >= first_kept,
                )
            )
    return rows


@attrs.frozen
class Needs:
    """What one rank asks of a step; `uniform` is a decode of the plan's length by every request, or an idle rank."""

    tokens: int
    requests: int
    uniform: bool
    kept: int
    trims: bool


def needs_of(requests: Sequence[PlainRequest], window: int, query_len_decode: int) -> Needs:
    """What a step with these requests asks for."""
    tokens = sum(request.length for request in requests)
    kept = sum(request.num_kept(window) for request in requests)
    uniform = all(request.decodes and request.length == query_len_decode for request in requests)
    return Needs(tokens, len(requests), uniform and bool(requests), kept, kept < tokens)


@attrs.frozen
class PlainRecord:
    """What the step's record must say (D4)."""

    num_tokens: int
    padded_tokens: int
    mode: str
    replay_rows: int
    padded_rows: int
    replay_mode: str | None
    reason: str
    num_reqs: int
    model_reason: str


@attrs.frozen
class Sizes:
    """The sizes of one kind of graph that are planned, and which of them were captured."""

    planned: tuple[int, ...]
    captured: Collection[int]

    def holding(self, count: int) -> int | None:
        """The smallest planned size that holds `count`."""
        return min((size for size in self.planned if size >= count), default=None)


def dispatch(own: Needs, others: Sequence[Needs], sizes: Mapping[str, Sizes], threshold: int | None) -> PlainRecord:
    """How a rank runs a step that it agrees on with others (D1-D3, G3, X1, X2); `sizes` by FULL, PIECEWISE, REPLAY."""
    all_needs = (own, *others)
    most = max(needs.tokens for needs in all_needs)
    mode, padded, model_reason = _model(most, all(needs.uniform for needs in all_needs), sizes)
    if mode == "NONE" and most:
        padded = max(own.tokens, 1)
    refusal = _refusal(mode, padded, most, any(needs.trims for needs in all_needs), threshold)
    if refusal:
        return PlainRecord(own.tokens, padded, mode, 0, 0, None, refusal, own.requests, model_reason)
    rows = max(needs.kept for needs in all_needs)
    size = sizes["REPLAY"].holding(rows)
    if size is not None and size in sizes["REPLAY"].captured:
        replay = (size, "PIECEWISE", "GRAPH")
    elif size is not None:
        replay = (max(own.kept, 1), "NONE", "NOT_CAPTURED")
    else:
        replay = (max(own.kept, 1), "NONE", "TOO_MANY_ROWS" if sizes["REPLAY"].planned else "NO_SIZES")
    return PlainRecord(own.tokens, padded, mode, own.kept, *replay, own.requests, model_reason)


def _model(tokens: int, uniform: bool, sizes: Mapping[str, Sizes]) -> tuple[str, int, str]:
    """D1: a planned size that was not captured is not replaced by a larger one."""
    if not tokens:
        return "NONE", 0, "EMPTY"
    full, size = sizes["FULL"].holding(tokens), sizes["PIECEWISE"].holding(tokens)
    if uniform and full in sizes["FULL"].captured:
        assert full is not None
        return "FULL", full, "FULL"
    if size is None:
        return "NONE", tokens, "TOO_MANY_TOKENS" if sizes["PIECEWISE"].planned else "NO_SIZES"
    return ("PIECEWISE", size, "PIECEWISE") if size in sizes["PIECEWISE"].captured else ("NONE", tokens, "NOT_CAPTURED")


def _refusal(mode: str, padded: int, tokens: int, trims: bool, threshold: int | None) -> str | None:
    """D2, S5: why there is no replay batch."""
    if not tokens:
        return "EMPTY"
    if mode == "FULL":
        return "FULL_GRAPH"
    if mode == "NONE":
        return None if trims else "NOTHING_TRIMS"
    if threshold is None:
        return "THRESHOLD_OFF"
    return None if padded >= threshold else "BELOW_THRESHOLD"
