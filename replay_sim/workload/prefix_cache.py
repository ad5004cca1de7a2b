"""The prefix cache: a finite number of hashed prompt blocks, the longest unused of them given up first."""

from collections import OrderedDict
from collections.abc import Sequence

PREFIX_BLOCK_SIZE = 512


class PrefixCache:
    """Which full blocks of prompts are cached, by hash, and how many running requests hold each of them.

    Only a block that no request holds can be evicted: the one released longest ago, and of one request's blocks
    its last first, so that what is left is a prefix. A block of block_size tokens is known by its hash, which
    stands for all tokens of its prompt up to its end.
    """

    def __init__(self, num_blocks: int, block_size: int = PREFIX_BLOCK_SIZE) -> None:
        """ValueError names a bound that is not positive."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Blocks that are cached, held or not."""
        return len(self._holders) + len(self._unused)

    def hit(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of the longest cached prefix: whole blocks, and never the whole prompt."""
        most = min(len(hashes), (prompt_tokens - 1) // self.block_size)
        for index in range(most):
            if hashes[index] not in self._holders and hashes[index] not in self._unused:
                return index * self.block_size
        return most * self.block_size

    def hold(self, hashes: Sequence[int], held: int, num_tokens: int) -> int:
        """Hold a prompt's full blocks up to `num_tokens`, of which it holds the first `held`; how many it then holds.

        A block that is not cached becomes so; where all blocks are held by requests, it and those after it do not.
        """
        full = min(len(hashes), num_tokens // self.block_size)
        for index in range(held, full):
            if not self._hold(hashes[index]):
                return index
        return max(held, full)

    def release(self, hashes: Sequence[int], held: int) -> None:
        """Let go of a prompt's first `held` blocks; they stay cached until their room is needed."""
        for block in reversed(hashes[:held]):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._unused[block] = None

    def _hold(self, block: int) -> bool:
        """Hold one block, cached now if it was not; False where there is no room for it."""
        if block in self._holders:
            self._holders[block] += 1
            return True
        if block in self._unused:
            del self._unused[block]
        elif self.num_used == self.num_blocks:
            if not self._unused:
                return False
            self._unused.popitem(last=False)
        self._holders[block] = 1
        return True


def computed_after_hit(hit: int, window: int) -> int:
    """Tokens that a request with this hit starts from: its last window is computed again.

    The replay layers' window KV is not cached, so rows from hit - window on run again; a hit no longer than the
    window saves nothing and is not taken (issue 6).
    """
    return hit - window if hit > window else 0
