"""The one error that bad settings raise, and how it shows what it was given."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line: the setting, its value, what is allowed."""


def shown(value: object) -> str:
    """Return `value` as one short ASCII line, fit for an error message whatever it holds."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """Return `text` with escapes for what a terminal acts on or UTF-8 cannot hold; letters of any script stay."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def nearest(name: str, known: list[str]) -> str:
    """Return a hint such as `; did you mean 'window'?` with the closest of `known`; empty if none is alike."""
    import difflib

    matches = difflib.get_close_matches(name[:200], known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
