"""Mutants of the four rooms, by the operators of cosmic-ray, and a sample of them chosen by a seed."""

import ast
import difflib
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import attrs
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOMS = ("plan", "batch", "capture", "replay")
LEFT_OUT = ("replay_sim/capture/cuda.py", "replay_sim/capture/kernel_nodes.py")
"""What only a machine with a GPU runs."""
EXCEPTIONS = "core/ExceptionReplacer"
"""Replaces what is caught by a name that no module has, and fails at a dotted name."""


@attrs.frozen(order=True)
class Mutant:
    """One change of one place, lines from 1: the `occurrence`-th place of an operator in a module."""

    module: str
    begin: tuple[int, int]
    end: tuple[int, int]
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        """As short as it is unique."""
        return f"{self.module}:{self.begin[0]}:{self.operator}:{self.occurrence}"

    @property
    def room(self) -> str:
        """Of the module."""
        return self.module.split("/")[1]

    def diff(self, root: Path) -> str:
        """The changed lines before and after."""
        source = (root / self.module).read_text()
        lines = difflib.unified_diff(source.splitlines(), self.code(source).splitlines(), n=0, lineterm="")
        return "\n".join(list(lines)[2:])

    def code(self, source: str) -> str:
        """The module with the change."""
        code = mutate_code(source, get_operator(f"core/{self.operator}")(), self.occurrence)
        assert code is not None and code != source, self.name
        return code


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` mutants, as many of each room, each of another place; in an order of chance."""
    rng = random.Random(seed)
    chosen = [mutant for room in ROOMS for mutant in islice(_of_room(root, room, rng), count // len(ROOMS))]
    rng.shuffle(chosen)
    return chosen


def _of_room(root: Path, room: str, rng: random.Random) -> Iterator[Mutant]:
    """One that compiles of each place, in an order of chance."""
    places: dict[tuple[str, tuple[int, int], tuple[int, int]], list[Mutant]] = defaultdict(list)
    sources = {str(path.relative_to(root)): path.read_text() for path in (root / "replay_sim" / room).rglob("*.py")}
    for module, source in sorted(sources.items()):
        for mutant in mutants_of(source, module):
            places[module, mutant.begin, mutant.end].append(mutant)
    order = sorted(places)
    rng.shuffle(order)
    for place in order:
        mutant = rng.choice(sorted(places[place]))
        if _compiles(mutant.code(sources[mutant.module])):
            yield mutant


def mutants_of(source: str, module: str) -> Iterator[Mutant]:
    """All of a module but those that nothing or only a GPU runs."""
    if module in LEFT_OUT:
        return
    tree, left_out = get_ast(source), list(_left_out(ast.parse(source)))
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or name == EXCEPTIONS:
            continue
        positions = (place for node in ast_nodes(tree) for place in operator().mutation_positions(node))
        for occurrence, (begin, end) in enumerate(positions):
            if not any(start <= begin and end <= stop for start, stop in left_out):
                yield Mutant(module, begin, end, name.removeprefix("core/"), occurrence)


def _compiles(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _left_out(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations, imports for them, Triton kernels, and the `strict` of a zip, an assertion, begin and end."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            nodes += [node.returns, *([node] if any("triton" in ast.unparse(by) for by in node.decorator_list) else [])]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            nodes.append(node.value)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.append(node)
    for part in nodes:
        if isinstance(part, ast.expr | ast.stmt):
            yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)
