"""The dummy batches that graphs are captured on: their query lengths, and the cache slots that they need."""

from replay_sim.plan.capture_plan import CapturePlan

_SETTINGS = {
    "replay_sizes": "decoder_replay_cudagraph_capture_sizes",
    "model_sizes": "cudagraph_capture_sizes",
    "full_sizes": "cudagraph_capture_sizes",
}


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


def check_cache_slots(plan: CapturePlan, num_slots: int, request_slots: int | None = None) -> None:
    """Refuse, before any capture, a plan whose largest graph needs more KV slots than there are (A5).

    `request_slots` are those that one request's block table holds, None for no bound.

    Raises:
        ValueError: it names the size, the slots and the setting.
    """
    for name in ("replay_sizes", "model_sizes", "full_sizes"):
        sizes: tuple[int, ...] = getattr(plan, name)
        if sizes and sizes[-1] > num_slots:
            raise ValueError(
                f"{name}: {sizes[-1]} is not allowed; the KV cache has {num_slots} slots: give it more blocks, or set "
                f"{_SETTINGS[name]} to a smaller maximum"
            )
        longest = max(dummy_query_lens(sizes[-1], plan.max_num_seqs)) if sizes else 0
        if request_slots is not None and longest > request_slots:
            raise ValueError(
                f"{name}: {sizes[-1]} is not allowed; it is captured on a request of {longest} tokens, and a block "
                f"table holds {request_slots} slots: raise max_blocks, or set {_SETTINGS[name]} to a smaller maximum"
            )
