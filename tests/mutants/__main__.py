"""Mutation testing of the four rooms that decide what is captured and replayed: a sample by seed, each tried once."""

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import click
from mutants.sampling import ROOMS, Mutant, sample
from mutants.selection import Selection
from mutants.trying import Verdict, combine, copy_project, run_covered, try_mutant
from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
TRIED_BY = (
    *(f"{room}/test_*.py" for room in (*ROOMS, "faults")),
    *(f"commands/test_{name}.py" for name in ("check", "plan")),
    *(f"decoder/test_{name}.py" for name in ("model", "one_launch", "pads_alone", "pool_prediction", "step")),
)
"""The rooms' own tests, and the quicker ones of what stands on them."""
OUT_OF_MEMORY = Path("/proc/self/oom_score_adj")
"""A mutant may fill the memory; a limit of address space would fail unchanged tests, whose arenas reserve 64 GiB."""


@click.command()
@click.option(
    "--sample", "count", type=click.IntRange(4), default=400, show_default=True, help="Mutants, as many of each room."
)
@click.option("--seed", default=8, show_default=True, help="Chooses them.")
@click.option("--workers", default=os.cpu_count(), show_default="one a core", help="Mutants at a time.")
@click.option("--seconds", default=86400.0, show_default=True, help="Begin no mutant after so many.")
@click.option("--only", type=click.File(), help="Try only the mutants whose names stand in this file, one a line.")
@click.option("--out", type=click.Path(path_type=Path), default="build/mutants", show_default=True, help="Folder.")
def main(count: int, seed: int, workers: int, seconds: float, only: Iterable[str] | None, out: Path) -> None:
    """Write `mutants.tsv`, and `survivors.txt` with what each change is; exits with 1 if any survived."""
    begin = time.monotonic()
    if OUT_OF_MEMORY.exists():
        OUT_OF_MEMORY.write_text("900")
    os.environ.setdefault("REPLAY_SIM_SHARED", str(ROOT.parent / "shared"))
    chosen = sample(ROOT, count, seed)
    if only is not None:
        names = {line.split()[0] for line in only}
        chosen = [mutant for mutant in chosen if mutant.name in names]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        first = copy_project(ROOT, Path(folder) / "0")
        selection = _cover(first, pool)
        click.echo(
            f"{len(selection.seconds)} tests, {time.monotonic() - begin:.0f} s; fail unchanged: {selection.failed}"
        )
        copies: SimpleQueue[Path] = SimpleQueue()
        copies.put(first)
        for index in range(1, min(workers, len(chosen))):
            copies.put(Path(shutil.copytree(first, Path(folder) / str(index), symlinks=True)))

        def attempt(mutant: Mutant) -> Verdict | None:
            return try_mutant(copies, selection, mutant) if time.monotonic() < begin + seconds else None

        tried = [pool.submit(attempt, mutant) for mutant in chosen]
        verdicts = [done.result() for done in tqdm(as_completed(tried), total=len(tried), unit="mutant")]
    report([verdict for verdict in verdicts if verdict is not None], out, time.monotonic() - begin)


def _cover(copy: Path, pool: ThreadPoolExecutor) -> Selection:
    """Run all tests once, a process for each of their files, the largest first."""
    files = [path for pattern in TRIED_BY for path in (copy / "tests").glob(pattern)]
    files.sort(key=lambda path: path.stat().st_size, reverse=True)
    runs = [pool.submit(run_covered, copy, str(path.relative_to(copy))) for path in files]
    for run in tqdm(as_completed(runs), total=len(runs), unit="file"):
        run.result()
    combine(copy)
    return Selection.read(copy)


def report(verdicts: Sequence[Verdict], out: Path, seconds: float) -> None:
    """Write the files, print the counts by room."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{verdict.outcome}\t{verdict.mutant.name}\t{verdict.num_tests}\t{verdict.seconds:.0f}\t{verdict.by}"
        for verdict in sorted(verdicts, key=lambda verdict: verdict.mutant)
    ]
    (out / "mutants.tsv").write_text("\n".join(["outcome\tmutant\ttests\tseconds\tby", *lines, ""]))
    survivors = [verdict for verdict in verdicts if verdict.outcome == "survived"]
    (out / "survivors.txt").write_text("".join(f"{one.mutant.name}\n{one.mutant.diff(ROOT)}\n" for one in survivors))
    counts = {room: Counter(one.outcome for one in verdicts if one.mutant.room == room) for room in ROOMS}
    outcomes = ("killed", "timeout", "survived")
    table = [[room, count.total(), *(count[outcome] for outcome in outcomes)] for room, count in counts.items()]
    click.echo(tabulate(table, ("Room", "Mutants", *outcomes), tablefmt="pipe"))
    click.echo(f"{len(verdicts)} mutants, {len(survivors)} survived, {seconds:.0f} s.")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
