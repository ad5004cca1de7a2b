"""The serving settings that decide decoder replay, in the engine's own key names."""

from collections.abc import Iterable
from typing import Any

import attrs

from replay_sim.config import defaults
from replay_sim.config.errors import ConfigError, nearest, shown

CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
LARGEST_TOKENS = 1 << 20
MOST_SIZES = 2048
LARGEST_MODEL_LEN = 1 << 31
LARGEST_SPECULATION = 1024


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}: {shown(value)} is not allowed; it must be an integer from {least} to {most}")


def _int_between(least: int, most: int) -> Any:
    def validate(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        _check_int(attribute.name, value, least, most)

    return validate


def _check_sizes(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(f"{attribute.name}: {shown(value)} is not allowed; it must be a list of integers")
    if len(value) > MOST_SIZES:
        raise ConfigError(f"{attribute.name}: {len(value)} sizes are not allowed; at most {MOST_SIZES} are")
    for size in value:
        _check_int(attribute.name, size, 1, LARGEST_TOKENS)


def _check_bool(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name}: {shown(value)} is not allowed; it must be true or false")


def _check_model(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
        raise ConfigError(
            f"{attribute.name}: {shown(value)} is not allowed; it must be a printable name of at most 256 characters"
        )


def _check_mode(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if value not in CUDAGRAPH_MODES:
        hint = nearest(value, list(CUDAGRAPH_MODES)) if isinstance(value, str) else ""
        allowed = ", ".join(CUDAGRAPH_MODES)
        raise ConfigError(f"{attribute.name}: {shown(value)} is not allowed; it must be one of {allowed}{hint}")


def _as_sizes(value: object) -> object:
    """Copy a list of sizes into a tuple, so that the caller's list stays its own; an empty one is not set."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        return tuple(value) or None
    return value


def _as_mode(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


_OPTIONAL_SIZES: Any = attrs.validators.optional(_check_sizes)
_TOKENS: Any = _int_between(1, LARGEST_TOKENS)
_OPTIONAL_TOKENS: Any = attrs.validators.optional(_TOKENS)


@attrs.frozen(kw_only=True)
class ServingConfig:
    """One engine's settings, as its users write them; what is not given takes the engine's default.

    Attributes (all counts of tokens or rows unless said otherwise):
        model: the model's name; a label.
        window: sliding-window length of the replay layers, which is also the rows that a prefill keeps (S1).
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`: the engine refuses to start otherwise.
        max_num_seqs: most requests in a step.
        num_speculative_tokens: draft tokens that a decode verifies besides its own.
        cudagraph_mode: one of `CUDAGRAPH_MODES`.
        cudagraph_capture_sizes: explicit model graph sizes; None or empty for the default rule.
        max_cudagraph_capture_size: the largest model graph size; None for the default rule. With explicit
            sizes it must be the largest of them: the engine refuses to start otherwise.
        cudagraph_decoder_replay: whether replay graphs are captured at all.
        decoder_replay_cudagraph_capture_sizes: explicit replay graph sizes (P1); None or empty for P2's rule.
        decoder_replay_trim_threshold: padded tokens from which on a PIECEWISE graph breaks for replay; None
            for never.
        max_model_len: longest sequence; None when not known.

    Raises:
        ConfigError: a value of the wrong type or range, a budget below the sequences, or sizes that contradict the
            maximum.
    """

    model: str = attrs.field(default=defaults.MODEL, validator=_check_model)
    window: int = attrs.field(default=defaults.WINDOW, validator=_TOKENS)
    max_num_batched_tokens: int = attrs.field(default=defaults.MAX_NUM_BATCHED_TOKENS, validator=_TOKENS)
    max_num_seqs: int = attrs.field(validator=_TOKENS)
    num_speculative_tokens: int = attrs.field(default=0, validator=_int_between(0, LARGEST_SPECULATION))
    cudagraph_mode: str = attrs.field(default=defaults.CUDAGRAPH_MODE, converter=_as_mode, validator=_check_mode)
    cudagraph_capture_sizes: tuple[int, ...] | None = attrs.field(
        default=None, converter=_as_sizes, validator=_OPTIONAL_SIZES
    )
    max_cudagraph_capture_size: int | None = attrs.field(default=None, validator=_OPTIONAL_TOKENS)
    cudagraph_decoder_replay: bool = attrs.field(default=True, validator=_check_bool)
    decoder_replay_cudagraph_capture_sizes: tuple[int, ...] | None = attrs.field(
        default=None, converter=_as_sizes, validator=_OPTIONAL_SIZES
    )
    decoder_replay_trim_threshold: int | None = attrs.field(default=defaults.TRIM_THRESHOLD, validator=_OPTIONAL_TOKENS)
    max_model_len: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_int_between(1, LARGEST_MODEL_LEN))
    )

    @max_num_seqs.default
    def _default_max_num_seqs(self) -> int:
        budget = self.max_num_batched_tokens
        return defaults.default_max_num_seqs(budget) if isinstance(budget, int) else defaults.MAX_NUM_SEQS

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is not allowed; it must be at least "
                f"max_num_seqs {self.max_num_seqs}: every request of a step has a token"
            )
        sizes, maximum = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes and maximum is not None and maximum != max(sizes):
            raise ConfigError(
                f"max_cudagraph_capture_size: {maximum} is not allowed; it must equal the largest of "
                f"cudagraph_capture_sizes, {max(sizes)}"
            )

    @property
    def query_len_decode(self) -> int:
        """Tokens of one decode request in a step: its own and the speculative ones."""
        return self.num_speculative_tokens + 1

    @property
    def capture_size_limit(self) -> int:
        """The largest model graph size: as set, else the largest explicit size, else the engine's default."""
        if self.max_cudagraph_capture_size is not None:
            return self.max_cudagraph_capture_size
        if self.cudagraph_capture_sizes:
            return max(self.cudagraph_capture_sizes)
        return defaults.default_max_capture_size(self.max_num_seqs, self.query_len_decode, self.max_num_batched_tokens)
