"""Dummy batches: what a graph is captured on, made of ordinary requests (G1)."""

from __future__ import annotations

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.plan.dummy_batch import dummy_query_lens


def dummy_prefill(num_rows: int, max_num_seqs: int) -> Batch:
    """Prefills of `num_rows` tokens in all, every row kept, in at most `max_num_seqs` requests (A14)."""
    lengths = dummy_query_lens(num_rows, max_num_seqs)
    return Batch(Request(length, 0, Phase.PREFILL, all_rows_read=True) for length in lengths)


def dummy_decode(num_tokens: int, query_len: int, max_num_seqs: int) -> Batch:
    """Decodes of `query_len` tokens each, `num_tokens` in all (A6)."""
    lengths = dummy_query_lens(num_tokens, max_num_seqs, query_len)
    return Batch(Request(length, 0, Phase.DECODE) for length in lengths)
