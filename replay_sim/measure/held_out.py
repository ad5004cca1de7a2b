"""Which batches of a sweep are held out from fitting: chosen by seed before anything is measured (issue 4, point 2)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

ONE_IN = 5
LEAST_SIZES = 6
"""Distinct capture sizes in a sweep from which on one of them, not at either end, is held out as a whole."""


def choose_held_out(sweep: str, num_tokens: Sequence[int], sizes: Sequence[int], seed: int) -> tuple[bool, ...]:
    """One flag a batch: a fifth of the sweep's batches, the same for the same seed and sweep.

    `num_tokens` are the batches', `sizes` the ascending capture sizes. Where there are enough sizes, all batches that
    are padded to one of them are held out, and among the rest one that fills a size and one that exceeds it by one.
    """
    count = len(num_tokens) // ONE_IN
    random = np.random.default_rng([seed, zlib.crc32(sweep.encode())])
    order = [int(index) for index in random.permutation(len(num_tokens))]
    padded = [min((size for size in sizes if size >= tokens), default=None) for tokens in num_tokens]
    chosen: list[int] = []
    inner = sorted({size for size in padded if size is not None})[1:-1]
    if len(inner) >= LEAST_SIZES - 2:
        fitting = [size for size in inner if padded.count(size) <= max(1, count - 2)]
        if fitting:
            whole = fitting[int(random.integers(len(fitting)))]
            chosen += [index for index in order if padded[index] == whole]
    filling = [index for index in order if num_tokens[index] in sizes]
    exceeding = [index for index in order if num_tokens[index] - 1 in sizes]
    for group in (filling, exceeding):
        chosen += [index for index in group if index not in chosen][: 1 if len(chosen) < count else 0]
    chosen += [index for index in order if index not in chosen][: max(0, count - len(chosen))]
    return tuple(index in chosen for index in range(len(num_tokens)))
