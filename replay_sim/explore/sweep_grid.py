"""The grid of a sweep as it is written on the command line: a name and its values, such as window=64,128,256."""

from __future__ import annotations

from collections.abc import Iterable

from replay_sim.config.errors import ConfigError, nearest, shown

PLAN, PROFILE, MODE = "plan", "profile", "cudagraph_mode"
NUMBERS = (
    "window",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_speculative_tokens",
    "max_cudagraph_capture_size",
    "decoder_replay_trim_threshold",
)
"""Settings of a serving config that a grid may give numbers, in the engine's names."""
WORDS = (MODE, PROFILE, PLAN)
"""What a grid may give words: a setting, the bundled profile that requests are drawn from, and the plan."""
FORM = "it must be NAME=VALUES, such as window=64,128,256 or max_num_seqs=8:256:8"
MOST_VALUES = 100_000

Setting = int | str
Axes = dict[str, tuple[Setting, ...]]


def parse_grid(texts: Iterable[str]) -> Axes:
    """The axes by name, each with its values in the order given; START:STOP:STEP stands for a range with STOP in it.

    Raises ConfigError, which names the axis and the value, for what is no such axis or is given twice.
    """
    axes: Axes = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"grid: {shown(text)} is not allowed; {FORM}")
        if name not in (*NUMBERS, *WORDS):
            known = [*NUMBERS, *WORDS]
            raise ConfigError(f"grid: no axis {shown(name)}; axes are {', '.join(known)}{nearest(name, known)}")
        if name in axes:
            raise ConfigError(f"grid: {name} is given twice; all its values belong into one list")
        axes[name] = _values(name, values)
    return axes


def _values(name: str, text: str) -> tuple[Setting, ...]:
    values: list[Setting] = []
    for part in text.split(","):
        values += [part] if name in WORDS and part else _numbers(name, part)
        if len(values) > MOST_VALUES:
            raise ConfigError(f"grid: {name} has more than {MOST_VALUES:,} values")
    twice = (
        next((value for value in values if values.count(value) > 1), None) if len(set(values)) < len(values) else None
    )
    if twice is not None:
        raise ConfigError(f"grid: {name} has {shown(twice)} twice; each value must be given once")
    return tuple(values)


def _numbers(name: str, part: str) -> list[int]:
    """A whole number, or the numbers of a range."""
    words = part.split(":")
    if len(words) not in (1, 3) or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise ConfigError(f"grid: {name}={shown(part)} is not allowed; {FORM}")
    if len(words) == 1:
        return [int(part)]
    start, stop, step = map(int, words)
    if not step or stop < start:
        raise ConfigError(f"grid: {name}={part} is empty; START must be at most STOP, and STEP at least 1")
    if (stop - start) // step >= MOST_VALUES:
        raise ConfigError(f"grid: {name} has more than {MOST_VALUES:,} values")
    return list(range(start, stop + 1, step))
