"""Prints the table of known faults at the end of a run that collected their tests."""

from faults.table import FAULTS, markdown


def pytest_terminal_summary(terminalreporter) -> None:
    """The table of what was collected."""
    if FAULTS:
        terminalreporter.section("known faults")
        terminalreporter.write_line(markdown())
