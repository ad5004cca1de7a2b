"""The plan as a whole: the threshold, the notes, and dummy batches (P5, P6, A5, A6, A14)."""

import pytest

from replay_sim.config import ServingConfig
from replay_sim.plan import CapturePlan, check_cache_slots, dummy_query_lens, make_plan


def test_a_threshold_must_exceed_the_window() -> None:
    """P5."""
    for threshold, window in ((128, 128), (127, 128), (768, 1024)):
        with pytest.raises(ValueError, match=f"decoder_replay_trim_threshold: {threshold} .* window {window}"):
            make_plan(ServingConfig(window=window, decoder_replay_trim_threshold=threshold))
    assert make_plan(ServingConfig(decoder_replay_trim_threshold=129)).trim_threshold == 129


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
def test_where_no_graph_can_break_a_threshold_within_the_window_is_no_mistake(mode: str) -> None:
    """P5 is about graphs that break: a window of 1024 and the engine's threshold of 768 can be planned without them."""
    plan = make_plan(ServingConfig(window=1024, cudagraph_mode=mode))
    assert plan.trim_threshold is None and plan.breaking_sizes == ()


def test_a_threshold_of_none_never_breaks() -> None:
    """L1: the trim threshold or none."""
    plan = make_plan(ServingConfig(decoder_replay_trim_threshold=None, max_cudagraph_capture_size=2048))
    assert plan.trim_threshold is None and plan.breaking_sizes == ()


def test_breaking_sizes_are_those_at_or_above_the_threshold() -> None:
    """D2."""
    plan = make_plan(ServingConfig(cudagraph_capture_sizes=[512, 768, 1024], max_num_batched_tokens=1024))
    assert plan.breaking_sizes == (768, 1024)


def test_sizes_that_no_batch_selects_are_said_aloud() -> None:
    """P6: sizes below the smallest replay batch."""
    plan = make_plan(ServingConfig(decoder_replay_cudagraph_capture_sizes=[6, 96, 144, 256]))
    assert any("6, 96 are unreachable: the smallest replay batch has 128 rows" in note for note in plan.notes)


def test_model_graphs_that_never_break_are_said_aloud() -> None:
    """P6."""
    plan = make_plan(ServingConfig(max_cudagraph_capture_size=512))
    assert any("no model graph breaks for replay" in note and "768" in note for note in plan.notes)


def test_a_system_without_any_replay_batch_is_said_aloud() -> None:
    """P6: a token budget that no prefill can exceed the window in."""
    plan = make_plan(ServingConfig(max_num_batched_tokens=100))
    assert any("no step has a replay batch" in note for note in plan.notes)


def test_a_plan_holds_ascending_positive_sizes_only() -> None:
    for sizes in ((2, 1), (1, 1), (0, 1)):
        with pytest.raises(ValueError, match="replay_sizes"):
            CapturePlan(
                window=1,
                model_sizes=(),
                full_sizes=(),
                replay_sizes=sizes,
                trim_threshold=None,
                max_num_seqs=1,
                max_num_batched_tokens=1,
            )


def test_a_capture_size_beyond_the_cache_is_refused_before_any_capture() -> None:
    """A5: sizes [64], cache of 48 slots."""
    plan = make_plan(ServingConfig(window=8, decoder_replay_cudagraph_capture_sizes=[64]))
    with pytest.raises(ValueError, match="replay_sizes: 64 .* 48 slots"):
        check_cache_slots(plan, 48)
    check_cache_slots(plan, 1 << 20)


def test_a_dummy_batch_has_at_most_the_requests_of_a_step() -> None:
    """A14: size 512, 16 requests."""
    assert dummy_query_lens(512, 16) == (32,) * 16
    assert dummy_query_lens(5, 16) == (1,) * 5
    assert dummy_query_lens(7, 3) == (3, 2, 2)


def test_a_dummy_decode_batch_is_uniform() -> None:
    """A6: query length 3."""
    assert dummy_query_lens(9, 4, query_len=3) == (3, 3, 3)
    for size, sequences in ((8, 4), (9, 2)):
        with pytest.raises(ValueError, match=f"{size}.*3"):
            dummy_query_lens(size, sequences, query_len=3)


@pytest.mark.parametrize("name", ["window", "max_num_seqs", "max_num_batched_tokens", "query_len_decode"])
def test_a_plan_made_by_hand_names_a_count_below_one(name: str) -> None:
    """P3: what no step could use is an error at once."""
    counts = {"window": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "query_len_decode": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}: 0 is not allowed"):
        CapturePlan(model_sizes=(), full_sizes=(), replay_sizes=(), trim_threshold=None, **counts)


def test_sizes_beyond_any_replay_batch_are_said_aloud() -> None:
    """P6: 40 tokens of which one prompt keeps 8 leave 39 rows; no graph breaks."""
    config = ServingConfig(
        window=8,
        max_num_seqs=5,
        max_num_batched_tokens=40,
        cudagraph_capture_sizes=[8],
        decoder_replay_cudagraph_capture_sizes=[8, 39, 40],
        decoder_replay_trim_threshold=16,
    )
    assert any(
        "sizes 40 are unreachable: no replay batch has that many rows" in note for note in make_plan(config).notes
    )
