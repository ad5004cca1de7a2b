"""The house: rooms whose arrows point one way, light imports, and what every file keeps."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import replay_sim

PACKAGE = Path(replay_sim.__file__).parent
ROOT = Path(__file__).parents[1]
ROOMS = ("config", "plan", "batch", "capture", "replay", "decoder", "workload", "measure", "explore", "commands")
"""In the order in which a step flows through them; a room may use those before it."""
USED_BY_ALL = ("whole_file", "progress")
"""Modules below all rooms."""
DRAWING = {"plotly", "ipywidgets", "anywidget", "nbclient", "nbconvert", "nbformat", "IPython", "jinja2"}
HEAVY = ("torch", "triton", "pandas", "scipy", "plotly", "ipywidgets", "IPython", "jupyter_client", "tqdm")
WITHOUT_TORCH = ("config", "plan", "workload", "batch.request", "batch.rows", "batch.dispatch")
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|tmp|srv)/\w")
LEFT_OPEN = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """The full names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """The room, or the module outside of rooms, that a module of the package lies in."""
    parts = name.split(".")
    return parts[1] if parts[0] == "replay_sim" and len(parts) > 1 else None


def modules_in(*rooms: str) -> list[str]:
    names = map(name_of, MODULES)
    return [name for name in names if any(f"{name}.".startswith(f"replay_sim.{room}.") for room in rooms)]


def loaded_by(modules: list[str], *, found_among: tuple[str, ...]) -> list[str]:
    """Which of `found_among` a fresh interpreter has loaded after it imported the modules."""
    program = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"print(*[name for name in {found_among} if name in sys.modules])"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_every_folder_of_the_package_with_code_is_a_room() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in MODULES if path.parent != PACKAGE} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    """Nothing in capture knows replay, nothing in replay knows measure, and so on."""
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *USED_BY_ALL, "__version__", None}
    against = {
        (name_of(path), used)
        for path in (PACKAGE / room).rglob("*.py")
        for used in imports(path)
        if used.split(".")[0] == "replay_sim" and room_of(used) not in allowed
    }
    assert not against


def test_what_all_rooms_use_knows_none_of_them() -> None:
    for name in USED_BY_ALL:
        assert not [used for used in imports(PACKAGE / f"{name}.py") if used.startswith("replay_sim")]


def test_only_explore_imports_what_draws_and_only_commands_import_explore() -> None:
    drawing = {room_of(name_of(path)) for path in MODULES if {used.split(".")[0] for used in imports(path)} & DRAWING}
    assert drawing == {"explore"}
    users = {room_of(name_of(path)) for path in MODULES if any(room_of(used) == "explore" for used in imports(path))}
    assert users <= {"explore", "commands"}


def test_the_package_its_settings_and_plans_load_nothing_heavy() -> None:
    assert loaded_by(["replay_sim", "replay_sim.config", "replay_sim.plan"], found_among=(*HEAVY, "numpy")) == []


def test_workloads_and_dispatch_need_no_torch() -> None:
    modules = modules_in(*WITHOUT_TORCH)
    assert {"replay_sim.workload.scheduler", "replay_sim.batch.dispatch", "replay_sim.plan.optimal"} <= set(modules)
    assert loaded_by(modules, found_among=HEAVY) == []


def test_commands_load_what_they_need_only_when_they_run() -> None:
    assert loaded_by(modules_in("commands"), found_among=(*HEAVY, "numpy")) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_in_one_sentence_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, "no module docstring"
    first, *_ = docstring.split("\n\n")
    assert first.endswith(".") and not re.search(r"[.!?] [A-Z]", first), first


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_file_holds_one_concern_and_a_function_fits_on_a_screen(path: Path) -> None:
    """A Triton kernel is one function, however long."""
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno for node in functions}
    long = {name for name, length in lengths.items() if length > MOST_FUNCTION_LINES}
    assert not {name for name in long if not name.endswith("_kernel")}


def published() -> list[Path]:
    """The text files of the package, and those beside it that users read and run."""
    beside = [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "environment.yml")]
    kinds = ("*.py", "*.json", "*.md", "*.j2")
    inside = [path for kind in kinds for path in PACKAGE.rglob(kind)]
    return [*(path for path in beside if path.is_file()), *inside, *(ROOT / "notebooks").glob("*.ipynb")]


@pytest.mark.parametrize("path", published(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_published_file_names_no_folder_of_a_machine(path: Path) -> None:
    assert not MACHINE_PATH.search(path.read_text(encoding="utf-8"))


def test_nothing_is_left_to_do_in_the_code() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert not [path for path in files if LEFT_OPEN.search(path.read_text())]
