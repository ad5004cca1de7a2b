"""KV blocks: growth, return, exhaustion, and that no block has two owners."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.workload.kv_blocks import BlockPool, BlockTable, OutOfBlocksError

BLOCK_SIZE = 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=40))
@settings(deadline=None)
def test_no_block_is_held_twice_and_none_is_lost(actions):
    """Tables 0 to 3 grow to a number of tokens, or are released by 0; a set of owned ids is the oracle."""
    pool, tables = BlockPool(24, BLOCK_SIZE), [BlockTable(BLOCK_SIZE) for _ in range(4)]
    held = [0] * 4
    for index, tokens in actions:
        before = tables[index].ids(held[index] * BLOCK_SIZE).tolist()
        if tokens == 0:
            pool.release(tables[index])
            held[index] = 0
        else:
            wanted = max(held[index], -(-tokens // BLOCK_SIZE))
            if sum(held) - held[index] + wanted > 24:
                with pytest.raises(OutOfBlocksError):
                    pool.grow(tables[index], tokens)
            else:
                pool.grow(tables[index], tokens)
                held[index] = wanted
                assert tables[index].ids(wanted * BLOCK_SIZE).tolist()[: len(before)] == before
        owned = [i for t, n in zip(tables, held, strict=True) for i in t.ids(n * BLOCK_SIZE).tolist()]
        assert len(owned) == len(set(owned)) == pool.num_used == sum(held)
        assert all(0 <= block < 24 for block in owned)
        assert pool.num_free == 24 - sum(held)


def test_a_table_gives_as_many_blocks_as_hold_the_tokens():
    pool, table = BlockPool(None, BLOCK_SIZE), BlockTable(BLOCK_SIZE)
    pool.grow(table, 9)
    assert table.ids(9).dtype == np.int32
    assert [table.ids(tokens).tolist() for tokens in (0, 1, 4, 5, 9)] == [[], [0], [0], [0, 1], [0, 1, 2]]
    assert pool.num_free is None


def test_an_exhausted_pool_names_the_numbers_and_takes_nothing():
    pool, first, second = BlockPool(5, BLOCK_SIZE), BlockTable(BLOCK_SIZE), BlockTable(BLOCK_SIZE)
    pool.grow(first, 12)
    message = "9 tokens need 3 more KV blocks of 4 tokens: 2 of num_blocks 5 are free"
    with pytest.raises(OutOfBlocksError, match=message):
        pool.grow(second, 9)
    assert (pool.num_used, second.num_blocks) == (3, 0)
    pool.release(first)
    pool.grow(second, 20)
    assert sorted(second.ids(20).tolist()) == [0, 1, 2, 3, 4]


def test_views_of_a_table_outlive_its_growth_and_its_release():
    """A step keeps its block tables while later steps run."""
    pool, table = BlockPool(None, BLOCK_SIZE), BlockTable(BLOCK_SIZE)
    pool.grow(table, 4)
    view = table.ids(4)
    pool.grow(table, 400)
    pool.release(table)
    assert view.tolist() == [0]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 3


@pytest.mark.parametrize(("blocks", "size", "message"), [(0, 4, "num_blocks is 0"), (4, -1, "block_size is -1")])
def test_a_bound_that_is_not_positive_is_refused(blocks, size, message):
    with pytest.raises(ValueError, match=message):
        BlockPool(blocks, size)
