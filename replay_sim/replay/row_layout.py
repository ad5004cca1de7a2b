"""How the kernels that move rows cut a row: words of a few bytes, tiles of rows and columns."""

from __future__ import annotations

import attrs

TILE_WORDS = 512
"""Words that one program holds at a time: 4 KiB, two 16-byte loads for each of 128 threads."""
LEAST_COLUMNS = 128
MOST_TILE_ROWS = 64


@attrs.frozen
class RowLayout:
    """One tensor's row as the kernels see it, from its bytes alone.

    `word_bytes` is the largest of 8, 4 and 2 that divides the row, `words` how many there are. Two neighbouring words
    of 8 bytes move as one access of 16 where `words` is even. Rows move in tiles of `rows` × `columns` words.
    """

    word_bytes: int
    words: int

    @classmethod
    def of(cls, row_bytes: int) -> RowLayout:
        """The layout of rows of `row_bytes`; ValueError for an odd number, which no dtype of the contract has."""
        word = next((size for size in (8, 4, 2) if row_bytes % size == 0), None)
        if word is None or row_bytes < 1:
            raise ValueError(f"a row of {row_bytes} bytes cannot be moved: allowed are positive multiples of 2")
        return cls(word, row_bytes // word)

    @property
    def columns(self) -> int:
        """Columns of a tile: a power of two that divides the row, unless that would be too narrow."""
        divisor = self.words & -self.words
        return min(divisor if divisor >= LEAST_COLUMNS else next_power_of_two(self.words), TILE_WORDS)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return min(TILE_WORDS // self.columns, MOST_TILE_ROWS)

    @property
    def tiles(self) -> int:
        """Tiles side by side in a row."""
        return -(-self.words // self.columns)

    def programs(self, rows: int) -> int:
        """Tiles of so many rows, the last ones with rows and columns to spare."""
        return -(-rows // self.rows) * self.tiles


def next_power_of_two(count: int) -> int:
    """The power of two at or above `count`."""
    return 1 << (count - 1).bit_length()
