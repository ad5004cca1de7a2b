"""Every clause of the design has a test that names it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SYSTEM = TESTS.parent / "replay_sim" / "design" / "system.md"


def clauses() -> set[str]:
    return set(re.findall(r"^- ([A-Z]\d+) ", SYSTEM.read_text(encoding="utf-8"), re.MULTILINE))


def named_in_docstrings() -> set[str]:
    """Codes in the docstrings of tests outside of tests/faults, where the same letters number faults."""
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if "faults" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named |= expand(ast.get_docstring(node) or "")
    return named


def expand(text: str) -> set[str]:
    """The codes in a text; "S1 to S4" and "B1-B4" name those between as well."""
    found = set(re.findall(r"\b[A-Z]\d+\b", text))
    for letter, first, last in re.findall(r"\b([A-Z])(\d+)(?: to |-|–)[A-Z](\d+)\b", text):
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


def test_every_clause_is_named_by_a_test() -> None:
    assert len(clauses()) > 50
    assert not clauses() - named_in_docstrings()
