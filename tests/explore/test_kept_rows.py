"""One batch under a plan: its tables, its gather map, what the static buffers hold, and when it has a replay batch."""

import attrs
import numpy as np
import pytest

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.explore import kept_rows
from replay_sim.explore.kept_rows import KeptRows, dealt_block_tables, gather_table, replay_batch_table
from replay_sim.explore.tour import TOUR_BATCH, TOUR_CONFIG

KEPT = [*range(15, 23), *range(29, 37), *range(37, 42), 42]
PREFILLS = Batch([Request(5, 0, Phase.PREFILL), Request(8, 0, Phase.PREFILL)])
DECODES = Batch([Request(1, 9, Phase.DECODE)] * 4)
LARGER = Batch([Request(30, 0, Phase.PREFILL, all_rows_read=True)])


@pytest.fixture(scope="module")
def kept() -> KeptRows:
    return KeptRows(TOUR_BATCH, TOUR_CONFIG)


def test_blocks_are_dealt_in_turn_and_each_to_one_request() -> None:
    tables = dealt_block_tables(
        Batch([Request(9, 0, Phase.PREFILL), Request(0, 0, Phase.DECODE), DECODES.requests[0]]), 4
    )
    assert [table.tolist() for table in tables] == [[0, 2, 4], [], [1, 3, 5]]


def test_the_gather_map_names_the_kept_rows_and_then_the_pads(kept) -> None:
    """S1, S2, B2."""
    assert kept.gather_map() == [*KEPT, None, None]
    assert KeptRows(DECODES, TOUR_CONFIG).gather_map() == []


def test_a_line_a_request_holds_its_offsets_and_window_starts(kept) -> None:
    """S3, S4, S7."""
    table = kept.by_request()
    assert table.index.tolist() == ["A", "B", "C", "D"]
    assert table["rows kept"].tolist() == [8, 8, 5, 1]
    assert table["query_start_loc"].tolist() == [0, 23, 37, 42]
    assert table["replay query_start_loc"].tolist() == [0, 8, 16, 21]
    assert table["window start, rest"].tolist() == [15, 16, 0, 0]
    assert set(table["window start, first layer"]) == {0}


def test_a_line_a_row_holds_what_a_step_writes_and_pads_belong_to_no_request(kept) -> None:
    """S3, S4, S8."""
    table = kept.by_row()
    assert table["rows"].tolist() == [*KEPT, -1, -1]
    assert table["slot_mapping"].tolist()[-2:] == table["request_of_row"].tolist()[-2:] == [-1, -1]
    assert table.loc[0, ["positions", "window_start_first", "window_start_rest"]].tolist() == [15, 8, 15]
    tables = dealt_block_tables(TOUR_BATCH, kept_rows.BLOCK_SIZE)
    slots = [tables[0][position // 4] * 4 + position % 4 for position in range(15, 23)]
    assert table["slot_mapping"].tolist()[:8] == slots
    assert len(set(table["slot_mapping"][:-2])) == 22


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch([Request(65, 0, Phase.PREFILL)]), "num_tokens: 65 is not allowed; .* max_num_batched_tokens 64"),
        (Batch([Request(1, 0, Phase.PREFILL)] * 9), "num_reqs: 9 is not allowed; .* max_num_seqs 8"),
    ],
)
def test_a_batch_that_no_step_takes_is_refused(batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeptRows(batch, TOUR_CONFIG)


def test_when_a_step_has_a_replay_batch() -> None:
    """S5, D2: in an eager step when a prefill trims; always in a graph from the threshold on."""
    table = replay_batch_table({"tour": TOUR_BATCH, "short": PREFILLS, "decodes": DECODES}, TOUR_CONFIG)
    never = "–"
    assert table["eager"].tolist() == ["22 rows", never, never]
    assert table["PIECEWISE, below the threshold"].tolist() == [never] * 3
    assert table["PIECEWISE, from the threshold on"].tolist() == ["22 rows", "13 rows", "4 rows"]
    assert table["as planned"].tolist() == ["22 rows", "13 rows", never]


def test_a_gather_leaves_nothing_of_the_earlier_batch_below_its_size(kept) -> None:
    """B2."""
    table = gather_table(KeptRows(LARGER, TOUR_CONFIG), kept)
    assert len(table) == 7
    assert not table[["kept rows that differ", "pad elements not zero"]].any(axis=None)
    assert table["earlier rows beyond the size"].tolist() == [30 - 24] * 7


@pytest.mark.parametrize("fault", ["forgets the pads", "takes the row before"])
def test_a_wrong_gather_is_seen(monkeypatch, kept, fault: str) -> None:
    """B2."""
    right = kept_rows.gather_into

    def gather(rows, inputs, buffers, padded):
        if fault == "forgets the pads":
            right(rows, inputs, buffers, len(rows))
        else:
            right((rows - 1).clamp(min=0), inputs, buffers, padded)

    monkeypatch.setattr(kept_rows, "gather_into", gather)
    table = gather_table(KeptRows(LARGER, TOUR_CONFIG), kept)
    column = "pad elements not zero" if fault == "forgets the pads" else "kept rows that differ"
    assert table.loc["hidden_states", column] > 0


def test_an_empty_batch_has_tables_without_lines() -> None:
    """S6."""
    empty = KeptRows(Batch(), attrs.evolve(TOUR_CONFIG, window=5))
    assert empty.by_request().empty and empty.by_row().empty
    assert np.array_equal(empty.rows.query_start_loc, [0])
