"""Records: measurements as JSON files with their provenance, written whole or not at all (product.md, Measuring)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from replay_sim.whole_file import write_whole

MAX_RECORD_BYTES = 16 << 20

REQUIRED_POINT_KEYS: dict[str, frozenset[str]] = {
    "movement": frozenset(
        "op arm rows tokens hidden_size device_us host_us bytes limit_us".split(),
    ),
    "pool": frozenset("arrangement order group reserved_bytes predicted_bytes".split()),
    "capture": frozenset("plan num_graphs num_segments seconds reserved_bytes".split()),
    "steps": frozenset(
        "arm num_tokens padded_tokens replay_rows num_reqs window host_us device_us p10 p90 n graph_launches "
        "kernel_launches limit_us held_out predicted_us".split()
    ),
    "run": frozenset("step num_tokens padded_tokens mode replay_rows padded_rows replay_mode reason num_reqs".split()),
}
"""Kinds of record and the keys that every point of the kind has."""

Point = dict[str, str | int | float | bool | None]


class RecordError(ValueError):
    """A record file that is not what it should be; the message names file, field and what is allowed."""


@attrs.frozen(kw_only=True)
class Record:
    """One measurement run.

    `environment` says where, `command` remakes it, `settings` are what all points share, each point is a flat object
    in the engine's names.
    """

    kind: str
    environment: dict[str, Any]
    command: str
    seed: int
    settings: dict[str, Any]
    points: list[Point]

    def __attrs_post_init__(self) -> None:
        if self.kind not in REQUIRED_POINT_KEYS:
            raise RecordError(f"kind {self.kind!r} is not one of {sorted(REQUIRED_POINT_KEYS)}")
        for index, point in enumerate(self.points):
            missing = REQUIRED_POINT_KEYS[self.kind] - point.keys()
            if missing:
                raise RecordError(f"point {index} of a {self.kind} record lacks {sorted(missing)}")
            for key, value in point.items():
                if not isinstance(value, str | int | float | bool | None):
                    raise RecordError(f"point {index}: {key} is {value!r}, allowed are flat values")
                if isinstance(value, float) and not math.isfinite(value):
                    raise RecordError(f"point {index}: {key} is {value}, allowed are finite numbers")

    @property
    def provenance(self) -> str:
        """One line for captions: *measured on GPU, driver, torch, date*."""
        at = self.environment
        device = at.get("gpu") or f"a CPU ({at.get('cpu')})"
        driver = f", driver {at['driver']}" if at.get("driver") else ""
        return f"measured on {device}{driver}, torch {at.get('torch')}, {at.get('date')}"


def write_record(record: Record, path: Path) -> None:
    """Write one record, a point a line, whole or not at all."""
    head = {field: value for field, value in attrs.asdict(record, recurse=False).items() if field != "points"}
    lines = ",\n".join("  " + json.dumps(point, allow_nan=False) for point in record.points)
    text = json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "points": [\n' + lines + "\n ]\n}\n"
    write_whole(path, text)


def read_record(path: Path) -> Record:
    """Read one record; RecordError naming the file for anything that is not one."""
    if path.stat().st_size > MAX_RECORD_BYTES:
        raise RecordError(f"{path}: {path.stat().st_size} bytes, at most {MAX_RECORD_BYTES} are read")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON: {error}") from error
    names = [field.name for field in attrs.fields(Record)]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        raise RecordError(f"{path}: a record is an object with exactly the keys {', '.join(names)}")
    types = {"kind": str, "environment": dict, "command": str, "seed": int, "settings": dict, "points": list}
    for name, expected in types.items():
        if not isinstance(data[name], expected) or isinstance(data[name], bool):
            raise RecordError(f"{path}: {name} must be a {expected.__name__}")
    if not all(isinstance(point, dict) for point in data["points"]):
        raise RecordError(f"{path}: points must be objects")
    try:
        return Record(**data)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


def bundled_records(kind: str | None = None) -> Iterator[tuple[str, Record]]:
    """File name and record of every record in the package, of one kind if given, by name."""
    folder = resources.files("replay_sim") / "records"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            with resources.as_file(entry) as path:
                record = read_record(path)
            if kind is None or record.kind == kind:
                yield entry.name, record
