"""Which tests try a mutant: those that ran its lines, by the coverage data of one run of all of them."""

import ast
import json
from collections.abc import Iterable
from pathlib import Path

import attrs
import coverage
from mutants.sampling import Mutant

COVERAGE, TESTS = Path(".coverage"), Path("build/tests")
MOST_SECONDS = 10.0
"""Of tests for one mutant, by how long each took in the run for coverage; the shortest ones."""


@attrs.define
class Selection:
    """Tests by module and line, the seconds of each that passes, and those that fail; parameters count together."""

    by_line: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]
    failed: list[str]

    @classmethod
    def read(cls, root: Path) -> "Selection":
        """From what runs of test files with `coverage run -m pytest -p mutants.contexts` left in `root`."""
        data = coverage.CoverageData(str(root / COVERAGE))
        data.read()
        by_line = {}
        for name in data.measured_files():
            lines = data.contexts_by_lineno(name)
            by_line[str(Path(name).relative_to(root))] = {line: set(tests) for line, tests in lines.items()}
        seconds: dict[str, float] = {}
        failed: list[str] = []
        for path in (root / TESTS).glob("*.json"):
            of_file = json.loads(path.read_text())
            seconds |= of_file["passed"]
            failed += of_file["failed"]
        return cls(by_line, seconds, failed)

    def tests_of(self, mutant: Mutant, source: str) -> list[str]:
        """The module's own tests first, then by time.

        For a line that no test ran as its own, being run at import or in another process: the tests of the module.
        """
        lines = self.by_line.get(mutant.module, {})
        tests = set().union(*(lines.get(line, set()) for line in range(mutant.begin[0], mutant.end[0] + 1)))
        if not tests & self.seconds.keys() or not in_a_function(source, mutant.begin[0]):
            tests = set().union(*lines.values(), (test for test in self.seconds if _is_in(test, mutant)))
        return self._shortest(tests & self.seconds.keys(), mutant)

    def _shortest(self, tests: Iterable[str], mutant: Mutant) -> list[str]:
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda test: (not _is_in(test, mutant), self.seconds[test], test)):
            if total + self.seconds[test] <= MOST_SECONDS:
                chosen.append(test)
                total += self.seconds[test]
        return chosen


def _is_in(test: str, mutant: Mutant) -> bool:
    """Whether a test is in the file that mirrors the mutant's module."""
    path = Path(mutant.module)
    return test.startswith(f"tests/{path.parent.name}/test_{path.name}::")


def in_a_function(source: str, line: int) -> bool:
    """Whether a line is in the body of a function, so that importing the module does not run it."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return any(node.body[0].lineno <= line <= (node.end_lineno or 0) for node in functions)
