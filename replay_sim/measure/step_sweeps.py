"""The sweeps of the steps suite: which batches and prompts each measures, on which pair of runners (issue 4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import DecoderShape
from replay_sim.measure.step_arms import RigSpec
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for


@attrs.frozen(kw_only=True, eq=False)
class TimedBatch:
    """One batch to measure under a token budget; `profiled`: its launches and kernel times are taken as well."""

    batch: Batch
    max_num_batched_tokens: int
    profiled: bool = True


@attrs.frozen(kw_only=True)
class Prompt:
    """A prompt that is prefilled as a whole, in chunks of the token budget."""

    prompt_tokens: int
    max_num_batched_tokens: int

    def chunks(self) -> tuple[Batch, ...]:
        """The steps of its prefill, in order."""
        return prompt_chunks(self.prompt_tokens, self.max_num_batched_tokens)


@attrs.frozen(kw_only=True)
class SweepPart:
    """What of a sweep is measured on one pair of runners."""

    spec: RigSpec
    batches: tuple[TimedBatch, ...]
    prompts: tuple[Prompt, ...] = ()


@attrs.frozen(kw_only=True)
class StepGrid:
    """The sizes that the sweeps take their values from, for one class of machine.

    `sizes` are the breaking capture sizes above the window, `small_sizes` those below it for decodes and short
    prompts, which are also sizes of FULL graphs. `num_blocks` of KV bound decodes: request counts and contexts whose
    product exceeds it are left out.
    """

    sizes: tuple[int, ...]
    small_sizes: tuple[int, ...]
    replay_sizes: tuple[int, ...]
    thin_sizes: tuple[int, ...]
    thin_requests: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_counts: tuple[int, ...]
    request_counts: tuple[int, ...]
    request_tokens: tuple[int, ...]
    mixed_decodes: tuple[int, ...]
    mixed_context: int
    prompts: tuple[int, ...]
    budgets: tuple[int, ...]
    budget_prompt: int
    windows: tuple[int, ...]
    window_tokens: tuple[int, ...]
    expert_shares: tuple[int, ...]
    expert_sizes: tuple[int, ...]
    num_blocks: int

    @property
    def budget(self) -> int:
        """The token budget of all sweeps that do not vary it."""
        return self.sizes[-1]

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest prompt."""
        return blocks_for(self.prompts[-1], BLOCK_SIZE)


GPU_GRID = StepGrid(
    sizes=(256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192),
    small_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
    replay_sizes=(128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192),
    thin_sizes=(512, 1024, 2048, 4096, 8192),
    thin_requests=(4, 16),
    contexts=(128, 1024, 4096, 16384),
    decode_counts=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    request_counts=(1, 2, 4, 8, 16, 32, 64),
    request_tokens=(2048, 8192),
    mixed_decodes=(4, 16, 63),
    mixed_context=2048,
    prompts=tuple(1 << power for power in range(7, 18)),
    budgets=(2048, 4096, 8192, 16384),
    budget_prompt=32768,
    windows=(64, 128, 256, 512, 1024),
    window_tokens=(2048, 8192),
    expert_shares=(48, 8, 96),
    expert_sizes=(256, 512, 1024, 2048, 4096, 8192),
    num_blocks=4224,
)
"""One rank's share of the model on a data-centre GPU; 4,224 blocks hold 64 contexts of 4K or 16 of 16K."""

CPU_GRID = StepGrid(
    sizes=(16, 32, 64),
    small_sizes=(1, 2, 4, 8),
    replay_sizes=(8, 16, 32),
    thin_sizes=(64,),
    thin_requests=(4,),
    contexts=(8, 40),
    decode_counts=(1, 3, 4),
    request_counts=(1, 4),
    request_tokens=(32, 64),
    mixed_decodes=(3,),
    mixed_context=20,
    prompts=(8, 64, 128),
    budgets=(32, 64),
    budget_prompt=128,
    windows=(4, 16),
    window_tokens=(32,),
    expert_shares=(2, 4),
    expert_sizes=(16, 32),
    num_blocks=24,
)
"""The same sweeps of a tiny decoder, to try them on a CPU."""


def rig_spec(grid: StepGrid, shape: DecoderShape) -> RigSpec:
    """The pair of runners that most sweeps share: all sizes of the grid, the shape's window and experts."""
    return RigSpec(
        window=shape.window,
        num_local_experts=shape.num_local_experts,
        model_sizes=(*grid.small_sizes, *grid.sizes),
        full_sizes=grid.small_sizes[:-1],
        replay_sizes=grid.replay_sizes,
        max_num_seqs=max(grid.request_counts),
        max_num_batched_tokens=grid.budget,
        num_blocks=grid.num_blocks,
        max_blocks=grid.max_blocks,
    )


def prefill(lengths: Sequence[int], computed: int = 0) -> Batch:
    """Prefills of these lengths after `computed` tokens each."""
    return Batch(Request(int(length), computed, Phase.PREFILL) for length in lengths)


def prompt_chunks(prompt_tokens: int, budget: int) -> tuple[Batch, ...]:
    """The steps that prefill one prompt, each of at most the budget's tokens."""
    starts = range(0, prompt_tokens, budget)
    return tuple(prefill([min(budget, prompt_tokens - start)], start) for start in starts)


def equal_lengths(tokens: int, requests: int) -> list[int]:
    """`tokens` dealt to the requests as evenly as possible."""
    short, longer = divmod(tokens, requests)
    return [short + 1] * longer + [short] * (requests - longer)


def unequal_lengths(tokens: int, requests: int, random: np.random.Generator) -> list[int]:
    """`tokens` dealt to the requests at random, at least one to each, between cuts that are all as likely."""
    cuts = np.sort(random.choice(np.arange(1, tokens), requests - 1, replace=False))
    lengths: list[int] = np.diff([0, *cuts, tokens]).tolist()
    return lengths


def _threshold(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """One request of each size, one token more, and between; several requests at fewer sizes, equal and unequal."""
    random = np.random.default_rng(seed)
    batches = []
    sizes = (grid.small_sizes[-1], *grid.sizes)
    for size, larger in itertools.pairwise(sizes):
        batches += [prefill([tokens]) for tokens in (size, size + 1, (size + larger) // 2)]
    batches.append(prefill([sizes[-1]]))
    for requests, size in itertools.product(grid.thin_requests, grid.thin_sizes):
        batches.append(prefill(equal_lengths(size, requests)))
        batches.append(prefill(unequal_lengths(size, requests, random)))
    return (_part(rig_spec(grid, shape), batches),)


def _decode(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """Uniform decodes by request count, capture sizes and between, and context."""
    batches = [
        Batch([Request(1, context, Phase.DECODE)] * requests)
        for requests, context in itertools.product(grid.decode_counts, grid.contexts)
        if requests * blocks_for(context + 1, BLOCK_SIZE) <= grid.num_blocks
    ]
    return (_part(rig_spec(grid, shape), batches),)


def _requests(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """Prefills of 1 to many requests a step, and a prefill chunk beside decodes."""
    batches = [
        prefill(equal_lengths(tokens, requests))
        for tokens, requests in itertools.product(grid.request_tokens, grid.request_counts)
    ]
    for tokens, decodes in itertools.product(grid.request_tokens, grid.mixed_decodes):
        mixed = [Request(1, grid.mixed_context, Phase.DECODE)] * decodes
        batches.append(Batch([*mixed, Request(tokens - decodes, 0, Phase.PREFILL)]))
    return (_part(rig_spec(grid, shape), batches),)


def _prompt(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """Prompts of all lengths as a whole; as steps those of one chunk, and the longer ones' last chunks."""
    spec, budget = rig_spec(grid, shape), grid.budget
    batches = [prompt_chunks(tokens, budget)[-1] for tokens in grid.prompts]
    prompts = tuple(Prompt(prompt_tokens=tokens, max_num_batched_tokens=budget) for tokens in grid.prompts)
    return (_part(spec, batches, prompts),)


def _window(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """Windows, each with its own kernels and graphs."""
    return tuple(
        _part(
            attrs.evolve(
                rig_spec(grid, shape),
                window=window,
                model_sizes=grid.window_tokens,
                full_sizes=(),
                replay_sizes=(window,),
            ),
            [prefill([tokens]) for tokens in grid.window_tokens],
        )
        for window in grid.windows
    )


def _budget(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """One long prompt in chunks of each budget as a whole; as steps its first and last chunk."""
    spec = attrs.evolve(
        rig_spec(grid, shape),
        model_sizes=grid.budgets,
        full_sizes=(),
        replay_sizes=(shape.window,),
        max_num_batched_tokens=grid.budgets[-1],
    )
    prompts = tuple(Prompt(prompt_tokens=grid.budget_prompt, max_num_batched_tokens=budget) for budget in grid.budgets)
    batches = tuple(
        TimedBatch(batch=chunk, max_num_batched_tokens=prompt.max_num_batched_tokens)
        for prompt in prompts
        for chunk in (prompt.chunks()[0], prompt.chunks()[-1])
    )
    return (SweepPart(spec=spec, batches=batches, prompts=prompts),)


def _experts(grid: StepGrid, shape: DecoderShape, seed: int) -> tuple[SweepPart, ...]:
    """Expert shares of a rank: with few experts launches bound the step, with many their weights do."""
    return tuple(
        _part(
            attrs.evolve(
                rig_spec(grid, shape),
                num_local_experts=share,
                model_sizes=grid.expert_sizes,
                full_sizes=(),
                replay_sizes=(shape.window,),
            ),
            [prefill([tokens]) for tokens in grid.expert_sizes],
        )
        for share in grid.expert_shares
    )


def _part(spec: RigSpec, batches: Sequence[Batch], prompts: tuple[Prompt, ...] = ()) -> SweepPart:
    """A part under the pair's own token budget."""
    timed = [TimedBatch(batch=batch, max_num_batched_tokens=spec.max_num_batched_tokens) for batch in batches]
    return SweepPart(spec=spec, batches=tuple(timed), prompts=prompts)


STEP_SWEEPS: dict[str, Callable[[StepGrid, DecoderShape, int], tuple[SweepPart, ...]]] = {
    "threshold": _threshold,
    "decode": _decode,
    "requests": _requests,
    "prompt": _prompt,
    "experts": _experts,
    "window": _window,
    "budget": _budget,
}
"""The sweeps of steps, in an order in which neighbours share runners."""
