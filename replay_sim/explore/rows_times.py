"""Times of row selection on this machine: the reference beside the plain rule that it is proved against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import select_rows
from replay_sim.explore.kept_rows import BLOCK_SIZE, dealt_block_tables
from replay_sim.explore.plain_rows import plain_rows
from replay_sim.measure.timing import time_arms

WARM_UP = 2


def selection_times(num_reqs: int, window: int, *, rounds: int = 10, seed: int = 0) -> pd.DataFrame:
    """Host microseconds of selecting the rows of a step of `num_reqs` prefills, side by side, no batch repeated.

    Columns: median, p10, p90, n. Prompts have 1 to 2 windows of tokens.
    """
    rng = np.random.default_rng(seed)
    batches = [
        Batch(Request(int(length), 0, Phase.PREFILL) for length in rng.integers(1, 2 * window, num_reqs))
        for _ in range(rounds + WARM_UP)
    ]
    tables = [dealt_block_tables(batch, BLOCK_SIZE) for batch in batches]
    arms: dict[str, Callable[[int], object]] = {
        "reference, select_rows": lambda index: select_rows(batches[index], window),
        "plain rule, one row at a time": lambda index: plain_rows(batches[index], window, tables[index], BLOCK_SIZE),
    }
    timed = time_arms(arms, torch.device("cpu"), rounds=rounds, warm_up=WARM_UP)
    lines = {name: [timing.host_us, timing.p10, timing.p90, timing.n] for name, timing in timed.items()}
    return pd.DataFrame.from_dict(lines, orient="index", columns=["median µs", "p10 µs", "p90 µs", "n"]).round(0)
