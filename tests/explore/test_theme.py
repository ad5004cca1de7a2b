"""The theme: looks that stay apart without colour, titles that state findings, captions that carry sources."""

import itertools
import math

import plotly.graph_objects as go
import pytest

from replay_sim.explore.theme import LOOKS, Meaning, finish, line, marker, text, titled

JUST_APART = 8.0  # of lightness, 0 to 100
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
COLOUR_BLIND = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def linear(colour: str) -> tuple[float, ...]:
    values = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)


def lightness(rgb: tuple[float, ...]) -> float:
    luminance = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]
    return 116 * math.cbrt(luminance) - 16 if luminance > 0.008856 else 903.3 * luminance


PAIRS = [pair for pair in itertools.combinations(Meaning, 2) if LOOKS[pair[0]].pattern == LOOKS[pair[1]].pattern]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_looks_of_one_pattern_differ_in_grey(pair) -> None:
    first, second = (lightness(linear(LOOKS[meaning].colour)) for meaning in pair)
    assert abs(first - second) >= JUST_APART


@pytest.mark.parametrize("matrix", COLOUR_BLIND.values(), ids=COLOUR_BLIND)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_looks_of_one_pattern_differ_for_the_colour_blind(pair, matrix) -> None:
    seen = []
    for meaning in pair:
        rgb = linear(LOOKS[meaning].colour)
        seen.append(lightness(tuple(sum(m * c for m, c in zip(row, rgb, strict=True)) for row in matrix)))
    assert abs(seen[0] - seen[1]) >= JUST_APART


def test_every_meaning_has_its_own_look() -> None:
    assert set(LOOKS) == set(Meaning)
    assert len({(look.colour, look.pattern) for look in LOOKS.values()}) == len(Meaning)


def test_a_look_is_the_same_in_bars_and_lines() -> None:
    for meaning in Meaning:
        assert marker(meaning)["color"] == line(meaning)["color"] == LOOKS[meaning].colour


def test_a_finished_figure_states_its_finding_and_its_source() -> None:
    figure = finish(go.Figure(), finding="Half are pads", source="counted from <b>file</b>", height=300)
    assert figure.layout.title.text == "<b>Half are pads</b>"
    (caption,) = figure.layout.annotations
    assert caption.text == "Source: counted from &lt;b&gt;file&lt;/b&gt;"
    assert figure.layout.height == 300


def test_text_from_files_is_shown_as_it_is() -> None:
    assert text("<a href='x'>&") == "&lt;a href='x'&gt;&amp;"


def test_a_title_of_several_lines_starts_where_one_line_does() -> None:
    """Plotly draws the first of several lines 12 pixels higher."""
    one, several = titled("short"), titled("words of a finding " * 9)
    assert "<br>" in several["text"] and "<br>" not in one["text"]
    assert several["pad"]["t"] - one["pad"]["t"] == 12
