"""Only `explore` knows plotly and ipywidgets, and nothing that it needs slows the rest down."""

import ast
from pathlib import Path

import replay_sim

ROOT = Path(replay_sim.__file__).parent
DRAWING = {"plotly", "ipywidgets", "nbclient", "nbconvert", "nbformat", "IPython"}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_only_explore_imports_what_draws() -> None:
    drawing = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py") if imported(path) & DRAWING}
    assert drawing == {"explore"}


def test_no_room_but_the_command_line_imports_explore() -> None:
    users = {
        path.relative_to(ROOT).parts[0]
        for path in ROOT.rglob("*.py")
        if "replay_sim.explore" in path.read_text() and "explore" not in path.relative_to(ROOT).parts
    }
    assert users == {"commands"}
