"""Which replay-row counts any step can produce, and so which planned sizes any batch can select (P6)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_sim.plan.capture_plan import CapturePlan

Intervals = tuple[tuple[int, int], ...]


def reachable_rows(plan: "CapturePlan", *, all_rows_read: bool = True) -> Intervals:
    """Return the row counts that a replay batch can have, as disjoint ascending inclusive intervals.

    A step has 1 to max_num_seqs requests and at most max_num_batched_tokens tokens. A request is a prefill of
    any length, which keeps at most `window` rows (S1), a decode of at most query_len_decode tokens, or, if
    `all_rows_read`, a prefill that keeps all its rows. Two kinds of step have a replay batch (S5, D1, D2):

    - one in which a prefill trims, run eagerly or in a graph that breaks. With one trimmed prefill, of any
      length, the rows are `window` and what the other requests keep; more trimmed ones reach no further.
    - one in which none trims, in a graph that breaks: the rows are the tokens, from one more than the largest
      graph that does not break. A uniform decode that fits a FULL graph is none; its rows are out of reach
      only if no other batch has as many: if it takes all requests, each longer than what a prefill keeps.
    """
    longest = plan.model_sizes[-1] if plan.model_sizes else 0
    breaking = plan.breaking_sizes
    intervals = []
    budget = plan.max_num_batched_tokens
    if budget > plan.window and (budget > longest or breaking):
        others = _most_rows_untrimmed(plan, plan.max_num_seqs - 1, all_rows_read)
        intervals.append((plan.window, min(plan.window + others, budget - 1)))
    if breaking:
        below = [size for size in plan.model_sizes if size < breaking[0]]
        least = below[-1] + 1 if below else 1
        most = min(longest, budget, _most_rows_untrimmed(plan, plan.max_num_seqs, all_rows_read))
        if most >= least:
            intervals += _without_full_only(plan, least, most, all_rows_read)
    return _merged(intervals)


def _most_rows_untrimmed(plan: "CapturePlan", requests: int, all_rows_read: bool) -> int:
    """The most rows of that many requests of which none trims; every smaller positive count is possible."""
    if requests and all_rows_read:
        return plan.max_num_batched_tokens
    return requests * max(plan.window, plan.query_len_decode)


def _without_full_only(plan: "CapturePlan", least: int, most: int, all_rows_read: bool) -> list[tuple[int, int]]:
    """The interval without the one count that only a uniform decode in a FULL graph has, if there is one."""
    widest = plan.max_num_seqs * plan.query_len_decode
    only_full = (
        not all_rows_read
        and plan.query_len_decode > plan.window
        and bool(plan.full_sizes)
        and widest <= plan.full_sizes[-1]
    )
    if not only_full or not least <= widest <= most:
        return [(least, most)]
    return [part for part in ((least, widest - 1), (widest + 1, most)) if part[0] <= part[1]]


def _merged(intervals: list[tuple[int, int]]) -> Intervals:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def rows_selecting(plan: "CapturePlan", reachable: Intervals) -> list[tuple[int, Intervals]]:
    """Return every replay size with the reachable row counts that select it, those above the next smaller."""
    result = []
    previous = 0
    for size in plan.replay_sizes:
        parts = ((max(low, previous + 1), min(high, size)) for low, high in reachable)
        result.append((size, tuple(part for part in parts if part[0] <= part[1])))
        previous = size
    return result


def unreachable_sizes(plan: "CapturePlan", *, all_rows_read: bool = True) -> tuple[int, ...]:
    """Return the replay sizes that no batch can select."""
    reachable = reachable_rows(plan, all_rows_read=all_rows_read)
    return tuple(size for size, selecting in rows_selecting(plan, reachable) if not selecting)


def mostly_padding(plan: "CapturePlan") -> list[tuple[int, int, int]]:
    """Return (size, least, most) for reachable row counts that run at `size` on more pads than rows (P7)."""
    selecting = rows_selecting(plan, reachable_rows(plan))
    halves = [(size, low, min(high, (size - 1) // 2)) for size, intervals in selecting for low, high in intervals]
    return [(size, low, high) for size, low, high in halves if low <= high]
