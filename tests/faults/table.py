"""The table of known faults: id, how each is made impossible or caught, and the tests that show it."""

import inspect
from collections.abc import Callable

import attrs
from tabulate import tabulate

# Tests with one of these fixtures run on both backends.
ON_BOTH = {"backend", "place"}


@attrs.define
class Fault:
    """One fault: `how` it is dealt with, and the tests of it by file."""

    how: str
    tests: dict[str, str] = attrs.field(factory=dict)

    @property
    def where(self) -> str:
        """Files, and what the tests run on."""
        places = {place for entry in self.tests.values() for place in entry.split(", ")}
        files = dict.fromkeys(name.partition("::")[0] for name in self.tests)
        return f"{', '.join(files)} ({', '.join(sorted(places, reverse=True))})"


FAULTS: dict[str, Fault] = {}


def fault(identifier: str, how: str = "") -> Callable[[Callable], Callable]:
    """Enters a test of a known fault into the table; it is named after the id, and the first one says how."""

    def enter(test: Callable) -> Callable:
        if not test.__name__.startswith(f"test_{identifier}_"):
            raise ValueError(f"{test.__name__} is a test of {identifier}: its name must start with test_{identifier}_")
        file = inspect.getsourcefile(test).rpartition("/")[2]
        FAULTS.setdefault(identifier, Fault(how)).tests[f"{file}::{test.__name__}"] = _runs_on(test)
        return test

    return enter


def _runs_on(test: Callable) -> str:
    marks = {mark.name for mark in getattr(test, "pytestmark", ())}
    if "skip" in marks:
        return "open"
    if "gpu" in marks:
        return "GPU"
    return "host, GPU" if ON_BOTH & set(inspect.signature(test).parameters) else "host"


def in_order(identifier: str) -> tuple[str, int]:
    """The key that sorts ids by letter, then number."""
    return identifier[0], int(identifier[1:])


def markdown() -> str:
    """The whole table."""
    rows = [(name, FAULTS[name].how, FAULTS[name].where) for name in sorted(FAULTS, key=in_order)]
    return tabulate(rows, ("id", "how it is made impossible or caught", "tested in (on)"), tablefmt="pipe")
