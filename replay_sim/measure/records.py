"""Records: measurements as JSON files with their provenance, written whole or not at all (product.md, Measuring)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from replay_sim.config.errors import shown
from replay_sim.config.json_file import JsonFileError, read_object
from replay_sim.whole_file import write_whole

MAX_RECORD_BYTES = 16 << 20
ENVIRONMENT_KEYS = frozenset("gpu driver torch triton date replay_sim".split())
"""What every record says about where it was measured; None where there is none, such as the gpu of a CPU."""

REQUIRED_POINT_KEYS: dict[str, frozenset[str]] = {
    "movement": frozenset(
        "op arm rows tokens hidden_size device_us host_us bytes limit_us".split(),
    ),
    "region": frozenset(
        "form rows tokens num_reqs num_replay_layers num_local_experts graph_launches host_us device_us p10 p90 n "
        "layers_us beyond_us moved_us".split()
    ),
    "kernels": frozenset("op rows device_us p10 p90 n bytes loaded_bytes flops limit_us".split()),
    "pool": frozenset("arrangement order group reserved_bytes predicted_bytes".split()),
    "capture": frozenset("plan num_graphs num_segments seconds reserved_bytes".split()),
    "steps": frozenset(
        "arm num_tokens padded_tokens replay_rows num_reqs longest_query num_decodes computed window num_local_experts "
        "max_num_batched_tokens step_us host_us device_us p10 p90 n graph_launches kernel_launches limit_us held_out "
        "predicted_us".split()
    ),
    "prefill": frozenset(
        "arm prompt_tokens max_num_batched_tokens num_steps window num_local_experts prefill_us host_us p10 p90 "
        "n".split()
    ),
    "calls": frozenset("op rows device_us p10 p90 n bytes limit_us".split()),
    "laptop": frozenset("job did cpu_seconds peak_bytes".split()),
    "repeat": frozenset("of run sweep n ratio_median ratio_min ratio_max".split()),
    "run": frozenset("step num_tokens padded_tokens mode replay_rows padded_rows replay_mode reason num_reqs".split()),
}
"""Kinds of record and the keys that every point of the kind has."""
WORDS = frozenset("op arm form arrangement order group plan mode replay_mode reason job did of sweep".split())
FLAGS = frozenset({"held_out"})
TIMES = frozenset("p10 p90 seconds cpu_seconds ratio_median ratio_min ratio_max".split())
"""Figures that need not be whole, beside those in *_us; what is neither a word nor a flag nor such a one is a count."""
MAY_BE_NONE = frozenset(
    "device_us graph_launches kernel_launches moved_us predicted_us predicted_bytes peak_bytes replay_mode".split()
)
LARGEST_COUNT = (1 << 63) - 1

FIELD_TYPES: dict[str, tuple[type, str]] = {
    "kind": (str, "a string"),
    "environment": (dict, "an object"),
    "command": (str, "a string"),
    "seed": (int, "an integer"),
    "settings": (dict, "an object"),
    "points": (list, "a list of objects"),
}
"""A record's fields as its file holds them, in their order."""

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
            raise RecordError(f"kind: {shown(self.kind)} is not one of {', '.join(sorted(REQUIRED_POINT_KEYS))}")
        missing = ENVIRONMENT_KEYS - self.environment.keys()
        if missing:
            raise RecordError(f"environment lacks {', '.join(sorted(missing))}")
        for name, values in (("environment", self.environment), ("settings", self.settings)):
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RecordError(f"{name}: allowed are JSON values and finite numbers: {error}") from None
        subject = self.settings.get("subject")
        if not isinstance(subject, str):
            raise RecordError(f"settings: subject is {shown(subject)}, allowed is a string")
        for index, point in enumerate(self.points):
            self._check_point(index, point)

    def _check_point(self, index: int, point: Point) -> None:
        missing = REQUIRED_POINT_KEYS[self.kind] - point.keys()
        if missing:
            raise RecordError(f"points: number {index} of a {self.kind} record lacks {', '.join(sorted(missing))}")
        for key, value in point.items():
            if not isinstance(value, str | int | float | bool | None):
                raise RecordError(f"points: {key} of number {index} is {shown(value)}, allowed are flat values")
            if isinstance(value, float) and not math.isfinite(value):
                raise RecordError(f"points: {key} of number {index} is {value}, allowed are finite numbers")
            if key in REQUIRED_POINT_KEYS[self.kind] and not _is_allowed(key, value):
                raise RecordError(f"points: {key} of number {index} is {shown(value)}, allowed is {_meaning(key)}")

    @property
    def file_name(self) -> str:
        """The name of its file: its kind, the subject in its settings and its variant if it has one, the device."""
        device = str(self.environment["gpu"] or "cpu").lower().replace(" ", "-")
        parts = (self.kind, self.settings["subject"], self.settings.get("variant"), device)
        return "-".join(str(part) for part in parts if part is not None) + ".json"

    @property
    def provenance(self) -> str:
        """One line for captions: *measured on GPU, driver, torch, date*."""
        at = self.environment
        device = at["gpu"] or f"a CPU ({at.get('cpu')})"
        driver = f", driver {at['driver']}" if at["driver"] else ""
        return f"measured on {device}{driver}, torch {at['torch']}, {at['date']}"


def _is_allowed(key: str, value: object) -> bool:
    """Whether a required key may have this flat and finite value."""
    if value is None:
        return key in MAY_BE_NONE
    if key in WORDS | FLAGS:
        return isinstance(value, str if key in WORDS else bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (_is_time(key) or isinstance(value, int)) and 0 <= value <= LARGEST_COUNT


def _is_time(key: str) -> bool:
    return key in TIMES or key.endswith("_us")


def _meaning(key: str) -> str:
    """What a required key's value must be, in words."""
    if key in WORDS | FLAGS:
        what = "a string" if key in WORDS else "true or false"
    else:
        what = f"{'a number' if _is_time(key) else 'an integer'} from 0 to {LARGEST_COUNT}"
    return f"{what} or null" if key in MAY_BE_NONE else what


def write_record(record: Record, path: Path) -> None:
    """Write one record, a point a line, whole or not at all."""
    head = {field: getattr(record, field) for field in FIELD_TYPES if field != "points"}
    lines = ",\n".join("  " + json.dumps(point, allow_nan=False) for point in record.points)
    text = json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "points": [\n' + lines + "\n ]\n}\n"
    write_whole(path, text)


def read_record(path: Path) -> Record:
    """Read one record; RecordError naming the file and the field for anything that is not one."""
    try:
        data = read_object(path, MAX_RECORD_BYTES)
        unlike = data.keys() ^ FIELD_TYPES.keys()
        if unlike:
            field = shown(min(unlike))
            raise RecordError(f"{field} is missing or unknown: a record has exactly {', '.join(FIELD_TYPES)}")
        for name, (expected, meaning) in FIELD_TYPES.items():
            if not isinstance(data[name], expected) or isinstance(data[name], bool):
                raise RecordError(f"{name}: {shown(data[name])} is not allowed; it must be {meaning}")
        for index, point in enumerate(data["points"]):
            if not isinstance(point, dict):
                raise RecordError(f"points: number {index} is {shown(point)}, allowed are objects")
        return Record(**data)
    except (JsonFileError, RecordError) as error:
        raise RecordError(f"{path}: {error}") from None


def bundled_records(kind: str | None = None) -> Iterator[tuple[str, Record]]:
    """File name and record of every record in the package, of one kind if given, by name."""
    folder = resources.files("replay_sim") / "records"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            with resources.as_file(entry) as path:
                record = read_record(path)
            if kind is None or record.kind == kind:
                yield entry.name, record
