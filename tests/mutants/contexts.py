"""A pytest plugin: coverage data that say which test ran each line, how long each test took, and whether it passed."""

import json
from collections import defaultdict
from collections.abc import Iterator

import coverage
import pytest
from mutants.selection import TESTS

_seconds: defaultdict[str, dict[str, float]] = defaultdict(dict)
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What runs from a test's set-up to its teardown is recorded as its own, all its parameters together."""
    measured = coverage.Coverage.current()
    assert measured is not None, "run me under coverage"
    measured.switch_context(item.nodeid.split("[")[0])
    try:
        return (yield)
    finally:
        measured.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up."""
    test = report.nodeid.split("[")[0]
    of_file = _seconds[test.split("::")[0]]
    of_file[test] = of_file.get(test, 0.0) + report.duration
    if report.failed:
        _failed.add(test)


def pytest_sessionfinish() -> None:
    """A file of each test file, with the tests that passed."""
    TESTS.mkdir(parents=True, exist_ok=True)
    for name, seconds in _seconds.items():
        passed = {test: took for test, took in seconds.items() if test not in _failed}
        failed = sorted(seconds.keys() & _failed)
        (TESTS / f"{name.replace('/', '.')}.json").write_text(json.dumps({"passed": passed, "failed": failed}))
