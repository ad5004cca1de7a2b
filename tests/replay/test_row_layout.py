"""How rows are cut into tiles, row by row of a table."""

import pytest

from replay_sim.replay.row_layout import RowLayout, next_power_of_two


@pytest.mark.parametrize(
    ("row_bytes", "word_bytes", "words", "columns", "rows", "tiles"),
    [
        (2, 2, 1, 1, 64, 1),
        (4, 4, 1, 1, 64, 1),
        (8, 8, 1, 1, 64, 1),
        (6, 2, 3, 4, 64, 1),
        (24, 8, 3, 4, 64, 1),
        (8 * 8, 8, 8, 8, 64, 1),
        (8 * 9, 8, 9, 16, 32, 1),
        (8 * 192, 8, 192, 256, 2, 1),  # 64 divides it, and is narrower than 128
        (8 * 384, 8, 384, 128, 4, 3),
        (8 * 512, 8, 512, 512, 1, 1),
        (8 * 513, 8, 513, 512, 1, 2),
        (8 * 1792, 8, 1792, 256, 2, 7),
        (4 * 7168, 8, 3584, 512, 1, 7),
    ],
)
def test_a_tile_is_as_wide_as_a_power_of_two_that_divides_the_row_unless_that_is_narrow(
    row_bytes: int, word_bytes: int, words: int, columns: int, rows: int, tiles: int
) -> None:
    layout = RowLayout.of(row_bytes)
    assert (layout.word_bytes, layout.words) == (word_bytes, words)
    assert (layout.columns, layout.rows, layout.tiles) == (columns, rows, tiles)
    assert [layout.programs(count) for count in (0, 1, rows, rows + 1)] == [0, tiles, tiles, 2 * tiles]


@pytest.mark.parametrize("row_bytes", [-2, -1, 0, 1, 3, 7])
def test_a_row_of_an_odd_or_no_number_of_bytes_is_refused(row_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"a row of {row_bytes} bytes cannot be moved"):
        RowLayout.of(row_bytes)


def test_the_next_power_of_two() -> None:
    assert [next_power_of_two(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
