"""Early aux states under forced sharing: wrong, caught by the checker, and right in the system's arrangement."""

import pytest

from replay_sim.explore.corruption import PROMPTS, CorruptionDemo
from replay_sim.replay.sharing import PoolSharing

TWO_STEPS = PROMPTS[1:]


@pytest.fixture(scope="module")
def demo() -> CorruptionDemo:
    return CorruptionDemo(TWO_STEPS)


def test_forced_sharing_overwrites_one_state_in_one_step_and_both_in_the_other(demo: CorruptionDemo) -> None:
    """O3, point 4."""
    one, both = demo.steps
    assert (one.record.padded_tokens, one.record.padded_rows) == (64, 32)
    assert one.wrong_rows("shared") == [list(range(44)), []]
    assert both.wrong_rows("shared") == [list(range(32))] * 2


def test_the_arrangement_that_the_system_picks_is_right_bit_for_bit_and_clean(demo: CorruptionDemo) -> None:
    """O4, point 4."""
    assert demo.choice.sharing is PoolSharing.OWN_STREAM
    assert all(step.wrong_rows("chosen") == [[], []] for step in demo.steps)
    assert demo.findings_chosen == ()


def test_every_overwritten_state_is_found_with_reader_writer_and_remedy(demo: CorruptionDemo) -> None:
    overwritten = sum(bool(rows) for step in demo.steps for rows in step.wrong_rows("shared"))
    assert len(demo.findings) == overwritten == 3
    table = demo.findings_table()
    assert list(table.columns) == [1, 2, 3]
    for finding in table:
        column = table[finding]
        assert "PIECEWISE graph of" in column["is read"] and "eager code" in column["is read"]
        assert "aux.append(" in column["is read"] and ".py:" not in column["is read"]
        assert "replay graph of 32 rows" in column["but was overwritten by"]
        assert column["at"].startswith("0x") and column["at"].endswith(" bytes")
        assert "on a stream or in a pool of its own" in column["what to do"]


def test_the_table_of_steps_counts_wrong_rows_by_arrangement_and_layer(demo: CorruptionDemo) -> None:
    table = demo.steps_table()
    assert list(table.columns) == ["20 + 12 + 9 + 3", "8 + 8 + 8 + 8"]
    wrong = table["20 + 12 + 9 + 3"]
    assert wrong["model graph"] == "64 tokens" and wrong["replay graph"] == "32 rows"
    assert wrong["forced shared: wrong rows, layer 0"] == "44 of 44"
    assert wrong["forced shared: wrong rows, layer 2"] == "0 of 44"
    assert wrong["own_stream: wrong rows, layer 0"] == "0 of 44"


def test_a_model_without_early_aux_states_shares() -> None:
    """O4."""
    assert CorruptionDemo(layers=()).choice.sharing is PoolSharing.SHARED
