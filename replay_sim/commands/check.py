"""`replay-sim check`: whether a function is safe in a CUDA graph, answered on a CPU by the host backend."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from replay_sim.capture.function_check import CheckReport

UNSAFE = 1

Target = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@click.command("check", short_help="Is a function safe in a CUDA graph, and what would go stale?")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE[:DTYPE]",
    help="An argument of the function, such as 8x16 or 8:int64; once for each, in order.  [dtype: float32]",
)
@click.option(
    "--warm-up/--no-warm-up",
    default=True,
    show_default=True,
    help="Call the function once before the capture, as an engine should.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(target: str, inputs: tuple[str, ...], warm_up: bool, as_json: bool) -> int:
    """Say what a CUDA graph would forbid in a function, and what would go stale.

    MODULE is a module's name or a Python file. FUNCTION, or a method or module object by its dotted name, is
    either the function to check, with its arguments given by --input or by default values, or takes no arguments
    and returns (function, inputs): the function to check, and a tuple of its arguments, a dict of them by name, or
    one tensor. It must run on a CPU. Tensors among the arguments are the graph's inputs: their values are changed
    between replays.

    The function is called, captured twice in one pool, replayed on changed inputs, and compared with eager calls.
    Exit status: 0 if it is safe, 1 if something was found, 2 if it cannot be checked.
    """
    with contextlib.redirect_stdout(sys.stderr):
        with _errors_named("cannot be imported", target):
            found, file = _load(target)
        folder = file.parent if file is not None else None
        with _errors_named("raises when it is called eagerly", target):
            from replay_sim.capture.function_check import check_function

            function, args, kwargs = _resolve(target, found, inputs)
            report = check_function(function, args, kwargs, warms_up=warm_up, folder=folder)
    click.echo(json.dumps(_as_dict(target, report)) if as_json else _as_text(target, report))
    return 0 if report.is_safe else UNSAFE


@contextlib.contextmanager
def _errors_named(what: str, target: str) -> Iterator[None]:
    """Errors of the user's own code are input that cannot be used: one line that says which and where."""
    try:
        yield
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:
        from replay_sim.capture.source_line import failing_line

        line = failing_line(error.__traceback__)
        where = f", at {line}" if line is not None and line.path != __file__ else ""
        message = str(error).partition("\n")[0]
        raise click.ClickException(f"{target} {what}: {type(error).__name__}: {message}{where}") from error


def _load(target: str) -> tuple[Any, Path | None]:
    """The object that MODULE:FUNCTION names and its module's file; ClickException if there is none."""
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise click.ClickException(f"{target!r} is not allowed; it must be MODULE:FUNCTION or FILE.py:FUNCTION")
    module = _import(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise click.ClickException(f"{target}: {module_name} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise click.ClickException(f"{target}: {name!r} is a {type(found).__name__}; it must be a function")
    file = getattr(module, "__file__", None)
    return found, Path(file) if file else None


def _import(name: str) -> Any:
    path = Path(name)
    if path.suffix != ".py":
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    if not path.is_file():
        raise click.ClickException(f"{name}: no such file")
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"checked_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _resolve(target: str, found: Callable[..., Any], inputs: tuple[str, ...]) -> Target:
    """The function to check, its arguments and keyword arguments; ClickException if some are missing."""
    if inputs:
        return found, tuple(_tensor(text) for text in inputs), {}
    needed = _needed_arguments(found)
    if needed:
        raise click.ClickException(
            f"{target} takes {', '.join(needed)}: give --input SHAPE[:DTYPE] for each, such as --input 8x16, or name "
            "a function without arguments that returns (function, inputs)"
        )
    made = found()
    if isinstance(made, tuple | list) and len(made) == 2 and callable(made[0]):
        function, given = made
        if isinstance(given, dict):
            return function, (), given
        return function, tuple(given) if isinstance(given, tuple | list) else (given,), {}
    return found, (), {}


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments without a default."""
    called = getattr(function, "forward", function)
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _tensor(text: str) -> Any:
    """A seeded tensor of SHAPE[:DTYPE]; whole numbers are 0 and 1."""
    import torch

    shape, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    sizes = shape.split("x")
    if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in sizes):
        raise click.ClickException(f"--input {text!r} is not allowed; it must be SHAPE[:DTYPE], such as 8x16:bfloat16")
    generator = torch.Generator().manual_seed(0)
    size = [int(size) for size in sizes]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(2, size, generator=generator).to(dtype)


def _as_dict(target: str, report: "CheckReport") -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "function": target,
        "safe": report.is_safe,
        "findings": [
            {
                "kind": finding.kind,
                "message": finding.message,
                "file": finding.source.path if finding.source else None,
                "line": finding.source.line if finding.source else None,
                "text": finding.source.text if finding.source else None,
            }
            for finding in report.findings
        ],
        "notes": list(report.notes),
        "num_segments": report.num_segments,
        "num_breaks": report.num_breaks,
        "num_operations": report.num_operations,
        "pool_bytes": report.pool_bytes,
    }


def _as_text(target: str, report: "CheckReport") -> str:
    """The report for people: the verdict first."""
    if report.is_safe:
        lines = [f"{target}: safe in a CUDA graph; every replay gave the bits of an eager call"]
    else:
        lines = [f"{target}: NOT safe in a CUDA graph"]
    for finding in report.findings:
        lines += ["", f"{finding.kind}: {finding.message}"]
        if finding.source is not None:
            lines.append(f"  {finding.source}: {finding.source.text}")
    if report.num_segments:
        lines += [
            "",
            f"captured: {report.num_segments} segments, {report.num_breaks} eager breaks, {report.num_operations} "
            f"operations, {report.pool_bytes / (1 << 20):,.0f} MiB of graph pool",
        ]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])
