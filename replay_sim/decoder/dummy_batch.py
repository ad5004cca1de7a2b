"""Dummy batches: what a graph is captured on, made of ordinary requests (G1)."""

from __future__ import annotations

from replay_sim.batch.request import Batch, Phase, Request


def split_evenly(total: int, parts: int) -> list[int]:
    """`parts` numbers that differ by at most one and add up to `total`."""
    small, larger = divmod(total, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def dummy_prefill(num_rows: int, max_num_seqs: int) -> Batch:
    """Prefills of `num_rows` tokens in all, every row kept, in at most `max_num_seqs` requests."""
    lengths = split_evenly(num_rows, min(num_rows, max_num_seqs))
    return Batch(tuple(Request(length, 0, Phase.PREFILL, all_rows_read=True) for length in lengths))


def dummy_decode(num_tokens: int, query_len: int) -> Batch:
    """Decodes of `query_len` tokens each; `num_tokens` is a multiple of it."""
    return Batch(tuple(Request(query_len, 0, Phase.DECODE) for _ in range(num_tokens // query_len)))
