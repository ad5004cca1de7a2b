"""Plain step costs and drawn steps that the tests of tuning share."""

from collections import Counter

import numpy as np

from replay_sim.config import ServingConfig
from replay_sim.explore.tuning_steps import StepCounts

LAYERS, REPLAY_LAYERS = 40, 20


class PlainCosts:
    """Device time linear in rows; eager layers wait for their launches; graphs cost a little each."""

    source, error = "a plain law", None

    def model_us(self, padded_tokens: int, mode: str, breaks: bool) -> float:
        layers = LAYERS - REPLAY_LAYERS if breaks else LAYERS
        device = layers * (60 + 0.6 * padded_tokens)
        if mode == "NONE":
            return max(device, layers * 300) + layers * 40
        return device + (layers * 15 if mode == "PIECEWISE" else 0)

    def replay_us(self, padded_rows: int, graph: bool) -> float:
        device = REPLAY_LAYERS * (60 + 0.6 * padded_rows)
        return device + (320 if graph else max(0, REPLAY_LAYERS * 300 - device) + 800)

    def guesses(self, *_: object) -> tuple[str, ...]:
        return ()

    def seconds(self, record: object) -> float:
        return 0.01


def drawn_steps(config: ServingConfig, seed: int, count: int = 300) -> StepCounts:
    """Steps that the config's scheduler could make: uniform decodes, and prefills beside decodes."""
    rng = np.random.default_rng(seed)
    counts: StepCounts = Counter()
    length, budget = config.query_len_decode, config.max_num_batched_tokens
    for _ in range(count):
        decodes = int(rng.integers(0, min(config.max_num_seqs, budget // length) + 1))
        if decodes and rng.random() < 0.5:
            counts[decodes * length, decodes * length, True] += int(rng.integers(1, 5))
            continue
        decodes = min(decodes, config.max_num_seqs - 1)
        room = max(1, budget - decodes * length)
        prompt = int(min(room, np.exp(rng.normal(5.5, 1.5)) + 1))
        kept = decodes * length + min(prompt, config.window)
        counts[min(budget, decodes * length + prompt), min(budget, kept), False] += 1
    return counts
