"""Sweeps whose steps are run and timed: on the host backend, whose times are no GPU's, and on GPUs (issue 9)."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from explore.sweep_cases import CONFIG, LENGTHS, WORKLOAD, WORKLOADS

from replay_sim.batch.dispatch import CudagraphMode, StepRecord
from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY, load_config
from replay_sim.decoder.step import StepRunner
from replay_sim.explore import sweep_measured
from replay_sim.explore.sweep import run_sweep
from replay_sim.explore.sweep_executors import gpu_pool, visible_gpus
from replay_sim.explore.sweep_file import PointsFile
from replay_sim.explore.sweep_measured import STEPS_A_WAY, MeasuredTimes, rig_spec, run_measured, sample_steps
from replay_sim.explore.sweep_plans import config_of
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload, design_points, fingerprint, schedule_of
from replay_sim.explore.sweep_rows import COLUMNS, Row, is_row_of, run_group
from replay_sim.explore.tuning_costs import fitted_costs
from replay_sim.plan import make_plan
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import planned_dispatch
from replay_sim.workload.source import open_workload

ON_A_CPU = MeasuredTimes("host", TINY, 0)
TIMES = ("expected_step_ms", "replay_off_step_ms", "speedup", "workload_s", "extrapolated_share", "source", "outside")
TWO = design_points({"small": CONFIG}, [WORKLOAD], {"window": (8, 40)}, ("default",))
"""The second one's window exceeds the threshold: it fails."""
ALL_WAYS = attrs.evolve(
    CONFIG, max_num_seqs=3, max_num_batched_tokens=100, decoder_replay_cudagraph_capture_sizes=(8, 16)
)
"""Its steps run in FULL, PIECEWISE and no graphs, the latter two with replay graphs, with eager replay or without."""
ALL = design_points({"small": ALL_WAYS}, [WORKLOAD], {}, ("explicit",))
PLAN, SETTINGS = make_plan(ALL_WAYS), SchedulerSettings.from_config(ALL_WAYS)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few rounds of a step as there may be."""
    monkeypatch.setattr("replay_sim.measure.step_runs.BATCH_SECONDS", 0.0)


@attrs.frozen
class Measured:
    """A row, and the tokens, mode, padded tokens, replay mode and padded rows of all that ran for it."""

    row: Row
    ran: set[tuple]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """The point of ALL_WAYS on the host backend."""
    ran, run = set(), StepRunner.run

    def noting(self, batch, tables, ids, record):
        ran.add(shape_of(record))
        return run(self, batch, tables, ids, record)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepRunner, "run", noting)
        patched.setattr("replay_sim.measure.step_runs.BATCH_SECONDS", 0.0)
        (row,) = run_group(ALL, WORKLOAD, ON_A_CPU)
    return Measured(row, ran)


def shape_of(record: StepRecord) -> tuple:
    return record.num_tokens, record.mode, record.padded_tokens, record.replay_mode, record.padded_rows


def way(record: StepRecord) -> tuple[CudagraphMode, CudagraphMode | None]:
    return record.mode, record.replay_mode


def all_records() -> list[StepRecord]:
    steps = Scheduler(WORKLOAD.requests(), SETTINGS, dispatch=planned_dispatch(PLAN)).steps()
    return [step.record for step in steps if step.record is not None]


def swept(points: tuple[DesignPoint, ...], times: MeasuredTimes, executor, folder: Path, run=run_group) -> list[Row]:
    mark = fingerprint(points, [WORKLOAD], times)
    with PointsFile(folder / "points", mark, partial(is_row_of, points), resume=False) as file:
        return run_sweep(points, WORKLOADS, executor, file, run=partial(run, times=times), group_points=1)


def test_sampled_steps_stand_for_all_steps_that_run_alike() -> None:
    """D1, S5: no way is left out, and none stands for another."""
    counted = Counter(map(way, all_records()))
    sampled = sample_steps(WORKLOAD.requests(), SETTINGS, PLAN)
    stand_for: Counter[tuple[CudagraphMode, CudagraphMode | None]] = Counter()
    for step in sampled:
        stand_for[way(step.record)] += step.count
        assert planned_dispatch(PLAN)(step.batch) == step.record
    assert stand_for == counted and len(counted) == 6
    taken = Counter(way(step.record) for step in sampled)
    assert all(taken[one] == min(STEPS_A_WAY, count) for one, count in counted.items())


def test_the_sample_has_the_mean_time_of_all_steps_where_times_are_modelled() -> None:
    """To 3 %, on a bundled profile, so that what is measured of a sample says something about all."""
    workload = SweptWorkload.of(*open_workload(profile="conversation", num_requests=100))
    points = design_points({"default": load_config("default")}, [workload], {"max_num_seqs": (8, 64)}, ("default",))
    for point, row in zip(points, run_group(points, workload), strict=True):
        config = config_of(point)
        sampled = sample_steps(workload.requests(), schedule_of(point), make_plan(config))
        seconds = fitted_costs(config).seconds
        mean = sum(step.count * seconds(step.record) for step in sampled) / sum(step.count for step in sampled)
        assert mean * 1e3 == pytest.approx(row["expected_step_ms"], rel=0.03) and len(sampled) < row["steps"] / 4


def test_no_size_is_captured_that_no_sampled_step_runs() -> None:
    sampled = sample_steps(WORKLOAD.requests(), SETTINGS, PLAN)
    spec = rig_spec(PLAN, TINY, sampled)
    for name, mode in (("model_sizes", CudagraphMode.PIECEWISE), ("full_sizes", CudagraphMode.FULL)):
        ran = {step.record.padded_tokens for step in sampled if step.record.mode is mode}
        assert set(getattr(spec, name)) == ran <= set(getattr(PLAN, name)) and ran
    rows = {step.record.padded_rows for step in sampled if step.record.replay_mode is CudagraphMode.PIECEWISE}
    assert set(spec.replay_sizes) == rows <= set(PLAN.replay_sizes) and rows
    assert spec.plan().query_len_decode == CONFIG.query_len_decode


def test_a_row_counts_as_a_modelled_one_does_and_its_times_are_measured(measured: Measured) -> None:
    """Issue 9: the same table."""
    row = measured.row
    (modelled,) = run_group(ALL, WORKLOAD)
    counted = [name for name in COLUMNS if name not in TIMES]
    assert tuple(row) == COLUMNS and [row[name] for name in counted] == [modelled[name] for name in counted]
    assert row["source"].startswith("measured on a CPU, whose times are no GPU's, torch ")
    assert row["source"].endswith(f" steps stand for {row['steps']:,}") and "decoder tiny" in row["source"]
    assert row["expected_step_ms"] > 0 and row["replay_off_step_ms"] > 0
    assert row["speedup"] == pytest.approx(row["replay_off_step_ms"] / row["expected_step_ms"])
    assert row["workload_s"] == pytest.approx(row["expected_step_ms"] * row["steps"] / 1e3)
    assert (row["extrapolated_share"], row["outside"], row["error"]) == (0.0, "", "")


def test_steps_run_as_the_plan_dispatches_them_and_with_replay_off(measured: Measured) -> None:
    """D1-D3: what the runners ran is what the plan's dispatch says, and that without a replay batch."""
    records = [step.record for step in sample_steps(WORKLOAD.requests(), SETTINGS, PLAN)]
    planned = set(map(shape_of, records))
    off = {shape_of(attrs.evolve(record, replay_mode=None, padded_rows=0)) for record in records}
    assert measured.ran == planned | off and planned != off


def test_a_sampled_step_counts_as_the_steps_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a time that is the step's padded tokens, and twice that without replay, over steps alike in each part."""
    workload = SweptWorkload("decodes after one prompt", ((20, 30),))
    monkeypatch.setattr(
        sweep_measured._PlannedRuns,
        "step_us",
        lambda self, step: (step.record.padded_tokens * 1e3, step.record.padded_tokens * 2e3),
    )
    (point,) = design_points({"small": CONFIG}, [workload], {}, ("explicit",))
    (row,) = run_group([point], workload, ON_A_CPU)
    assert row["steps"] > 8 and row["expected_step_ms"] == pytest.approx(row["padded_tokens"] / row["steps"])
    assert row["speedup"] == pytest.approx(2)


def test_a_point_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """Issue 9, Sweeps: one that cannot be planned, and one whose requests the decoder does not hold."""
    short = MeasuredTimes("host", attrs.evolve(TINY, max_position=64), 0)
    with ThreadPoolExecutor(1) as executor:
        long, failed = swept(TWO, short, executor, tmp_path)
    assert "exceeds max_position 64" in long["error"] and long["expected_step_ms"] is None
    assert "decoder_replay_trim_threshold" in failed["error"]


def test_measured_and_modelled_sweeps_are_not_taken_for_each_other() -> None:
    """Nor those of another seed."""
    others = (None, ON_A_CPU, attrs.evolve(ON_A_CPU, seed=1))
    assert len({fingerprint(TWO, [WORKLOAD], times)["step times"] for times in others}) == len(others)


def test_a_worker_sees_one_gpu_alone() -> None:
    """By the name that was given; none is touched."""
    with gpu_pool(["GPU-7"]) as executor:
        assert executor.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "GPU-7"


FIVE = design_points({"small": CONFIG}, [WORKLOAD], {"window": (4, 40, 8, 16, 24)}, ("default",))
"""The second one cannot be planned, which leaves a device as it was."""
BREAKS = 8
"""The window of the point that breaks its device."""


@attrs.frozen
class Breaking(MeasuredTimes):
    """Does no more than to wait for the device, which one point breaks; the source of a row is its process."""

    def __call__(self, point: DesignPoint, *_: object) -> Row:
        backend = sweep_measured._rigs(self).backend
        if point.asked("window") == BREAKS and backend.name == "host":
            HostBackend.synchronize = lambda _: _fail()
        elif point.asked("window") == BREAKS:
            torch.zeros(1, device="cuda")[torch.tensor([9], device="cuda")]
        backend.synchronize()
        return {"source": str(os.getpid())}


def _fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_point_that_breaks_its_device_is_the_only_one_to_fail_of_it(tmp_path: Path) -> None:
    """In a process after which the device never answers; the points after it are measured in a fresh one."""
    with gpu_pool(["GPU-7"]) as executor:
        rows = swept(FIVE, Breaking("host", TINY, 0), executor, tmp_path, run_measured)
    before, unplanned, broke, after, last = rows
    assert "decoder_replay_trim_threshold" in unplanned["error"]
    assert broke["error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [row["error"] for row in (before, after, last)] == ["", "", ""]
    assert before["source"] != after["source"] == last["source"] and str(os.getpid()) != after["source"]


@attrs.frozen
class Dying(MeasuredTimes):
    """One point ends its process; the source of a row is its process."""

    def __call__(self, point: DesignPoint, *_: object) -> Row:
        if point.asked("window") == BREAKS:
            os.abort()
        return {"source": str(os.getpid())}


def test_a_point_that_ends_its_process_is_the_only_one_to_fail_of_it(tmp_path: Path) -> None:
    """As an assertion of a driver does, or a machine without memory."""
    with gpu_pool(["GPU-7"]) as executor:
        before, _, died, after, last = swept(FIVE, Dying("host", TINY, 0), executor, tmp_path, run_measured)
    assert died["error"] == "BrokenProcessPool: the process died with exit code -6"
    assert [row["error"] for row in (before, after, last)] == ["", "", ""]
    assert before["source"] != after["source"] == last["source"]


@pytest.mark.gpu
def test_a_point_that_breaks_a_gpu_is_the_only_one_to_fail_of_it(tmp_path: Path) -> None:
    with gpu_pool(visible_gpus()[:1]) as executor:
        rows = swept(FIVE, Breaking("cuda", TINY, 0), executor, tmp_path, run_measured)
    assert [bool(row["error"]) for row in rows] == [False, True, True, False, False]
    assert "CUDA error" in rows[2]["error"]


def test_gpus_are_named_as_the_caller_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert visible_gpus() == ["5", "3"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert visible_gpus() == []


@pytest.mark.gpu
def test_points_are_measured_on_every_gpu_of_the_machine(tmp_path: Path) -> None:
    """Issue 9: a process a GPU, a failed point among them; rows count as modelled ones do."""
    with gpu_pool(visible_gpus()) as executor:
        good, failed = swept(TWO, MeasuredTimes("cuda", TINY, 0), executor, tmp_path, run_measured)
    assert good["source"].startswith("measured on NVIDIA ") and good["expected_step_ms"] > 0 and not good["error"]
    assert "decoder_replay_trim_threshold" in failed["error"]
    (modelled,) = run_group(TWO[:1], WORKLOAD)
    assert good["padded_tokens"] == modelled["padded_tokens"] and len(LENGTHS) <= good["steps"] == modelled["steps"]
