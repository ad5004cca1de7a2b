"""Capture sizes: the published configs, the rule, and what went wrong elsewhere (P1-P4, A1-A12, U7)."""

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_sim.config import ServingConfig, config_from_mapping
from replay_sim.plan import make_plan
from replay_sim.plan.capture_sizes import listed

WINDOW = 128
EXPLICIT = [512, 8, 64, 8]
SETTINGS = {field.name for field in attrs.fields(ServingConfig)}
SAME_MEANING = {"max_running_requests": "max_num_seqs", "chunked_prefill_size": "max_num_batched_tokens"}


def replay_sizes(**settings: object) -> tuple[int, ...]:
    return make_plan(config_from_mapping(settings)).replay_sizes


def sizes_by_the_rule(window: int, max_num_seqs: int, limit: int) -> list[int]:
    """P2 again, by a table of the power-of-two intervals and not by bit lengths."""
    bound = min(limit, max_num_seqs * window)
    if bound < window:
        return []
    sizes, size = [], window
    while size < bound:
        sizes.append(size)
        interval = 1
        while interval * 2 <= size:
            interval *= 2
        size += max(window, interval // 8)
    return [*sizes, bound]


def limit_of(settings: dict) -> int:
    """The largest model capture size by the engine's published rule."""
    if settings.get("max_cudagraph_capture_size"):
        return settings["max_cudagraph_capture_size"]
    if settings.get("cudagraph_capture_sizes"):
        return max(settings["cudagraph_capture_sizes"])
    budget = settings.get("max_num_batched_tokens", 8192)
    tokens = settings.get("max_num_seqs", min(1024, budget)) * (settings.get("num_speculative_tokens", 0) + 1)
    return min(2 * tokens, 512, budget)


def test_every_published_config_gets_the_sizes_of_the_rule_or_its_own(shared: Path) -> None:
    """P1, P2, P3 on 70 real configs; those of other engines by the settings that mean the same."""
    entries = json.loads((shared / "data/configs.json").read_text())["configs"]
    assert len(entries) == 70
    kinds = {"explicit": 0, "rule": 0, "empty": 0}
    for entry in entries:
        settings = {SAME_MEANING.get(key, key): value for key, value in entry.items() if value is not None}
        settings = {key: value for key, value in settings.items() if key in SETTINGS}
        settings["window"] = WINDOW
        budget = settings.get("max_num_batched_tokens", 8192)
        sequences = settings.get("max_num_seqs", min(1024, budget))
        explicit = settings.get("decoder_replay_cudagraph_capture_sizes")
        expected = sorted(set(explicit)) if explicit else sizes_by_the_rule(WINDOW, sequences, limit_of(settings))
        if "PIECEWISE" not in settings.get("cudagraph_mode", "FULL_AND_PIECEWISE"):
            expected = []
        plan = make_plan(config_from_mapping(settings))
        assert list(plan.replay_sizes) == expected, entry["id"]
        assert not expected or expected[-1] <= budget, entry["id"]
        reasons = ("below window", "they are PIECEWISE graphs")
        assert plan.replay_sizes or any(reason in note for note in plan.notes for reason in reasons), entry["id"]
        kinds["explicit" if explicit else "rule" if expected else "empty"] += 1
    assert all(kinds.values()), kinds


@given(window=st.integers(1, 300), max_num_seqs=st.integers(1, 300), limit=st.integers(1, 8192))
def test_the_rule_holds_for_any_settings(window: int, max_num_seqs: int, limit: int) -> None:
    """P2."""
    config = ServingConfig(
        window=window,
        max_num_seqs=max_num_seqs,
        max_cudagraph_capture_size=limit,
        decoder_replay_trim_threshold=None,
    )
    assert list(make_plan(config).replay_sizes) == sizes_by_the_rule(window, max_num_seqs, limit)


def test_the_step_is_an_eighth_of_the_power_of_two_interval() -> None:
    """P2: 256 in [2048, 4096)."""
    sizes = replay_sizes(max_num_seqs=256, max_cudagraph_capture_size=8190)
    assert (sizes[0], sizes[-2:]) == (128, (7680, 8190))
    steps = {size: after - size for size, after in zip(sizes, sizes[1:], strict=False)}
    assert (steps[128], steps[1024], steps[1920], steps[2048], steps[3840], steps[4096]) == (
        128,
        128,
        128,
        256,
        256,
        512,
    )


def test_explicit_sizes_win_sorted_without_duplicates_and_leave_the_callers_list_alone() -> None:
    """P1, A11."""
    sizes = list(EXPLICIT)
    config = ServingConfig(decoder_replay_cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=16)
    assert make_plan(config).replay_sizes == (8, 64, 512)
    assert sizes == EXPLICIT


def test_planning_changes_nothing_in_the_config() -> None:
    """P4: the model's own capture sizes stay as they were, whatever the replay sizes are."""
    config = ServingConfig(cudagraph_capture_sizes=[64, 8, 8], decoder_replay_cudagraph_capture_sizes=EXPLICIT)
    before = attrs.asdict(config)
    plan = make_plan(config)
    assert attrs.asdict(config) == before
    assert plan.model_sizes == (8, 64)
    assert plan.model_sizes == make_plan(attrs.evolve(config, cudagraph_decoder_replay=False)).model_sizes


def test_an_explicit_size_above_the_budget_names_both_numbers_and_settings() -> None:
    """P3."""
    with pytest.raises(ValueError, match="decoder_replay_cudagraph_capture_sizes: 8193 .* max_num_batched_tokens 8192"):
        replay_sizes(decoder_replay_cudagraph_capture_sizes=[128, 8193])
    with pytest.raises(ValueError, match="cudagraph_capture_sizes: 8193 .* max_num_batched_tokens 8192"):
        replay_sizes(cudagraph_capture_sizes=[128, 8193])


def test_a_default_plan_above_the_budget_names_both_numbers_and_settings() -> None:
    """P3."""
    with pytest.raises(ValueError) as caught:
        replay_sizes(max_num_seqs=64, max_cudagraph_capture_size=8000, max_num_batched_tokens=4096)
    for part in ("8000", "max_cudagraph_capture_size", "4096", "max_num_batched_tokens"):
        assert part in str(caught.value)


def test_a_size_that_is_not_positive_is_refused() -> None:
    """P3."""
    for bad in (0, -128):
        with pytest.raises(ValueError, match=f"decoder_replay_cudagraph_capture_sizes: {bad} "):
            replay_sizes(decoder_replay_cudagraph_capture_sizes=[128, bad])


def test_per_request_buffers_never_see_more_rows_than_requests_can_keep() -> None:
    """A1: 56 becomes 50."""
    assert replay_sizes(window=1, max_num_seqs=50, decoder_replay_cudagraph_capture_sizes=[8, 56]) == (8, 50)


def test_the_widest_decode_is_a_size_even_off_the_grid() -> None:
    """A2: query length 7, six requests, maximum 42."""
    config = ServingConfig(max_num_seqs=6, num_speculative_tokens=6, max_cudagraph_capture_size=42)
    plan = make_plan(config)
    assert plan.model_sizes[-1] == 42
    assert plan.full_sizes == (7, 14, 21, 28, 35, 42)
    assert replay_sizes(window=7, max_num_seqs=6, max_cudagraph_capture_size=42) == (7, 14, 21, 28, 35, 42)


def test_the_last_size_is_the_bound_even_off_the_step() -> None:
    """A3."""
    assert replay_sizes(window=4, max_num_seqs=3, max_cudagraph_capture_size=16) == (4, 8, 12)
    assert replay_sizes(window=4, max_num_seqs=3, max_cudagraph_capture_size=11) == (4, 8, 11)
    assert make_plan(ServingConfig(max_num_seqs=12)).full_sizes == (1, 2, 4, 8, 12)


def test_full_sizes_are_multiples_of_the_decode_length() -> None:
    """A6: 8 and 16 become 9 and 18."""
    config = ServingConfig(num_speculative_tokens=2, cudagraph_capture_sizes=[8, 16])
    assert make_plan(config).full_sizes == (9, 18)
    assert make_plan(config).model_sizes == (8, 16)


def test_sizes_above_the_rows_of_all_requests_end_at_them_said_aloud() -> None:
    """A9."""
    config = ServingConfig(window=1, max_num_seqs=24, decoder_replay_cudagraph_capture_sizes=[16, 32])
    plan = make_plan(config)
    assert plan.replay_sizes == (16, 24)
    assert any("32 becomes 24" in note for note in plan.notes)


def test_a_plan_whose_sizes_all_drop_out_is_empty_with_a_reason() -> None:
    """A10."""
    config = ServingConfig(window=8, max_num_seqs=8, decoder_replay_cudagraph_capture_sizes=[128])
    plan = make_plan(config)
    assert plan.replay_sizes == ()
    assert any("128 exceeds max_num_seqs 8 x 8 kept rows a request = 64" in note for note in plan.notes)


def test_the_default_bound_counts_the_tokens_of_a_decode_request() -> None:
    """A12."""
    plan = make_plan(ServingConfig(max_num_seqs=32, num_speculative_tokens=3))
    assert plan.full_sizes[-1] == 32 * 4
    assert plan.replay_sizes == (128, 256)


def test_a_bound_below_the_window_is_an_empty_plan_with_a_reason() -> None:
    """U7, P6."""
    plan = make_plan(ServingConfig(window=128, max_cudagraph_capture_size=64))
    assert plan.replay_sizes == ()
    assert any("bound 64" in note and "below window 128" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("mode", "model", "full", "replay"),
    [
        ("NONE", False, False, False),
        ("PIECEWISE", True, False, True),
        ("FULL", False, True, False),
        ("FULL_DECODE_ONLY", False, True, False),
        ("FULL_AND_PIECEWISE", True, True, True),
    ],
)
def test_the_mode_says_which_graphs_there_are(mode: str, model: bool, full: bool, replay: bool) -> None:
    plan = make_plan(ServingConfig(cudagraph_mode=mode))
    assert (bool(plan.model_sizes), bool(plan.full_sizes), bool(plan.replay_sizes)) == (model, full, replay)
    assert model or any(f"cudagraph_mode is {mode}" in note for note in plan.notes)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("sizes", [None, [128, 256]])
def test_without_piecewise_graphs_no_replay_graph_is_planned_said_aloud(mode: str, sizes: list[int] | None) -> None:
    """D3, O1, P6: a replay graph is a PIECEWISE graph that runs in the break of one, explicit sizes or not."""
    config = ServingConfig(
        cudagraph_mode=mode, max_num_seqs=256, max_num_batched_tokens=256, decoder_replay_cudagraph_capture_sizes=sizes
    )
    plan = make_plan(config)
    assert plan.replay_sizes == () and plan.trim_threshold is None
    assert f"no replay graphs: they are PIECEWISE graphs, and cudagraph_mode is {mode}" in plan.notes
    with pytest.raises(ValueError, match="decoder_replay_cudagraph_capture_sizes: 512 .* max_num_batched_tokens 256"):
        make_plan(attrs.evolve(config, decoder_replay_cudagraph_capture_sizes=[512]))


def test_replay_graphs_can_be_switched_off_said_aloud() -> None:
    plan = make_plan(ServingConfig(cudagraph_decoder_replay=False))
    assert plan.replay_sizes == ()
    assert any("cudagraph_decoder_replay is false" in note for note in plan.notes)


def test_a_default_list_is_cut_at_the_token_budget_said_aloud() -> None:
    plan = make_plan(ServingConfig(max_num_seqs=1, max_num_batched_tokens=300, max_cudagraph_capture_size=512))
    assert plan.model_sizes[-1] == 300
    assert any("300" in note and "512" in note for note in plan.notes)


@given(
    max_num_seqs=st.integers(1, 40),
    speculative=st.integers(0, 8),
    sizes=st.lists(st.integers(1, 400), max_size=6),
    budget=st.integers(400, 600),
)
def test_full_sizes_hold_every_uniform_decode_up_to_the_widest(
    max_num_seqs: int, speculative: int, sizes: list[int], budget: int
) -> None:
    """A2, A3, A6, A7: ascending multiples, within sequences and budget, the widest among them."""
    config = ServingConfig(
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=speculative,
        cudagraph_capture_sizes=sizes,
        max_num_batched_tokens=budget,
    )
    length = speculative + 1
    full = make_plan(config).full_sizes
    assert all(size % length == 0 and size // length <= max_num_seqs and size <= budget for size in full)
    assert list(full) == sorted(set(full))
    if config.capture_size_limit >= max_num_seqs * length:
        assert full[-1] == max_num_seqs * length


def test_a_decode_that_exceeds_the_token_budget_has_no_full_graph() -> None:
    """A6: eight tokens a request in steps of six; PIECEWISE graphs are planned all the same."""
    settings = {"window": 2, "max_num_seqs": 2, "max_num_batched_tokens": 6, "max_cudagraph_capture_size": 4}
    plan = make_plan(config_from_mapping(settings | {"num_speculative_tokens": 7}))
    assert plan.full_sizes == () and plan.model_sizes == (1, 2, 4)
    assert make_plan(config_from_mapping(settings | {"num_speculative_tokens": 5})).full_sizes == (6,)


def test_a_message_lists_up_to_twelve_sizes_and_of_more_the_first_ten_and_the_last() -> None:
    assert listed(range(1, 13)) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert listed(range(1, 15)) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ... 14"
    assert listed(()) == ""
