"""What bounds the scheduler's steps, and what its requests draw from a seed."""

from typing import Any, Self

import attrs

from replay_sim.config.serving import ServingConfig
from replay_sim.workload.kv_blocks import BLOCK_SIZE


@attrs.frozen
class SchedulerSettings:
    """What bounds a step, and what the requests draw from `seed`.

    num_speculative_tokens: draft tokens of each decode beside its own. acceptance_rate: the chance that a
    draft token is accepted given that those before it were; 1 accepts all. prompt_logprobs_share: the share
    of requests whose prompt rows are all read. num_blocks: KV blocks of block_size tokens, None for no bound.
    prefix_cache_blocks: blocks of 512 prompt tokens that the prefix cache holds, 0 for none. window: tokens before
    the end of a prefix hit that are computed again. ValueError names the setting, its value and what is allowed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    acceptance_rate: float = 1.0
    prompt_logprobs_share: float = 0.0
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    prefix_cache_blocks: int = 0
    window: int = 0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        least = {"max_num_seqs": 1, "num_speculative_tokens": 0, "prefix_cache_blocks": 0, "window": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least {bound}")
        for name in ("acceptance_rate", "prompt_logprobs_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be from 0 to 1")
        if self.max_num_batched_tokens < self.query_len_decode:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: it must hold one decode, which is "
                f"{self.query_len_decode} tokens with num_speculative_tokens {self.num_speculative_tokens}"
            )

    @classmethod
    def from_config(cls, config: ServingConfig, **others: Any) -> Self:
        """The settings of a serving config, and under their names those that it does not hold."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_speculative_tokens=config.num_speculative_tokens,
            window=config.window,
            **others,
        )

    @property
    def query_len_decode(self) -> int:
        """Tokens of a decode in a step."""
        return self.num_speculative_tokens + 1
