"""The sizes at which model graphs and replay graphs are captured (P1-P4)."""

from collections.abc import Iterable

from replay_sim.config import ConfigError, ServingConfig
from replay_sim.config.defaults import default_capture_sizes

PIECEWISE_MODES = ("PIECEWISE", "FULL_AND_PIECEWISE")
FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
Sizes = tuple[int, ...]
Notes = tuple[str, ...]


def replay_capture_sizes(config: ServingConfig) -> tuple[Sizes, Notes]:
    """Return the replay graph sizes in rows, ascending, and what must be said about them (P1-P3).

    Replay graphs are PIECEWISE graphs, which run in the break of one (D3, O1): a mode without these has none.

    Raises:
        ConfigError: a largest size above max_num_batched_tokens (P3).
    """
    off = _why_none(config)
    explicit = _explicit_sizes(config) if config.decoder_replay_cudagraph_capture_sizes else None
    return ((), (off,)) if off else explicit or _sizes_by_rule(config)


def _why_none(config: ServingConfig) -> str:
    """Why no replay graph is captured, whatever the sizes; empty if they are."""
    if config.cudagraph_mode not in PIECEWISE_MODES:
        return f"no replay graphs: they are PIECEWISE graphs, and cudagraph_mode is {config.cudagraph_mode}"
    return "" if config.cudagraph_decoder_replay else "no replay graphs: cudagraph_decoder_replay is false"


def _explicit_sizes(config: ServingConfig) -> tuple[Sizes, Notes]:
    """P1: the caller's sizes as a sorted copy; those that requests cannot fill end at a bound (A1, A9, A10).

    A request keeps at most `window` rows, or the tokens of its decode, unless all its rows are read. Sizes
    beyond that many rows of every request are replaced by exactly that many, said aloud.
    """
    name = "decoder_replay_cudagraph_capture_sizes"
    sizes = tuple(sorted(set(config.decoder_replay_cudagraph_capture_sizes or ())))
    if sizes[-1] > config.max_num_batched_tokens:
        raise ConfigError(
            f"{name}: {sizes[-1]} is not allowed; it must not exceed max_num_batched_tokens "
            f"{config.max_num_batched_tokens}"
        )
    kept = max(config.window, config.query_len_decode)
    bound = config.max_num_seqs * kept
    fitting = tuple(size for size in sizes if size <= bound)
    if fitting == sizes:
        return sizes, ()
    dropped = listed(size for size in sizes if size > bound)
    limit = f"max_num_seqs {config.max_num_seqs} x {kept} kept rows a request = {bound}"
    if not fitting:
        return (), (f"no replay graphs: {name} {dropped} exceeds {limit}",)
    return tuple(sorted({*fitting, bound})), (f"{name} {dropped} becomes {bound}: it exceeds {limit}",)


def _sizes_by_rule(config: ServingConfig) -> tuple[Sizes, Notes]:
    """P2: from `window` up to the bound in steps of an eighth of the power-of-two interval (U7, A3, A12)."""
    window, limit = config.window, config.capture_size_limit
    bound = min(limit, config.max_num_seqs * window)
    origin = (
        f"the smaller of max_cudagraph_capture_size {limit} and max_num_seqs {config.max_num_seqs} x window {window}"
    )
    if bound > config.max_num_batched_tokens:
        raise ConfigError(
            f"the largest replay size {bound}, {origin}, is not allowed; it must not exceed "
            f"max_num_batched_tokens {config.max_num_batched_tokens}"
        )
    if bound < window:
        return (), (f"no replay graphs: the bound {bound}, {origin}, is below window {window}",)
    sizes = []
    size = window
    while size < bound:
        sizes.append(size)
        size += max(window, 1 << max(0, size.bit_length() - 4))
    return (*sizes, bound), ()


def model_capture_sizes(config: ServingConfig) -> tuple[Sizes, Notes]:
    """Return the PIECEWISE model graph sizes in tokens, ascending, and what must be said about them.

    Explicit sizes are the caller's, otherwise the engine's default list; replay changes neither (P4).

    Raises:
        ConfigError: an explicit size above max_num_batched_tokens.
    """
    sizes, notes = _model_sizes(config)
    if config.cudagraph_mode in PIECEWISE_MODES:
        return sizes, notes
    return (), (f"no piecewise model graphs: cudagraph_mode is {config.cudagraph_mode}",)


def _model_sizes(config: ServingConfig) -> tuple[Sizes, Notes]:
    """All model sizes, whatever the mode; a default list ends at the token budget at the latest."""
    budget, limit = config.max_num_batched_tokens, config.capture_size_limit
    if config.cudagraph_capture_sizes:
        if limit > budget:
            raise ConfigError(
                f"cudagraph_capture_sizes: {limit} is not allowed; it must not exceed max_num_batched_tokens {budget}"
            )
        return tuple(sorted(set(config.cudagraph_capture_sizes))), ()
    if limit > budget:
        return default_capture_sizes(budget), (
            f"model graphs end at max_num_batched_tokens {budget}, below max_cudagraph_capture_size {limit}",
        )
    return default_capture_sizes(limit), ()


def full_capture_sizes(config: ServingConfig) -> Sizes:
    """Return the sizes of FULL graphs in tokens, ascending: multiples of a decode's tokens (A6).

    Every model size is rounded up to such a multiple. The widest uniform decode that the sequences, the token
    budget and the largest model size allow is always a size, and the largest (A2, A3).

    Raises:
        ConfigError: an explicit model size above max_num_batched_tokens.
    """
    if config.cudagraph_mode not in FULL_MODES:
        return ()
    length = config.query_len_decode
    multiples = {-(-size // length) for size in _model_sizes(config)[0]}
    widest = min(config.max_num_seqs, config.max_num_batched_tokens // length, max(multiples))
    if widest == 0:
        return ()
    return tuple(length * count for count in sorted({count for count in multiples if count < widest} | {widest}))


def listed(sizes: Iterable[int]) -> str:
    """Return sizes as a short list for a message."""
    texts = [str(size) for size in sizes]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:10], f"... {texts[-1]}"])
