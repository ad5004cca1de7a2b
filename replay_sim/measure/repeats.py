"""How much a measurement differs from itself: step times of two records of the same sweep, batch by batch (issue 4)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tabulate import tabulate

from replay_sim.measure.records import Point, Record, bundled_records, read_record, write_record

PROGRAM = "python -m replay_sim.measure.repeats"

SAME_BATCH = (
    "sweep",
    "arm",
    "num_tokens",
    "num_reqs",
    "longest_query",
    "num_decodes",
    "computed",
    "window",
    "num_local_experts",
    "max_num_batched_tokens",
)
"""What points of two runs share that ran the same batch in the same way."""


def compare_records(first: Record, second: Record) -> list[Point]:
    """How many times as long as in `first` each arm's steps took in `second`, by sweep: a point an arm.

    `ratio_median`, `ratio_min` and `ratio_max` are of step_us over the `n` batches that both ran; on another GPU they
    say what that changes, on the same how far to trust one run. Raises ValueError for records other than `steps` and
    for two without a common batch.
    """
    kinds = {first.kind, second.kind}
    if kinds != {"steps"}:
        raise ValueError(f"records of kinds {sorted(kinds)}: allowed are two of kind steps")
    before, after = ({_batch(point): _step_us(point) for point in record.points} for record in (first, second))
    ratios: dict[tuple[str, str], list[float]] = {}
    for batch in before.keys() & after.keys():
        ratios.setdefault((str(batch[0]), str(batch[1])), []).append(after[batch] / before[batch])
    if not ratios:
        raise ValueError("both records have no batch in common: measure the same sweep on the same shape")
    return [_point(sweep, arm, ratios[sweep, arm]) for sweep, arm in sorted(ratios)]


def repeat_record(bundled: Record, others: Sequence[Record]) -> Record:
    """A record of kind `repeat`: `others`, in the order of `run`, each compared with the bundled record.

    Its environment is the bundled record's, `measured` in its settings says where the others come from. Raises what
    `compare_records` raises.
    """
    folders = [f"run{run}" for run in range(1, len(others) + 1)]
    points = [{"run": run} | point for run, other in enumerate(others, 1) for point in compare_records(bundled, other)]
    subject, model = bundled.settings["subject"], bundled.settings["model"]
    measure = " && ".join(f"replay-sim measure --suite steps --sweep {subject} --out {folder}" for folder in folders)
    return Record(
        kind="repeat",
        environment=bundled.environment,
        command=f"{measure} && {PROGRAM} {' '.join(f'{folder}/*.json' for folder in folders)} --out records",
        seed=bundled.seed,
        settings={"subject": subject, "model": model, "measured": [other.provenance for other in others]},
        points=points,
    )


def repeats_of(others: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """A `repeat` record for each sweep of `others`, and the sweeps of which there is no bundled record to compare with.

    Raises what `compare_records` raises.
    """
    bundled = {str(twin.settings["subject"]): twin for _, twin in bundled_records("steps") if twin.environment["gpu"]}
    by_sweep: dict[str, list[Record]] = {}
    for other in others:
        by_sweep.setdefault(str(other.settings.get("subject")), []).append(other)
    found = [repeat_record(bundled[sweep], runs) for sweep, runs in by_sweep.items() if sweep in bundled]
    return found, [sweep for sweep in by_sweep if sweep not in bundled]


def repeat_table(points: Iterable[Point]) -> str:
    """Points of `repeat` records as markdown."""
    keys = ("sweep", "run", "arm", "n", "ratio_median", "ratio_min", "ratio_max")
    return tabulate([[point[key] for key in keys] for point in points], keys, tablefmt="pipe", floatfmt=".3f")


def _batch(point: Point) -> tuple[object, ...]:
    return tuple(point[key] for key in SAME_BATCH)


def _step_us(point: Point) -> float:
    value = point["step_us"]
    assert isinstance(value, int | float), f"step_us is {value!r}"
    return float(value)


def _point(sweep: str, arm: str, ratios: list[float]) -> Point:
    return {
        "sweep": sweep,
        "arm": arm,
        "n": len(ratios),
        "ratio_median": round(float(np.median(ratios)), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare `steps` records with the bundled ones of their sweeps; with --out, keep what was found as records."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=main.__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="`steps` records, measured on your GPU")
    parser.add_argument("--out", type=Path, help="folder to write records `repeat` to")
    asked = parser.parse_args(arguments)
    try:
        found, without = repeats_of([read_record(path) for path in asked.records])
    except ValueError as error:
        parser.error(str(error))
    print(repeat_table(point for record in found for point in record.points))
    if without:
        print(f"no bundled record of {', '.join(without)}: left out")
    for record in found if asked.out is not None else ():
        write_record(record, asked.out / record.file_name)


if __name__ == "__main__":
    main()
