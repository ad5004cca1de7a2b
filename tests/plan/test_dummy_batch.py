"""Plans held against the slots of a cache: what is refused, and that the message names the size that is too large."""

import pytest

from replay_sim.plan import CapturePlan, check_cache_slots


def plan(**sizes: tuple[int, ...]) -> CapturePlan:
    every = {"replay_sizes": (), "model_sizes": (), "full_sizes": ()} | sizes
    return CapturePlan(window=4, max_num_seqs=2, max_num_batched_tokens=64, trim_threshold=5, **every)


@pytest.mark.parametrize("name", ["replay_sizes", "model_sizes", "full_sizes"])
def test_the_largest_size_is_named_of_a_plan_beyond_the_cache(name: str) -> None:
    """A5: as many slots as the largest size are enough."""
    large = plan(**{name: (8, 16, 48)})
    with pytest.raises(ValueError, match=f"^{name}: 48 is not allowed; the KV cache has 47 slots"):
        check_cache_slots(large, 47)
    check_cache_slots(large, 48)


@pytest.mark.parametrize("name", ["replay_sizes", "model_sizes", "full_sizes"])
def test_the_largest_size_is_named_of_a_plan_whose_dummy_request_is_beyond_a_block_table(name: str) -> None:
    """A5: 49 tokens are captured on requests of 25 and 24."""
    large = plan(**{name: (8, 49)})
    with pytest.raises(
        ValueError, match=f"^{name}: 49 is not allowed; it is .* on a request of 25 tokens, .* 24 slots"
    ):
        check_cache_slots(large, 64, 24)
    check_cache_slots(large, 64, 25)
    check_cache_slots(plan(), 0, 0)
