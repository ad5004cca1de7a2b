"""Runs of tests on copies of the project: of each test file with coverage, then of the tests of each mutant."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import attrs
from mutants.sampling import Mutant
from mutants.selection import Selection

COPIED = ("replay_sim", "tests", "notebooks", "pyproject.toml", "environment.yml", "Makefile", "README.md")
QUICK = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "mutants.unshrunk", "--hypothesis-seed=0")


@attrs.frozen
class Verdict:
    """What became of a mutant, in how many seconds; of how many tests at most, and which was the first to fail."""

    mutant: Mutant
    outcome: str
    seconds: float
    num_tests: int
    by: str


def copy_project(root: Path, to: Path) -> Path:
    """A copy in which a file can be changed while others run."""
    to.mkdir(parents=True)
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name)
        elif source.exists():
            shutil.copy2(source, to / name)
    return to


def run_python(root: Path, arguments: Sequence[str], timeout: float, **environment: str) -> tuple[int | None, str]:
    """Run Python in a copy; its exit status, None if it ran out of time, and what it printed."""
    path = os.pathsep.join((str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")))
    one_core = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | one_core | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return None, printed
    return process.returncode, printed


def run_covered(root: Path, test_file: str) -> str:
    """Run one test file with coverage; what it printed."""
    arguments = ("-m", "coverage", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants.contexts")
    return run_python(root, (*arguments, test_file), 600)[1]


def combine(root: Path) -> None:
    """One file of coverage data from those of all processes."""
    status, printed = run_python(root, ("-m", "coverage", "combine", "--quiet"), 600)
    if status:
        raise RuntimeError(f"coverage combine failed: {printed}")


def try_mutant(copies: SimpleQueue[Path], selection: Selection, mutant: Mutant) -> Verdict:
    """Try a mutant in a copy that no other is tried in; every one of its tests passes without the change."""
    copy = copies.get()
    path, begin = copy / mutant.module, time.monotonic()
    source, stamps = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    tests = selection.tests_of(mutant, source)
    limit = 30 + 2 * sum(map(selection.seconds.__getitem__, tests))
    try:
        path.write_text(mutant.code(source))
        os.utime(path, ns=(stamps[0], stamps[1] + 10**10))  # compiled files are told from the source by its second
        status, printed = (
            run_python(copy, ("-m", "pytest", *QUICK, *tests), limit, PYTHONDONTWRITEBYTECODE="1") if tests else (0, "")
        )
    finally:
        path.write_text(source)
        os.utime(path, ns=stamps)
        copies.put(copy)
    outcome = "timeout" if status is None else "killed" if status else "survived"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    by = failed[1] if failed else "" if not status else f"exit {status}"
    return Verdict(mutant, outcome, time.monotonic() - begin, len(tests), by)
