"""The grid of a sweep as it is written on the command line: a name and its values, such as window=64,128,256."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from replay_sim.config import ServingConfig
from replay_sim.config.errors import ConfigError, nearest, shown
from replay_sim.config.serving import CUDAGRAPH_MODES, LARGEST_SPECULATION, LARGEST_TOKENS

PLAN, PROFILE, MODE = "plan", "profile", "cudagraph_mode"
NUMBERS = {
    "window": (1, LARGEST_TOKENS),
    "max_num_seqs": (1, LARGEST_TOKENS),
    "max_num_batched_tokens": (1, LARGEST_TOKENS),
    "num_speculative_tokens": (0, LARGEST_SPECULATION),
    "max_cudagraph_capture_size": (1, LARGEST_TOKENS),
    "decoder_replay_trim_threshold": (1, LARGEST_TOKENS),
}
"""Settings of a serving config that a grid may give numbers, in the engine's names, with the least and the most."""
WORDS = (MODE, PROFILE, PLAN)
"""What a grid may give words: a setting, the bundled profile that requests are drawn from, and the plan."""
FORM = "it must be NAME=VALUES, such as window=64,128,256 or max_num_seqs=8:256:8"
MOST_VALUES = 100_000
MOST_DIGITS = 9

Setting = int | str
Axes = dict[str, tuple[Setting, ...]]


def parse_grid(texts: Iterable[str]) -> Axes:
    """The axes by name, each with its values in the order given; START:STOP:STEP stands for a range with STOP in it.

    Spaces around names and values are left out. Raises ConfigError, which names the axis and the value, for what is no
    such axis or value, or is given twice.
    """
    axes: Axes = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not name or not equals or not values.strip():
            raise ConfigError(f"grid: {shown(text)} is not allowed; {FORM}")
        if name not in (*NUMBERS, *WORDS):
            raise ConfigError(f"grid: {_no_axis(name)}")
        if name in axes:
            raise ConfigError(f"grid: {name} is given twice; all its values belong into one list")
        axes[name] = _values(name, values)
    return axes


def _no_axis(name: str) -> str:
    """Why there is no axis of this name, and which there are."""
    axes = [*NUMBERS, *WORDS]
    if name in {field.name for field in attrs.fields(ServingConfig)}:
        return f"{name} is a setting of CONFIG and no axis; axes are {', '.join(axes)}"
    return f"no axis {shown(name)}; axes are {', '.join(axes)}{nearest(name, axes)}"


def _values(name: str, text: str) -> tuple[Setting, ...]:
    values: list[Setting] = []
    for part in map(str.strip, text.split(",")):
        if not part:
            raise ConfigError(f"grid: {name}={shown(text)} has an empty value; values are separated by single commas")
        values += [_word(name, part)] if name in WORDS else _numbers(name, part)
        if len(values) > MOST_VALUES:
            raise ConfigError(f"grid: {name} has more than {MOST_VALUES:,} values")
    twice = (
        next((value for value in values if values.count(value) > 1), None) if len(set(values)) < len(values) else None
    )
    if twice is not None:
        raise ConfigError(f"grid: {name} has {shown(twice)} twice; each value must be given once")
    return tuple(values)


def _word(name: str, part: str) -> str:
    """A word; of modes one that there is, in capitals. Profiles and plans are looked up where they are used."""
    if name != MODE:
        return part
    if part.upper() not in CUDAGRAPH_MODES:
        hint = nearest(part.upper(), list(CUDAGRAPH_MODES))
        allowed = ", ".join(CUDAGRAPH_MODES)
        raise ConfigError(f"grid: {name}={shown(part)} is not allowed; it must be one of {allowed}{hint}")
    return part.upper()


def _numbers(name: str, part: str) -> list[int]:
    """A whole number, or the numbers of a range."""
    words = part.split(":")
    least, most = NUMBERS[name]
    if len(words) not in (1, 3) or not all(word.isascii() and word.isdigit() for word in words):
        raise _no_number(name, part)
    if any(len(word) > MOST_DIGITS for word in words) or not least <= int(words[0]) <= most:
        raise _no_number(name, part)
    if len(words) == 1:
        return [int(part)]
    start, stop, step = map(int, words)
    if not step or stop < start:
        raise ConfigError(f"grid: {name}={part} is empty; START must be at most STOP, and STEP at least 1")
    if stop > most:
        raise _no_number(name, part)
    if (stop - start) // step >= MOST_VALUES:
        raise ConfigError(f"grid: {name} has more than {MOST_VALUES:,} values")
    return list(range(start, stop + 1, step))


def _no_number(name: str, part: str) -> ConfigError:
    least, most = NUMBERS[name]
    return ConfigError(
        f"grid: {name}={shown(part)} is not allowed; it must be an integer from {least} to {most}, or a range "
        "START:STOP:STEP of such, as in 8:256:8"
    )
