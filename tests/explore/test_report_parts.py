"""Parts of the report: values as text, tables of frames, and which columns are numbers."""

import math

import pandas as pd
import pytest

from replay_sim.explore.report_parts import Table, cell, frame_table, sentence


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("static_buffer_bytes", 3 << 20, "3.0 MiB"),
        ("mean_padding", 0.0551, "5.5%"),
        ("reachable_rows", [[1, 8], [16, 2048]], "1 to 8, 16 to 2,048"),
        ("reachable_rows", [], "none"),
        ("sizes", [8, 16], "8, 16"),
        ("sizes", list(range(1, 62)), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, … 61 (61 in all)"),
        ("step_us", 1234567.89, "1,234,568"),
        ("ratio", 0.12345, "0.1235"),
        ("n", 12345, "12,345"),
        ("held_out", True, "True"),
        ("graph_launches", None, "none"),
        ("graph_launches", math.nan, "none"),
    ],
)
def test_a_value_is_shown_in_the_unit_that_its_key_names(key, value, shown) -> None:
    assert cell(key, value) == shown


def test_a_column_of_fractions_has_equally_many_decimals_and_no_more_than_it_needs() -> None:
    frame = pd.DataFrame({"arm": ["a", "b"], "%": [96.0, 91.1], "ms": [2267.0, 376.0], "x": [0.123456, 1.0]})
    table = frame_table("t", frame.set_index("arm"))
    assert table.header == ["arm", "%", "ms", "x"]
    assert table.rows == [("a", "96.0", "2,267", "0.1235"), ("b", "91.1", "376", "1")]


def test_columns_of_numbers_are_set_to_the_right_and_words_are_not() -> None:
    rows = [("own", "1,024", "+0.05%", "3 GPUs"), ("tuned", "–", "-1%", "4")]
    assert Table("", ("a", "b", "c", "d"), rows).right == [False, True, True, False]
    assert Table("", ("a",), ()).right == [False]


def test_a_sentence_has_a_capital_and_one_full_stop() -> None:
    assert sentence("no graphs") == "No graphs." and sentence("Kept.") == "Kept."
