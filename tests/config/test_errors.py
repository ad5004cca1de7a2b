"""How messages and reports show what they were given."""

import pytest

from replay_sim.config.errors import printable

SHOWN = {
    "plain.csv": "plain.csv",
    "Größe-请求-запрос.csv": "Größe-请求-запрос.csv",
    'it\'s \\ "x"': 'it\'s \\ "x"',
    "a\nb\t": r"a\nb\t",
    "\x1b[2J\x07": r"\x1b[2J\x07",
    "\udcff.csv": r"\udcff.csv",
    "\u202egpj": r"\u202egpj",
    "": "",
}


@pytest.mark.parametrize("text", SHOWN)
def test_what_cannot_be_shown_is_escaped_and_letters_stay(text: str) -> None:
    """Issue 8: names of files are from outside."""
    assert printable(text) == SHOWN[text]
    assert printable(text).isprintable()
    printable(text).encode()
