"""The blocks of a paged KV cache, and each request's table of them."""

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 64


class OutOfBlocksError(RuntimeError):
    """The KV cache has fewer free blocks than a request needs; the message names the numbers."""


class BlockTable:
    """The block ids of one request in order of position; they are only ever appended to."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self._ids = np.empty(8, np.int32)

    def append(self, ids: list[int]) -> None:
        """Add blocks at the end. Views handed out before stay as they were."""
        end = self.num_blocks + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[: self.num_blocks] = self._ids[: self.num_blocks]
            self._ids = grown
        self._ids[self.num_blocks : end] = ids
        self.num_blocks = end

    def ids(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """The blocks that hold the first `num_tokens` tokens, int32, read-only."""
        view = self._ids[: blocks_for(num_tokens, self.block_size)]
        view.flags.writeable = False
        return view


class BlockPool:
    """Hands out block ids and takes them back; with num_blocks None there is no end to them."""

    def __init__(self, num_blocks: int | None, block_size: int = BLOCK_SIZE) -> None:
        """ValueError names a bound that is not positive."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_used = 0
        self._returned: list[int] = []
        self._fresh = 0

    @property
    def num_free(self) -> int | None:
        """Blocks that can still be handed out, None without a bound."""
        return None if self.num_blocks is None else self.num_blocks - self.num_used

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Give the table what it lacks to hold `num_tokens` tokens; OutOfBlocksError if it cannot."""
        count = blocks_for(num_tokens, self.block_size) - table.num_blocks
        if count <= 0:
            return
        if self.num_free is not None and count > self.num_free:
            raise OutOfBlocksError(
                f"{num_tokens} tokens need {count} more KV blocks of {self.block_size} tokens: "
                f"{self.num_free} of num_blocks {self.num_blocks} are free"
            )
        reused = min(count, len(self._returned))
        ids = [self._returned.pop() for _ in range(reused)]
        ids.extend(range(self._fresh, self._fresh + count - reused))
        self._fresh += count - reused
        self.num_used += count
        table.append(ids)

    def release(self, table: BlockTable) -> None:
        """Take all blocks of the table back; views of it stay readable, but others may get the blocks."""
        ids = table.ids(table.num_blocks * self.block_size)
        self._returned.extend(reversed(ids.tolist()))
        self.num_used -= len(ids)
        table.num_blocks = 0


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)
