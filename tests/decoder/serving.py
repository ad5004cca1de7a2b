"""Serves requests step by step: hands out scattered blocks, draws token ids, and tracks what a request holds (S4)."""

from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import CaptureBackend
from replay_sim.config.shapes import TINY, DecoderShape
from replay_sim.decoder.step import StepOutput, StepRunner
from replay_sim.plan.capture_plan import CapturePlan

WINDOW, BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS, MAX_SEQS = TINY.window, 8, 40, 330, 16


def make_plan(**changes) -> CapturePlan:
    """Three model graphs, of which two break, decodes of up to four requests in full graphs, three replay graphs."""
    settings = {
        "window": WINDOW,
        "model_sizes": (16, 64, 256),
        "full_sizes": (2, 4),
        "replay_sizes": (8, 32, 128),
        "trim_threshold": 32,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": 320,
    }
    return CapturePlan(**(settings | changes))


def make_runner(
    backend: CaptureBackend, plan: CapturePlan | None = None, shape: DecoderShape = TINY, *, captured: bool = True, **kw
) -> StepRunner:
    settings = {"num_blocks": NUM_BLOCKS, "max_blocks": MAX_BLOCKS, "block_size": BLOCK_SIZE} | kw
    runner = StepRunner(shape, plan or make_plan(), backend, **settings)
    if captured:
        runner.capture_model_graphs()
        runner.capture_replay_graphs()
    return runner


@attrs.frozen
class Asked:
    """What one request is to compute in one step."""

    name: str
    query_len: int
    phase: Phase = Phase.PREFILL
    all_rows_read: bool = False


def prefill(name: str, query_len: int, *, keeps: bool = False) -> Asked:
    return Asked(name, query_len, Phase.PREFILL, keeps)


def decode(name: str, query_len: int = 1) -> Asked:
    return Asked(name, query_len, Phase.DECODE)


def draw_id(name: str, position: int) -> int:
    """The token of a request at a position."""
    return (sum(map(ord, name)) * 37 + position * 11) % TINY.vocab_size


@attrs.define
class Serving:
    """The requests that one runner serves: per name its computed tokens, blocks and window start."""

    runner: StepRunner
    computed: dict[str, int] = attrs.field(factory=dict)
    tables: dict[str, list[int]] = attrs.field(factory=dict)
    window_starts: dict[str, int] = attrs.field(factory=dict)
    free: list[int] = attrs.field(
        factory=lambda: np.random.default_rng(3).permutation(NUM_BLOCKS).tolist(),
    )

    def arguments(self, asked: list[Asked]) -> tuple[Batch, list[npt.NDArray[np.int32]], npt.NDArray[np.int32]]:
        """What `step` takes for these requests, blocks handed out."""
        requests, tables, ids = [], [], []
        for ask in asked:
            computed = self.computed.setdefault(ask.name, 0)
            start = self.window_starts.setdefault(ask.name, 0)
            requests.append(Request(ask.query_len, computed, ask.phase, ask.all_rows_read, start))
            table = self.tables.setdefault(ask.name, [])
            while len(table) * self.runner.block_size < computed + ask.query_len:
                table.append(self.free.pop())
            tables.append(np.array(table, np.int32))
            ids += [draw_id(ask.name, position) for position in range(computed, computed + ask.query_len)]
        return Batch(requests), tables, np.array(ids, np.int32)

    def step(self, asked: list[Asked]) -> StepOutput:
        """Run one step and move its requests on."""
        output = self.runner.step(*self.arguments(asked))
        for ask in asked:
            self.computed[ask.name] += ask.query_len
            kept_all = ask.phase is Phase.DECODE or ask.all_rows_read or ask.query_len <= WINDOW
            if output.record.replay_mode is not None and not kept_all:
                lowest = self.computed[ask.name] - WINDOW
                self.window_starts[ask.name] = max(self.window_starts[ask.name], lowest)
        return output


def slots_of(serving: Serving, asked: list[Asked], computed: Callable[[str], int]) -> set[int]:
    """The cache slots of a step's rows."""
    size = serving.runner.block_size
    return {
        serving.tables[ask.name][position // size] * size + position % size
        for ask in asked
        for position in range(computed(ask.name), computed(ask.name) + ask.query_len)
    }
