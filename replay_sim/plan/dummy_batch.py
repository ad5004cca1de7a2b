"""The dummy batches that graphs are captured on: their query lengths, and the cache slots that they need."""

from replay_sim.plan.capture_plan import CapturePlan


def dummy_query_lens(size: int, max_num_seqs: int, query_len: int | None = None) -> tuple[int, ...]:
    """Return the query lengths of a dummy batch of `size` rows, of as many requests as a step allows (A14).

    With `query_len`, all lengths are that (A6); without, they differ by at most one.

    Raises:
        ValueError: a size that is no multiple of `query_len`, or takes more than `max_num_seqs` requests.
    """
    if query_len is None:
        requests = min(size, max_num_seqs)
        short, longer = divmod(size, requests)
        return (short + 1,) * longer + (short,) * (requests - longer)
    requests, rest = divmod(size, query_len)
    if rest or requests > max_num_seqs:
        raise ValueError(
            f"capture size {size} must be a multiple of query length {query_len} and at most that of "
            f"max_num_seqs {max_num_seqs}"
        )
    return (query_len,) * requests


def check_cache_slots(plan: CapturePlan, num_slots: int) -> None:
    """Refuse, before any capture, a plan whose largest graph needs more KV slots than there are (A5).

    Raises:
        ValueError: it names the size and the slots.
    """
    for name in ("replay_sizes", "model_sizes", "full_sizes"):
        sizes: tuple[int, ...] = getattr(plan, name)
        if sizes and sizes[-1] > num_slots:
            raise ValueError(f"{name}: {sizes[-1]} is not allowed; the KV cache has {num_slots} slots")
