"""The suites of `replay-sim measure`: what is checked before they run, and the records that they make."""

import attrs
import pytest
from measure.any_point import any_point
from small_config import CONFIG, LENGTHS, write_config, write_trace

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.capture.host import HostBackend
from replay_sim.commands.measure import READ_BY
from replay_sim.commands.measure import SUITES as OFFERED
from replay_sim.config import FLASH_RANK, TINY
from replay_sim.measure import suites
from replay_sim.measure.records import read_record
from replay_sim.measure.step_suite import SWEEPS
from replay_sim.measure.step_sweeps import CPU_GRID, STEP_SWEEPS
from replay_sim.measure.suites import STEPS, SUITES, MeasureRequest, make_request, run_suites
from replay_sim.replay.sharing import PoolSharing

COMMAND = "replay-sim measure --preset small.json --out records"
OPTION_OF = {"requests": "trace", "sweeps": "sweep", "arms": "arm"} | {
    name: name for name in ("steps", "shape", "backend", "seed", "arrangement", "histories")
}
"""The option that a field of a request is of."""
MEASURES = {
    "run": "execute_steps",
    "pool": "measure_pool",
    "movement": "measure_movement",
    "region": "region_points",
    "laptop": "measure_laptop",
    STEPS: "StepSuite.run",
}
"""What each suite calls when it knows what to measure."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("input")


@pytest.fixture(scope="module")
def request_(folder):
    return make_request(
        command=COMMAND,
        config_name=write_config(folder),
        trace=write_trace(folder),
        backend="host",
        steps=5,
        seed=3,
        arrangement=PoolSharing.SHARED,
    )


@pytest.fixture(scope="module")
def written(request_, tmp_path_factory):
    """The records of a run, and the summaries, by file name."""
    out = tmp_path_factory.mktemp("out") / "made"
    found = list(run_suites(["run", "run"], request_, out))
    assert sorted(path.name for path, _ in found) == sorted(path.name for path in out.iterdir())
    return {path.name: (read_record(path), summary) for path, summary in found}


def test_the_command_line_offers_every_suite() -> None:
    assert OFFERED == (*SUITES, STEPS)


class MeasuringError(BaseException):
    """All that is to be measured is known."""


class Noting(MeasureRequest):
    """A request that notes which of its fields are read."""

    def __getattribute__(self, name: str):
        noted.add(name)
        return super().__getattribute__(name)


noted: set[str] = set()


@pytest.mark.parametrize("suite", OFFERED)
def test_a_suite_reads_the_options_that_the_command_line_accepts_for_it(suite, request_, tmp_path, monkeypatch) -> None:
    """But for the config, of which some read the window alone."""

    def stop(*_, **__):
        raise MeasuringError

    monkeypatch.setattr(f"replay_sim.measure.suites.{MEASURES[suite]}", stop)
    asked = Noting(**attrs.asdict(request_, recurse=False))
    noted.clear()
    with pytest.raises(MeasuringError):
        list(run_suites([suite], asked, tmp_path))
    known = {suite, *SWEEPS} if suite == STEPS else {suite}
    accepted = {option for option, readers in READ_BY.items() if known & set(readers)}
    assert {OPTION_OF[name] for name in noted & OPTION_OF.keys()} == accepted - {"preset"}


def test_the_sweeps_that_run_steps_take_arms_and_those_of_the_configs_window_a_config() -> None:
    assert READ_BY["arm"] == tuple(STEP_SWEEPS)
    for name, parts in STEP_SWEEPS.items():
        specs = ([part.spec for part in parts(CPU_GRID, attrs.evolve(TINY, window=window), 0)] for window in (5, 7))
        assert (next(specs) != next(specs)) == (name in READ_BY["preset"]), name
    assert {"layers", "capture"} < set(READ_BY["preset"])


def test_what_was_asked_is_resolved_once(request_) -> None:
    assert request_.subject == "small" and request_.config.window == CONFIG["window"]
    assert request_.shape == attrs.evolve(TINY, window=CONFIG["window"])
    assert isinstance(request_.backend, HostBackend)
    assert [(one.prompt_tokens, one.output_tokens) for one in request_.requests] == list(LENGTHS)
    assert request_.workload == "3 requests of lengths.csv"


def test_the_defaults_are_the_embedded_config_and_the_bundled_profile() -> None:
    asked = make_request(command=COMMAND, shape=FLASH_RANK, backend="host")
    assert asked.subject == "b200-tp4-c8" and len(asked.requests) == 1000
    assert asked.workload.startswith("1,000 requests drawn with seed 0 from profile conversation")
    assert asked.shape == attrs.evolve(FLASH_RANK, window=asked.config.window)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_name": "no-such"}, "no-such"),
        ({"trace": "absent.csv"}, "absent.csv: line 1, file: expected a readable file"),
        ({"backend": "tpu"}, "backend is 'tpu'"),
        ({"settings": {"decoder_replay_cudagraph_capture_sizes": [65]}}, "65"),
        ({"settings": {"decoder_replay_trim_threshold": 8}}, "decoder_replay_trim_threshold"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(changes: dict, message: str, tmp_path) -> None:
    settings = changes.pop("settings", {})
    asked = {"config_name": write_config(tmp_path, **settings), "backend": "host"} | changes
    with pytest.raises(ValueError, match=message):
        make_request(command=COMMAND, **asked)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(request_, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(suites.SUITES, "run", lambda _: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out is .*file.records.: no folder can be made there"):
        list(run_suites(["run"], request_, tmp_path / "file" / "records"))


def test_a_run_makes_a_record_of_its_steps_and_one_of_its_graphs_once(written) -> None:
    assert list(written) == ["run-small-cpu.json", "capture-small-cpu.json"]
    for record, _ in written.values():
        assert (record.command, record.seed) == (COMMAND, 3)
        assert record.environment["gpu"] is None and record.environment["cpu"]
        assert {"subject": "small", "model": "tiny", "window": 8}.items() <= record.settings.items()
        assert record.settings["workload"] == "3 requests of lengths.csv"
        assert record.settings["sharing"] == "shared"


def test_the_run_record_has_a_point_for_each_step(written) -> None:
    """D4."""
    record, summary = written["run-small-cpu.json"]
    assert [point["step"] for point in record.points] == list(range(len(record.points)))
    assert sum(point["num_tokens"] for point in record.points) == sum(prompt + out - 1 for prompt, out in LENGTHS)
    assert all(point["step_us"] > 0 and point["padded_tokens"] >= point["num_tokens"] for point in record.points)
    for point in record.points:
        has_batch = point["replay_mode"] is not None
        assert has_batch == (point["replay_rows"] > 0) and (point["padded_rows"] >= point["replay_rows"])
    assert "**Model graphs**" in summary


def test_the_capture_record_has_a_point_for_each_group(written) -> None:
    """O1, O5."""
    record, summary = written["capture-small-cpu.json"]
    assert [(point["plan"], point["group"]) for point in record.points] == [("small", "model"), ("small", "replay")]
    assert record.points[0]["reserved_bytes"] > 0 == record.points[1]["reserved_bytes"]
    assert summary == ""


def test_every_field_of_a_steps_record_is_in_its_point(written) -> None:
    record, _ = written["run-small-cpu.json"]
    fields = {field.name for field in attrs.fields(StepRecord)}
    assert fields <= record.points[0].keys()
    modes = {mode.value for mode in CudagraphMode}
    assert all(point["mode"] in modes for point in record.points)


def test_the_pool_record_is_of_the_arrangement_that_was_asked_for(request_, tmp_path, monkeypatch) -> None:
    asked: list = []

    def measured(cases, _):
        asked.extend(cases)
        keys = {"arrangement": "shared", "order": "largest_first", "group": "model"}
        return [keys | {"reserved_bytes": 2, "predicted_bytes": 2}], "a table"

    monkeypatch.setattr(suites, "measure_pool", measured)
    ((path, summary),) = run_suites(["pool"], request_, tmp_path)
    (case,) = asked
    assert (case.config, case.shape, case.backend, case.seed) == (request_.config_name, "tiny", "host", 3)
    assert (path.name, summary) == ("pool-small-shared-cpu.json", "a table")
    settings = {"subject": "small", "model": "tiny", "window": 8, "variant": "shared"}
    assert read_record(path).settings == settings


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"arrangement": None}, "pool-small-cpu.json"),
        ({"arrangement": PoolSharing.OWN_STREAM}, "pool-small-own_stream-cpu.json"),
        ({"arrangement": None, "shape": FLASH_RANK}, "pool-small-flash-rank-cpu.json"),
        ({"shape": FLASH_RANK}, "pool-small-flash-rank-shared-cpu.json"),
    ],
)
def test_a_record_of_one_arrangement_or_another_decoder_does_not_take_the_place_of_the_whole(
    changes: dict, name: str, request_, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(suites, "measure_pool", lambda *_: ([], "a table"))
    ((path, _),) = run_suites(["pool"], attrs.evolve(request_, **changes), tmp_path)
    assert path.name == name


def test_the_movement_record_is_of_the_decoder(request_, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("replay_sim.measure.row_movement.ROWS", (3, 5))
    monkeypatch.setattr("replay_sim.measure.row_movement._copy_bandwidth", lambda device: 1e9)
    ((path, _),) = run_suites(["movement"], request_, tmp_path)
    record = read_record(path)
    assert path.name == "movement-tiny-cpu.json" and record.seed == 3
    assert record.settings.keys() == {"subject", "copy_bandwidth_gbps", "input_sets", "notes"}
    assert (record.settings["subject"], record.settings["copy_bandwidth_gbps"]) == ("tiny", 1.0)


def test_a_suite_that_fails_leaves_the_records_before_it_whole_and_none_of_its_own(
    request_, tmp_path, monkeypatch
) -> None:
    def fails(_):
        raise ValueError("a request does not fit")

    monkeypatch.setattr(suites, "measure_pool", lambda *_: ([], "a table"))
    monkeypatch.setitem(suites.SUITES, "run", fails)
    with pytest.raises(ValueError, match="does not fit"):
        list(run_suites(["pool", "run"], request_, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["pool-small-shared-cpu.json"]
    assert read_record(tmp_path / "pool-small-shared-cpu.json").points == []


def test_the_region_suite_writes_the_regions_and_the_captures_of_the_forms(request_, tmp_path, monkeypatch) -> None:
    points = {kind: any_point(kind) for kind in ("region", "capture", "kernels")}
    made = [points["region"]], [points["capture"]], "a table"
    monkeypatch.setattr("replay_sim.measure.suites.region_points", lambda *_: made)
    monkeypatch.setattr(
        "replay_sim.measure.suites.measure_kernels", lambda *_: ([points["kernels"]], {"notes": ["one"]}, "another")
    )
    written = list(run_suites(["region"], request_, tmp_path))
    names = ["region-tiny-cpu.json", "capture-tiny-replay-forms-cpu.json", "kernels-tiny-cpu.json"]
    assert [path.name for path, _ in written] == names
    text, of_a_cpu = written[0][1].rsplit("\n\n", 1)
    assert text == "a table\n\nanother" and of_a_cpu.startswith("Times are of this CPU")
    assert [read_record(path).points for path, _ in written] == [[points[kind]] for kind in points]
    assert read_record(tmp_path / names[2]).settings["notes"] == ["one"]
