"""Measured pools: the cases, one capture of each, the prediction beside it, and the allocation history."""

import json
import subprocess

import attrs
import pytest
import torch
from small_config import NUM_MODEL_GRAPHS, NUM_REPLAY_GRAPHS, write_config

from replay_sim.capture.allocator_trace import read_trace, replay
from replay_sim.measure import pool_runs
from replay_sim.measure.pool_runs import PoolCase, capture_once, measure_pool, pool_cases
from replay_sim.measure.records import REQUIRED_POINT_KEYS
from replay_sim.replay.sharing import PoolSharing

MIB = 1 << 20
GRAPH_POOL = (0, 7)
NO_GRAPHS = {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [], "decoder_replay_cudagraph_capture_sizes": []}
SEGMENTS_AT = 0x7F00_0000_0000


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> PoolCase:
    config = write_config(tmp_path_factory.mktemp("configs"))
    (only,) = pool_cases(config, "tiny", "host", 3, only=PoolSharing.SHARED)
    return only


def test_every_arrangement_is_measured_dropped_held_and_smallest_first() -> None:
    """O1-O5."""
    cases = pool_cases("default", "tiny", "host", 3)
    assert {(case.arrangement, case.order, case.outputs) for case in cases} == {
        (arrangement, order, outputs)
        for arrangement in ("shared", "own_stream", "own_pool")
        for order, outputs in (("largest_first", "dropped"), ("largest_first", "held"), ("smallest_first", "dropped"))
    }
    assert len(cases) == 9 and all(case.history == "" for case in cases)


def test_one_arrangement_is_measured_as_it_is_used() -> None:
    (only,) = pool_cases("default", "tiny", "host", 3, only=PoolSharing.OWN_STREAM)
    assert (only.arrangement, only.order, only.outputs) == ("own_stream", "largest_first", "dropped")


def test_histories_are_named_after_their_case_whatever_dots_the_config_has(tmp_path) -> None:
    cases = pool_cases("elsewhere/my.v2.json", "tiny", "host", 3, histories=tmp_path)
    assert cases[0].history == f"{tmp_path}/tiny-my.v2-shared-largest_first-dropped.jsonl.xz"
    assert len({case.history for case in cases}) == len(cases)


def test_a_capture_has_a_point_for_each_group_without_the_configs_folder(case) -> None:
    model, again = capture_once(case)
    assert (model["group"], model["num_graphs"]) == ("model", NUM_MODEL_GRAPHS)
    assert (again["group"], again["num_graphs"]) == ("replay", NUM_REPLAY_GRAPHS)
    assert model["reserved_bytes"] > 0 == again["reserved_bytes"]
    for point in (model, again):
        assert point.keys() >= REQUIRED_POINT_KEYS["pool"]
        assert point["plan"] == "small"


def test_what_a_pool_of_its_own_costs_is_measured(case) -> None:
    """O3."""
    _, own = capture_once(attrs.evolve(case, arrangement="own_pool"))
    assert own["reserved_bytes"] > 0


def test_the_prediction_stands_beside_each_measurement(case, monkeypatch) -> None:
    """O5: on the host backend, which has the allocator's rules and no library workspaces, they are equal."""
    cases = [case, attrs.evolve(case, arrangement="own_pool"), attrs.evolve(case, outputs="held")]
    monkeypatch.setattr(pool_runs, "_in_fresh_process", capture_once)
    shown: list[str] = []
    points, table = measure_pool(cases, lambda items, what: (shown.append(what), items)[1])
    assert shown == ["pool"] and len(points) == 2 * len(cases)
    for point in points:
        assert point["predicted_bytes"] == point["reserved_bytes"] is not None
    assert table.splitlines()[0].split("|")[-3].strip() == "measured MiB"
    assert len(table.splitlines()) == 2 + len(points)


def test_a_config_without_graphs_is_measured_and_predicted_as_nothing(tmp_path, monkeypatch) -> None:
    """U7: nothing is captured, and nothing is reserved."""
    cases = pool_cases(write_config(tmp_path, **NO_GRAPHS), "tiny", "host", 3, only=PoolSharing.OWN_POOL)
    monkeypatch.setattr(pool_runs, "_in_fresh_process", capture_once)
    points, _ = measure_pool(cases)
    assert [(point["num_graphs"], point["reserved_bytes"], point["predicted_bytes"]) for point in points] == [
        (0, 0, 0),
        (0, 0, 0),
    ]


def test_two_shapes_of_one_config_are_predicted_apart(case, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []

    def predict(config: str, shape: str) -> dict:
        asked.append((config, shape))
        return {("shared", "largest_first", "dropped", "model"): len(shape)}

    monkeypatch.setattr(pool_runs, "_predict", predict)
    keys = {"arrangement": "shared", "order": "largest_first", "outputs": "dropped", "plan": "small"}
    measured = keys | {"group": "model", "num_graphs": 1, "reserved_bytes": 0}
    monkeypatch.setattr(pool_runs, "_in_fresh_process", lambda _: [measured])
    points, _ = measure_pool([case, attrs.evolve(case, shape="flash-rank"), case])
    assert [point["predicted_bytes"] for point in points] == [4, 10, 4]
    assert sorted(asked) == [(case.config, "flash-rank"), (case.config, "tiny")]


def test_each_case_is_captured_in_a_process_of_its_own(case, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [point["group"] for point in pool_runs._in_fresh_process(case)] == ["model", "replay"]


def test_a_process_that_fails_is_named_with_its_last_line(case, monkeypatch) -> None:
    said = {"Traceback\n  more\nOutOfMemoryError: 8 GiB\n": "OutOfMemoryError: 8 GiB", "": "no message"}
    for stderr, last in said.items():
        failed = subprocess.CompletedProcess([], 1, "", stderr)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=failed, **__: done)
        with pytest.raises(RuntimeError, match=f"pool run of shared, largest_first failed: {last}"):
            pool_runs._in_fresh_process(case)


class Recorder:
    """An allocator's history as torch records it: every snapshot leaves an entry, before or after it is read."""

    def __init__(self, own_entry_is_in_it: bool) -> None:
        self.own_entry_is_in_it = own_entry_is_in_it
        self.entries: list[dict] = []
        self.reserved = 0

    def segment(self) -> None:
        place = {"addr": SEGMENTS_AT + self.reserved, "size": 20 * MIB, "stream": 0, "pool_id": GRAPH_POOL}
        self.entries += [place | {"action": "segment_alloc"}, place | {"action": "alloc"}]
        self.reserved += 20 * MIB

    def snapshot(self) -> dict:
        before = list(self.entries)
        self.entries.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0})
        return {"segments": [], "device_traces": [list(self.entries) if self.own_entry_is_in_it else before]}


@pytest.mark.parametrize("own_entry_is_in_it", [False, True])
def test_a_history_is_marked_after_every_capture_although_pools_are_weighed_by_snapshots(
    own_entry_is_in_it: bool, tmp_path, monkeypatch
) -> None:
    """O5."""
    recorder = Recorder(own_entry_is_in_it)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", recorder.snapshot)
    history = pool_runs._History()
    for kind, sizes in (("PIECEWISE", (64, 16)), ("replay", (8,))):
        recorder.snapshot()  # the pool is weighed
        for size in history.marked(sizes, kind):
            for _ in range(1 + size // 16):
                recorder.segment()
            recorder.snapshot()
        recorder.snapshot()
        recorder.snapshot()
    path = tmp_path / "made" / "tiny-my.v2-shared.jsonl.xz"
    history.write(path)
    measured = json.loads((path.parent / "tiny-my.v2-shared.marks.json").read_text())
    assert [(mark["mark"], mark["reserved"]["1"] // MIB) for mark in measured] == [
        ("PIECEWISE 64", 100),
        ("PIECEWISE 16", 140),
        ("replay 8", 160),
        ("end", 160),
    ]
    modelled = replay(read_trace(path)).marks
    assert [(mark.name, mark.reserved[1] // MIB) for mark in modelled] == [
        (mark["mark"], mark["reserved"]["1"] // MIB) for mark in measured
    ]


@pytest.mark.gpu
def test_a_recorded_history_has_a_mark_for_every_graph_and_replays_to_the_byte(case, tmp_path) -> None:
    """O5: on a GPU, with the pools weighed before and after each group."""
    path = tmp_path / "tiny-small-shared.jsonl.xz"
    points = pool_runs._in_fresh_process(attrs.evolve(case, backend="cuda", history=str(path)))
    measured = json.loads((tmp_path / "tiny-small-shared.marks.json").read_text())
    assert [mark["mark"] for mark in measured] == [
        "PIECEWISE 64",
        "PIECEWISE 16",
        "FULL 4",
        "replay 16",
        "replay 8",
        "end",
    ]
    modelled = replay(read_trace(path)).marks
    assert [{str(pool): size for pool, size in mark.reserved.items()} for mark in modelled] == [
        mark["reserved"] for mark in measured
    ]
    assert sum(point["reserved_bytes"] for point in points) == measured[-1]["reserved"]["1"]
