"""Held-out batches: a fifth, by seed, whole capture sizes and sizes plus one among them (issue 4, point 2)."""

import itertools

import pytest

from replay_sim.measure.held_out import choose_held_out
from replay_sim.measure.step_sweeps import GPU_GRID

SIZES = GPU_GRID.sizes
TOKENS = [tokens for size, larger in itertools.pairwise(SIZES) for tokens in (size, size + 1, (size + larger) // 2)]


def padded(tokens: int) -> int:
    return next(size for size in SIZES if size >= tokens)


@pytest.mark.parametrize("seed", range(25))
def test_a_fifth_is_held_out_with_a_whole_size_a_full_one_and_one_more_than_a_size(seed: int) -> None:
    """Issue 4, point 2."""
    flags = choose_held_out("threshold", TOKENS, SIZES, seed)
    held = [tokens for tokens, flag in zip(TOKENS, flags, strict=True) if flag]
    assert len(held) == len(TOKENS) // 5
    assert set(held) & set(SIZES) and {tokens - 1 for tokens in held} & set(SIZES)
    whole = [size for size in SIZES if all(flag for t, flag in zip(TOKENS, flags, strict=True) if padded(t) == size)]
    assert {*whole} & {*SIZES[1:-1]}


def test_the_choice_depends_on_seed_and_sweep_alone() -> None:
    first = choose_held_out("threshold", TOKENS, SIZES, 0)
    assert first == choose_held_out("threshold", TOKENS, SIZES, 0)
    assert first != choose_held_out("threshold", TOKENS, SIZES, 1)
    assert first != choose_held_out("requests", TOKENS, SIZES, 0)


@pytest.mark.parametrize("count", range(12))
def test_few_batches_have_their_fifth_too(count: int) -> None:
    flags = choose_held_out("window", [2048, 8192] * (count // 2) + [2048] * (count % 2), (2048, 8192), 0)
    assert len(flags) == count and sum(flags) == count // 5
