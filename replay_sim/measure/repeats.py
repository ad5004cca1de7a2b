"""How much a measurement differs from itself: the times of two records of the same sweep, point by point (issue 4)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import numpy as np
from tabulate import tabulate

from replay_sim.config.errors import printable
from replay_sim.measure.records import Point, Record, bundled_records, read_record, write_record

PROGRAM = "python -m replay_sim.measure.repeats"
SWEEP_OF_SUBJECT = {"plans": "capture"}
"""Where the sweep's name is not the subject of its records."""


@attrs.frozen
class Comparison:
    """How points of one kind of record are compared: what those share that measured the same, by what, and the time."""

    same: tuple[str, ...]
    by: str
    time: str


COMPARISONS = {
    "steps": Comparison(
        (
            "arm",
            "num_tokens",
            "num_reqs",
            "longest_query",
            "num_decodes",
            "computed",
            "window",
            "num_local_experts",
            "max_num_batched_tokens",
        ),
        "arm",
        "step_us",
    ),
    "prefill": Comparison(
        ("arm", "prompt_tokens", "max_num_batched_tokens", "window", "num_local_experts"), "arm", "prefill_us"
    ),
    "calls": Comparison(("op", "rows"), "op", "device_us"),
    "capture": Comparison(("plan", "group"), "group", "seconds"),
}
"""By kind of record."""


def compare_records(first: Record, second: Record) -> list[Point]:
    """How many times as long as in `first` each arm's steps took in `second`: a point an arm, an operation, a group.

    `ratio_median`, `ratio_min` and `ratio_max` are of the times over the `n` points that both have; `of` names the
    kind of the records. On another GPU they say what that changes, on the same how far to trust one run. Raises
    ValueError for records of different kinds, of a kind that has no Comparison, for two without a common point, and for
    a point without what it is compared by or a time above 0.
    """
    kinds = {first.kind, second.kind}
    if len(kinds) > 1 or not kinds <= COMPARISONS.keys():
        raise ValueError(f"records of kinds {sorted(kinds)}: allowed are two of one of {', '.join(COMPARISONS)}")
    how = COMPARISONS[first.kind]
    before, after = _times(first, how), _times(second, how)
    ratios: dict[str, list[float]] = {}
    for point in first.points:
        same = _same(point, how)
        if same in after:
            ratios.setdefault(str(point[how.by]), []).append(after[same] / before[same])
    if not ratios:
        raise ValueError("both records have no point in common: measure the same sweep on the same shape")
    about: Point = {"of": first.kind, "sweep": str(first.settings["subject"])}
    return [about | {how.by: name} | _spread(ratios[name]) for name in sorted(ratios)]


def repeat_record(bundled: Sequence[Record], others: Sequence[Record]) -> Record:
    """A record of kind `repeat` for one sweep: each of `others` compared with the bundled record of its kind.

    `run` counts the others of a kind in their order. The environment is the bundled records', `measured` in the
    settings says where the others come from. Raises what `compare_records` raises.
    """
    runs = {one.kind: [other for other in others if other.kind == one.kind] for one in bundled}
    points = [
        {"run": run} | point
        for one in bundled
        for run, other in enumerate(runs[one.kind], 1)
        for point in compare_records(one, other)
    ]
    first = bundled[0]
    subject, model = str(first.settings["subject"]), first.settings["model"]
    folders = [f"run{run}" for run in range(1, max(map(len, runs.values())) + 1)]
    sweep = SWEEP_OF_SUBJECT.get(subject, subject)
    measure = " && ".join(f"replay-sim measure --suite steps --sweep {sweep} --out {folder}" for folder in folders)
    return Record(
        kind="repeat",
        environment=first.environment,
        command=f"{measure} && {PROGRAM} {' '.join(f'{folder}/*.json' for folder in folders)} --out records",
        seed=first.seed,
        settings={"subject": subject, "model": model, "measured": [other.provenance for other in others]},
        points=points,
    )


def repeats_of(others: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """A `repeat` record for each sweep of `others`, and the sweeps of which there is no bundled record to compare with.

    Raises what `compare_records` raises.
    """
    by_sweep: dict[str, list[Record]] = {}
    for other in others:
        by_sweep.setdefault(str(other.settings.get("subject")), []).append(other)
    found, without = [], []
    for sweep, runs in by_sweep.items():
        bundled = [twin for kind in COMPARISONS for twin in _bundled(kind, sweep) if any(kind == r.kind for r in runs)]
        if bundled and {run.kind for run in runs} == {twin.kind for twin in bundled}:
            found.append(repeat_record(bundled, runs))
        else:
            without.append(sweep)
    return found, without


def _bundled(kind: str, sweep: str) -> list[Record]:
    records = (record for _, record in bundled_records(kind) if record.environment["gpu"])
    return [record for record in records if record.settings.get("subject") == sweep]


def repeat_table(points: Iterable[Point]) -> str:
    """Points of `repeat` records as markdown."""
    keys = ("sweep", "of", "run", "what", "n", "ratio_median", "ratio_min", "ratio_max")
    named = [point | {"what": point[COMPARISONS[str(point["of"])].by]} for point in points]
    return tabulate([[point[key] for key in keys] for point in named], keys, tablefmt="pipe", floatfmt=".3f")


def _times(record: Record, how: Comparison) -> dict[tuple[object, ...], float]:
    """The time of every point, by what those share that measured the same; ValueError for a point without a key."""
    times = {}
    for point in record.points:
        missing = {*how.same, how.by, how.time} - point.keys()
        if missing:
            raise ValueError(f"a point of the {record.kind} record lacks {', '.join(sorted(missing))} to compare it by")
        time = point[how.time]
        if not isinstance(time, int | float) or time <= 0:
            raise ValueError(f"{how.time} of a point of the {record.kind} record is {time!r}; it must be above 0")
        times[_same(point, how)] = float(time)
    return times


def _same(point: Point, how: Comparison) -> tuple[object, ...]:
    return tuple(point[key] for key in how.same)


def _spread(ratios: list[float]) -> Point:
    return {
        "n": len(ratios),
        "ratio_median": round(float(np.median(ratios)), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare records of sweeps with the bundled ones; with --out, keep what was found as records."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=main.__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="records of the steps suite, measured on your GPU")
    parser.add_argument("--out", type=Path, help="folder to write records `repeat` to")
    asked = parser.parse_args(arguments)
    try:
        found, without = repeats_of([read_record(path) for path in asked.records])
        for record in found if asked.out is not None else ():
            write_record(record, asked.out / record.file_name)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{PROGRAM}: {printable(str(error))}\n")
    print(repeat_table(point for record in found for point in record.points))
    if without:
        print(f"no bundled record of {printable(', '.join(without))}: left out")


if __name__ == "__main__":
    main()
