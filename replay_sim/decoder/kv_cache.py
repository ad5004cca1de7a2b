"""The decoder's KV caches: a paged window cache a layer, and the shared cache of the KV-source layer."""

import torch
from torch import Tensor

from replay_sim.config.shapes import DecoderShape


class KVCache:
    """Latents by slot: `window[layer]` and `shared` are (num_slots, head_dim) act, zeroed when made.

    A slot is block * block_size + offset; all caches share one block table. Raises ValueError for num_slots
    below 1.
    """

    def __init__(self, shape: DecoderShape, num_slots: int, device: torch.device | str) -> None:
        if num_slots <= 0:
            raise ValueError(f"num_slots {num_slots} must be positive")
        dtype = getattr(torch, shape.dtype)

        def cache() -> Tensor:
            return torch.zeros(num_slots, shape.head_dim, dtype=dtype, device=device)

        self.window: list[Tensor] = [cache() for _ in range(shape.num_layers)]
        self.shared: Tensor = cache()
