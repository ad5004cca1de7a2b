"""The proof of row selection finds nothing in what is right and something in every column that is made wrong."""

import attrs
import numpy as np
import pytest

from replay_sim.explore import rows_proof
from replay_sim.explore.rows_proof import CLAUSES, COVERED, ROW_COLUMNS, prove_rows

BATCHES = 150


@pytest.fixture(scope="module")
def proof():
    return prove_rows(BATCHES, seed=3)


def test_reference_and_device_equal_the_plain_rule(proof) -> None:
    """S1 to S9."""
    assert proof.batches == BATCHES and proof.rows > proof.kept > 500 and proof.pads > 200
    assert set(proof.compared) == set(CLAUSES) and min(proof.compared.values()) >= BATCHES
    assert not any(proof.differing.values())
    assert proof.table()["differ"].sum() == 0


def test_every_kind_of_ordinary_input_is_among_the_batches(proof) -> None:
    """S6."""
    assert set(proof.covered) == set(COVERED) and min(proof.covered.values()) >= 5
    assert proof.covered_table()["batches"].to_dict() == proof.covered


def test_the_same_seed_compares_the_same_batches(proof) -> None:
    assert prove_rows(BATCHES, seed=3) == proof
    assert prove_rows(20, seed=4).rows != prove_rows(20, seed=3).rows


@pytest.mark.parametrize("column", ["rows", "query_start_loc", "window_starts"])
def test_a_wrong_reference_is_found(monkeypatch, column: str) -> None:
    right = rows_proof.select_rows
    monkeypatch.setattr(
        rows_proof,
        "select_rows",
        lambda batch, window: attrs.evolve(
            right(batch, window), **{column: getattr(right(batch, window), column)[:-1]}
        ),
    )
    found = prove_rows(30).differing
    assert found[f"reference: {column}"] > 0
    assert sum(found.values()) == found[f"reference: {column}"]


@pytest.mark.parametrize("column", ROW_COLUMNS)
def test_a_wrong_value_on_the_device_is_found(monkeypatch, column: str) -> None:
    """S9."""

    class Wrong(rows_proof.ReplayMetadataBuffers):
        def write(self, batch, source, padded_rows):
            super().write(batch, source, padded_rows)
            getattr(self, column)[:1] += 1

    monkeypatch.setattr(rows_proof, "ReplayMetadataBuffers", Wrong)
    found = prove_rows(30).differing
    assert found[f"device: {column}"] > 10
    assert sum(found.values()) == found[f"device: {column}"]


def test_a_batch_is_within_what_its_buffers_hold() -> None:
    rng = np.random.default_rng(0)
    batches = [rows_proof.random_batch(rng, 8) for _ in range(200)]
    assert max(batch.num_reqs for batch in batches) == rows_proof.MAX_REQS
    assert max(batch.query_lens.max(initial=0) for batch in batches) < 4 * 8 + 2
