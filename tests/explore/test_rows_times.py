"""Times of row selection: both arms are run equally often, on batches that are never repeated."""

from replay_sim.explore import rows_times
from replay_sim.explore.rows_times import selection_times


def test_both_arms_are_timed_on_the_same_fresh_batches(monkeypatch) -> None:
    """H1: no batch twice for one arm."""
    seen: dict[str, list] = {"reference": [], "plain": []}
    monkeypatch.setattr(rows_times, "select_rows", lambda batch, window: seen["reference"].append(batch))
    monkeypatch.setattr(rows_times, "plain_rows", lambda batch, *_: seen["plain"].append(batch))
    table = selection_times(3, 8, rounds=4)
    assert table["n"].tolist() == [4, 4] and len(table) == 2
    lengths = [tuple(batch.query_lens.tolist()) for batch in seen["reference"]]
    assert [tuple(batch.query_lens.tolist()) for batch in seen["plain"]] == lengths
    assert len(set(lengths)) == len(lengths) == 4 + rows_times.WARM_UP
    assert all(1 <= length < 16 for mix in lengths for length in mix)
