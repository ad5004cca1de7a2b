"""Records: what is refused, that they are written whole, and that those in the package say where they come from."""

import datetime
import json
import math
import os
import re
from typing import Any

import attrs
import pytest
from measure.any_point import any_point

from replay_sim.measure.records import (
    FIELD_TYPES,
    MAX_RECORD_BYTES,
    REQUIRED_POINT_KEYS,
    Record,
    RecordError,
    bundled_records,
    read_record,
    write_record,
)

POINT = {"arrangement": "shared", "order": "largest_first", "group": "replay", "reserved_bytes": 0}
POINT |= {"predicted_bytes": None, "seconds": 0.5, "held": True}
GPU = {"gpu": "GPU X", "driver": "570.1", "torch": "2.11", "triton": "3.6", "date": "2026-01-02", "replay_sim": "0.1"}
RECORD = Record(
    kind="pool",
    environment=GPU,
    command="replay-sim measure --suite pool --out records",
    seed=3,
    settings={"subject": "default", "window": 128},
    points=[POINT, POINT | {"group": "model", "reserved_bytes": 2 << 20}],
)
BUNDLED = list(bundled_records())
ABSOLUTE_PATH = re.compile(r"(?:^|[\s=\"'])(?:/|~|[A-Za-z]:\\)\w")


def as_json(**changes: object) -> str:
    return json.dumps(attrs.asdict(RECORD) | changes)


def without(mapping: dict, *names: str) -> dict:
    return {key: value for key, value in mapping.items() if key not in names}


def test_a_record_reads_back_as_it_was_written_a_point_a_line(tmp_path) -> None:
    path = tmp_path / "made" / "pool.json"
    write_record(RECORD, path)
    assert read_record(path) == RECORD
    assert list(json.loads(path.read_text())) == list(FIELD_TYPES)
    assert sum('"group"' in line for line in path.read_text().splitlines()) == 2


def test_a_record_without_points_reads_back(tmp_path) -> None:
    record = attrs.evolve(RECORD, points=[])
    write_record(record, tmp_path / "empty.json")
    assert read_record(tmp_path / "empty.json") == record


MALFORMED = {
    "no JSON": ("{", "unreadable JSON"),
    "empty": ("", "unreadable JSON"),
    "no UTF-8": (b"\xff\xfe", "unreadable JSON"),
    "nested too deeply": ("[" * 100_000, "unreadable JSON"),
    "a list": ("[]", "must be an object"),
    "too large": (b" " * (MAX_RECORD_BYTES + 1), f"at most {MAX_RECORD_BYTES} bytes"),
    "NaN among the settings": (as_json(settings={"x": math.nan}), "NaN"),
    "an infinite point": (as_json(points=[POINT | {"seconds": math.inf}]), "Infinity"),
    "a number beyond floats in a point": (as_json().replace("0.5", "1e999", 1), "seconds of number 0 is inf"),
    "a number beyond floats in settings": (as_json().replace("128", "1e999", 1), "settings: allowed are"),
    "a field twice": (as_json()[:-1] + ', "seed": 4}', "'seed' is given twice"),
    "no seed": (json.dumps(without(attrs.asdict(RECORD), "seed")), "'seed' is missing"),
    "an unknown field": (as_json(gpu="X"), "'gpu' is missing or unknown"),
    "an unknown kind": (as_json(kind="pools"), "kind: 'pools' is not one of calls, capture"),
    "a kind of the wrong type": (as_json(kind=["pool"]), "kind: ['pool'] is not allowed; it must be a string"),
    "a seed that is text": (as_json(seed="3"), "seed: '3' is not allowed; it must be an integer"),
    "a seed that is true": (as_json(seed=True), "seed: True is not allowed; it must be an integer"),
    "a seed that is no whole number": (as_json(seed=0.5), "seed: 0.5 is not allowed"),
    "no command": (as_json(command=None), "command: None is not allowed; it must be a string"),
    "settings in a list": (as_json(settings=[]), "settings: [] is not allowed; it must be an object"),
    "an environment in words": (as_json(environment="H200"), "environment: 'H200' is not allowed"),
    "an environment without its date": (as_json(environment=without(GPU, "date")), "environment lacks date"),
    "points in an object": (as_json(points={}), "points: {} is not allowed; it must be a list of objects"),
    "a point that is a number": (as_json(points=[POINT, 3]), "points: number 1 is 3, allowed are objects"),
    "a point without its order": (as_json(points=[without(POINT, "order")]), "number 0 of a pool record lacks order"),
    "a point that holds a list": (as_json(points=[POINT | {"x": [1]}]), "x of number 0 is [1], allowed are flat"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_record_is_refused_with_one_line_that_names_file_and_field(
    content: str | bytes, message: str, tmp_path
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecordError) as refused:
        read_record(path)
    assert str(refused.value).startswith(f"{path}: ") and message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_absent_or_a_folder_is_refused(tmp_path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(RecordError, match="cannot be read"):
            read_record(path)


@pytest.mark.parametrize("kind", REQUIRED_POINT_KEYS)
def test_every_kind_needs_each_of_its_keys(kind: str) -> None:
    whole = any_point(kind)
    attrs.evolve(RECORD, kind=kind, points=[whole | {"another_figure": 2.5}])
    for key in whole:
        with pytest.raises(RecordError, match=f"lacks {key}$"):
            attrs.evolve(RECORD, kind=kind, points=[whole, without(whole, key)])


NUMBER, INTEGER = (f"a{what} from 0 to 9223372036854775807" for what in (" number", "n integer"))
UNFIT = {
    "step_us": ([None, "a", True, -1, -0.5, 10**400], NUMBER),
    "device_us": (["a", True, -1], f"{NUMBER} or null"),
    "p10": ([None, "1"], NUMBER),
    "num_tokens": ([None, 1.0, True, -1, 10**30], INTEGER),
    "graph_launches": ([1.5, False, -1], f"{INTEGER} or null"),
    "arm": ([None, 1, True], "a string"),
    "held_out": ([None, 1, "false"], "true or false"),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in UNFIT for value in UNFIT[key][0]])
def test_a_required_value_of_another_type_or_out_of_range_is_named_with_what_is_allowed(key: str, value: Any) -> None:
    """Issue 8: whatever reads records may count on it."""
    whole = any_point("steps")
    with pytest.raises(RecordError) as refused:
        attrs.evolve(RECORD, kind="steps", points=[whole, whole | {key: value}])
    shown = str(value) if isinstance(value, int | float | None) else repr(value)
    assert str(refused.value).startswith(f"points: {key} of number 1 is {shown[:50]}")
    assert str(refused.value).endswith(f", allowed is {UNFIT[key][1]}")


def test_what_was_not_measured_may_be_none() -> None:
    none = dict.fromkeys(("device_us", "graph_launches", "kernel_launches", "predicted_us"))
    attrs.evolve(RECORD, kind="steps", points=[any_point("steps") | none])


@pytest.mark.parametrize("subject", [None, 3, ["window"]])
def test_a_record_says_what_it_is_of(subject: object) -> None:
    with pytest.raises(RecordError, match="settings: subject is .*, allowed is a string"):
        attrs.evolve(RECORD, settings={"subject": subject})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["environment", "settings", "points"])
def test_no_record_is_made_of_a_number_that_is_not_finite(field: str, value: float) -> None:
    changed = [POINT | {"x": value}] if field == "points" else getattr(RECORD, field) | {"x": value}
    with pytest.raises(RecordError, match=field):
        attrs.evolve(RECORD, **{field: changed})


def test_a_failure_in_the_middle_of_writing_leaves_the_record_before_and_nothing_else(tmp_path, monkeypatch) -> None:
    path = tmp_path / "pool.json"
    write_record(RECORD, path)

    class FullDisk:
        def __init__(self, handle: int, *_: object, **__: object) -> None:
            self.handle = handle

        def __enter__(self) -> "FullDisk":
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        def write(self, data: bytes) -> None:
            os.write(self.handle, data[: len(data) // 2])
            raise OSError("no space left")

    monkeypatch.setattr(os, "fdopen", FullDisk)
    with pytest.raises(OSError, match="no space left"):
        write_record(attrs.evolve(RECORD, seed=4), path)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["pool.json"]
    assert read_record(path) == RECORD


def test_values_that_changed_into_no_json_after_the_record_was_made_are_not_written(tmp_path) -> None:
    record = attrs.evolve(RECORD, points=[dict(POINT)])
    record.points[0]["seconds"] = math.nan
    with pytest.raises(ValueError, match="JSON"):
        write_record(record, tmp_path / "pool.json")
    assert not list(tmp_path.iterdir())


def test_the_caption_names_gpu_driver_torch_and_date_and_on_a_cpu_says_so() -> None:
    assert RECORD.provenance == "measured on GPU X, driver 570.1, torch 2.11, 2026-01-02"
    cpu = attrs.evolve(RECORD, environment=GPU | {"gpu": None, "driver": None, "cpu": "arm64"})
    assert cpu.provenance == "measured on a CPU (arm64), torch 2.11, 2026-01-02"


def test_there_are_bundled_records_of_pool_and_capture() -> None:
    assert {record.kind for _, record in BUNDLED} >= {"pool", "capture"}
    assert [name for name, _ in BUNDLED] == sorted(name for name, _ in BUNDLED)


def test_bundled_records_are_listed_by_kind() -> None:
    assert list(bundled_records("pool")) == [(name, record) for name, record in BUNDLED if record.kind == "pool"]


@pytest.mark.parametrize(("name", "record"), BUNDLED, ids=[name for name, _ in BUNDLED])
def test_a_bundled_record_says_where_it_was_measured_and_how_it_is_remade(name: str, record: Record) -> None:
    """Gpu, driver, torch, triton, date, seed, and a command that runs on any machine."""
    device = ("cpu",) if record.kind == "laptop" else ("gpu", "driver", "triton")
    for key in (*device, "torch", "date", "replay_sim"):
        assert isinstance(record.environment[key], str) and record.environment[key], key
    assert datetime.date.fromisoformat(record.environment["date"]) >= datetime.date(2026, 1, 1)
    assert record.command.startswith("replay-sim measure ") and "--out records" in record.command
    assert record.seed >= 0 and record.points
    assert name.startswith(f"{record.kind}-{record.settings['subject']}-")
    texts = [record.command, *map(str, record.settings.values())]
    texts += [value for point in record.points for value in point.values() if isinstance(value, str)]
    assert not [text for text in texts if ABSOLUTE_PATH.search(text)]
