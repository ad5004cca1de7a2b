"""Token ids for a workload that only states lengths: drawn from request and position, so that chunks agree."""

import zlib

import numpy as np
import numpy.typing as npt

from replay_sim.batch.request import Batch


def token_ids(batch: Batch, vocab_size: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """An id below `vocab_size` for every row, int32 (T), the same for a request's position in any chunking.

    Sampling is not modelled: a decode's tokens are drawn like a prompt's.
    """
    names = np.array([zlib.crc32(name.encode(), seed) for name in batch.request_ids], np.uint64)
    mixed = batch.positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.repeat(names, batch.query_lens) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(32)
    return (mixed % np.uint64(vocab_size)).astype(np.int32)
