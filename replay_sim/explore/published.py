"""Times that others published, as they stand in their sources, for figures that put ours beside them."""

from __future__ import annotations

import pandas as pd

TTFT_SOURCE = "vLLM project blog, 2026-10-07: DeepSeek-V4.1-Flash, one request, GB200, median of 3, prefix caching off"
TTFT_ROWS = (
    ("TP4", 1024, 160.9, 165.9, 103.3),
    ("TP4", 4096, 165.4, 172.5, 107.0),
    ("TP4", 8192, 170.0, 177.8, 112.5),
    ("TP4", 32768, 540.1, 376.0, 327.8),
    ("TP4", 131072, 2267.0, 1522.0, 1392.0),
    ("DEP2", 1024, 103.8, 116.2, 72.5),
    ("DEP2", 4096, 135.3, 117.4, 92.3),
    ("DEP2", 8192, 246.9, 164.1, 159.4),
    ("DEP2", 32768, 983.1, 617.8, 609.8),
    ("DEP2", 131072, 3950.0, 2518.0, 2460.0),
)
"""Parallelism, prompt tokens, and milliseconds to the first token: replay off, replay eager, replay graphs."""

CALLS_SOURCE = (
    "tant2tls/Deepseek-serving at 84d0431, report on 8 H100, TP8 and EP8 (48 experts a rank): one prefill chunk "
    "of 8,192 tokens, layers on all of its rows and on 128 replayed rows"
)
H100_CALLS_MS = {
    "attention": (1.25, 0.024),
    "expert gate and up": (3.327, 0.557),
    "expert down": (1.877, 0.301),
    "dense, q and kv": (0.218303, 0.017859),
    "dense, q up": (0.164727, 0.014754),
    "dense, output": (0.17708, 0.014946),
    "shared expert up": (0.101903, 0.01501),
    "shared expert down": (0.1164, 0.015105),
}
"""Median milliseconds of a call on 8,192 rows and on 128; which dense product is which follows from its shape."""

OUR_CALLS = {
    "attend_shared": "attention",
    "expert_w13": "expert gate and up",
    "expert_w2": "expert down",
    "wqkv_a": "dense, q and kv",
    "wq_b": "dense, q up",
    "wo_b": "dense, output",
    "shared_w13": "shared expert up",
    "shared_w2": "shared expert down",
}
"""The operations of a `calls` record, and the published call that each stands beside."""


def ttft_table() -> pd.DataFrame:
    """The published times to the first token: ms, and both replay arms in % of replay off."""
    table = pd.DataFrame(
        TTFT_ROWS, columns=["parallelism", "prompt_tokens", "replay_off", "replay_eager", "replay_graphs"]
    )
    for arm in ("replay_eager", "replay_graphs"):
        table[f"{arm}, %"] = (100 * table[arm] / table.replay_off).round(1)
    return table
