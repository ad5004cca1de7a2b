"""Serving settings: the engine's defaults, and one clear line for what cannot be used."""

import attrs
import pytest

from replay_sim.config import ConfigError, ServingConfig, config_from_mapping
from replay_sim.config.defaults import default_capture_sizes

SIZES = [512, 8, 64, 8]


def test_a_config_that_sets_nothing_takes_the_engines_defaults() -> None:
    config = ServingConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.window) == (1024, 8192, 128)
    assert config.decoder_replay_trim_threshold == 768
    assert config.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert config.capture_size_limit == 512
    assert config.query_len_decode == 1


def test_unset_sequences_never_exceed_the_token_budget() -> None:
    assert ServingConfig(max_num_batched_tokens=256).max_num_seqs == 256


def test_a_token_budget_below_the_sequences_is_refused_as_the_engine_does() -> None:
    assert ServingConfig(max_num_batched_tokens=64, max_num_seqs=64).max_num_seqs == 64
    with pytest.raises(ConfigError, match="max_num_batched_tokens: 64 is not .* at least max_num_seqs 65"):
        ServingConfig(max_num_batched_tokens=64, max_num_seqs=65)


def test_the_default_limit_counts_the_tokens_of_a_decode_request() -> None:
    """A12."""
    assert ServingConfig(max_num_seqs=32, num_speculative_tokens=3).capture_size_limit == 256
    assert ServingConfig(max_num_seqs=2, num_speculative_tokens=3).capture_size_limit == 16
    assert ServingConfig(max_num_seqs=64, max_num_batched_tokens=64, num_speculative_tokens=3).capture_size_limit == 64


def test_the_limit_is_the_explicit_maximum_or_the_largest_explicit_size() -> None:
    assert ServingConfig(max_cudagraph_capture_size=42).capture_size_limit == 42
    assert ServingConfig(cudagraph_capture_sizes=[4, 96, 8]).capture_size_limit == 96


@pytest.mark.parametrize(
    ("maximum", "tail"),
    [(42, (32, 40, 42)), (12, (4, 8, 12)), (300, (272, 288, 300)), (1, (1,)), (3, (1, 2, 3))],
)
def test_the_default_model_sizes_end_with_the_maximum(maximum: int, tail: tuple[int, ...]) -> None:
    """A2, A3: a maximum off the grid is a size of its own."""
    assert default_capture_sizes(maximum)[-len(tail) :] == tail


def test_the_default_model_sizes_are_those_of_a_server_that_printed_them() -> None:
    printed = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)
    assert default_capture_sizes(128) == printed


def test_the_callers_list_is_left_alone() -> None:
    """P1, A11: the config holds a copy."""
    sizes = list(SIZES)
    config = ServingConfig(decoder_replay_cudagraph_capture_sizes=sizes)
    assert sizes == SIZES
    sizes.append(1)
    assert config.decoder_replay_cudagraph_capture_sizes == tuple(SIZES)


def test_an_empty_list_of_sizes_is_not_set() -> None:
    assert ServingConfig(cudagraph_capture_sizes=[]).cudagraph_capture_sizes is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"window": 0}, ["window", "0", "1 to"]),
        ({"window": True}, ["window", "True", "integer"]),
        ({"max_num_seqs": -1}, ["max_num_seqs", "-1"]),
        ({"max_num_batched_tokens": 1.5}, ["max_num_batched_tokens", "1.5"]),
        ({"max_num_batched_tokens": "8192"}, ["max_num_batched_tokens", "'8192'"]),
        ({"num_speculative_tokens": -1}, ["num_speculative_tokens", "-1", "0 to"]),
        ({"max_cudagraph_capture_size": 0}, ["max_cudagraph_capture_size", "0"]),
        ({"cudagraph_capture_sizes": [8, 0]}, ["cudagraph_capture_sizes", "0"]),
        ({"cudagraph_capture_sizes": 8}, ["cudagraph_capture_sizes", "8", "list"]),
        ({"cudagraph_capture_sizes": "8"}, ["cudagraph_capture_sizes", "'8'", "list"]),
        ({"decoder_replay_cudagraph_capture_sizes": [128, -64]}, ["decoder_replay_cudagraph", "-64"]),
        ({"decoder_replay_cudagraph_capture_sizes": [True]}, ["decoder_replay_cudagraph", "True"]),
        ({"decoder_replay_cudagraph_capture_sizes": {"1": 1}}, ["decoder_replay_cudagraph", "list"]),
        ({"decoder_replay_cudagraph_capture_sizes": [[1]]}, ["decoder_replay_cudagraph", "[1]"]),
        ({"decoder_replay_trim_threshold": 0}, ["decoder_replay_trim_threshold", "0"]),
        ({"cudagraph_decoder_replay": 1}, ["cudagraph_decoder_replay", "1", "true or false"]),
        ({"cudagraph_mode": "FULL_AND_PIECEWIZE"}, ["cudagraph_mode", "did you mean 'FULL_AND_PIECEWISE'"]),
        ({"cudagraph_mode": 3}, ["cudagraph_mode", "3", "PIECEWISE"]),
        ({"model": ""}, ["model", "''"]),
        ({"model": "a\nb"}, ["model", r"a\nb"]),
        ({"max_model_len": 0}, ["max_model_len", "0"]),
        ({"window": 10**30}, ["window", "1000"]),
    ],
)
def test_a_bad_value_is_refused_by_name_value_and_range(settings: dict, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(settings)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    for part in named:
        assert part in message


def test_a_maximum_that_is_not_the_largest_explicit_size_is_refused_as_the_engine_does() -> None:
    with pytest.raises(ConfigError, match="max_cudagraph_capture_size: 64 .* cudagraph_capture_sizes, 32"):
        ServingConfig(cudagraph_capture_sizes=[16, 32], max_cudagraph_capture_size=64)


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="unknown key 'max_num_sequences'; did you mean 'max_num_seqs'"):
        config_from_mapping({"max_num_sequences": 4})
    for name in ("zz", "temperature", "model_family_name_of_nothing_known_here"):
        with pytest.raises(ConfigError, match=f"unknown key '{name}'$"):
            config_from_mapping({name: 4})


def test_a_null_is_not_set_but_for_the_threshold_where_it_means_never() -> None:
    unset = {field.name: None for field in attrs.fields(ServingConfig)}
    del unset["decoder_replay_trim_threshold"]
    assert config_from_mapping(unset) == ServingConfig()
    assert config_from_mapping({"decoder_replay_trim_threshold": None}).decoder_replay_trim_threshold is None


def test_more_sizes_than_any_engine_captures_are_refused() -> None:
    """A list that would keep planning busy for minutes is one line."""
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes: 2049 sizes are not allowed; at most 2048"):
        ServingConfig(max_num_batched_tokens=8192, cudagraph_capture_sizes=tuple(range(1, 2050)))
