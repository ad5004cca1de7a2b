"""The measurement suites of `replay-sim measure`: each runs one experiment and makes its records."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import torch

from replay_sim.capture import CaptureBackend
from replay_sim.config import DEFAULT_PRESET, DecoderShape, ServingConfig, load_config
from replay_sim.measure.capture_times import capture_points
from replay_sim.measure.environment import describe_environment
from replay_sim.measure.laptop import measure_laptop
from replay_sim.measure.pool_runs import measure_pool, pool_cases
from replay_sim.measure.records import Point, Record, write_record
from replay_sim.measure.region_kernels import measure_kernels
from replay_sim.measure.replay_region import region_notes, region_points
from replay_sim.measure.row_movement import measure_movement
from replay_sim.measure.run_steps import RunReport, default_shape, execute_steps, make_backend
from replay_sim.measure.step_points import flat_record
from replay_sim.measure.step_suite import ARM_NAMES, SWEEPS, StepSuite
from replay_sim.plan import make_plan
from replay_sim.progress import progress_bar
from replay_sim.replay.sharing import PoolSharing
from replay_sim.workload.source import open_workload
from replay_sim.workload.trace import TraceRequest


@attrs.frozen(kw_only=True)
class MeasureRequest:
    """What is to be measured, on which backend, and the command that asks for it.

    `config_name` is the preset or file that `config` came from, `workload` says where `requests` come from.
    `arrangement` limits the pool suite to one, `histories` is the folder for its allocation histories; `sweeps` and
    `arms` are those of the steps suite.
    """

    config_name: str
    config: ServingConfig
    shape: DecoderShape
    backend: CaptureBackend
    requests: tuple[TraceRequest, ...]
    workload: str
    steps: int
    seed: int
    command: str
    arrangement: PoolSharing | None = None
    histories: Path | None = None
    sweeps: tuple[str, ...] = SWEEPS
    arms: tuple[str, ...] = ARM_NAMES

    @property
    def subject(self) -> str:
        """The config's name in records: the preset, or the file without its folder."""
        return Path(self.config_name).stem


def make_request(
    *,
    command: str,
    config_name: str | None = None,
    trace: Path | None = None,
    shape: DecoderShape | None = None,
    backend: str = "auto",
    steps: int = 50,
    seed: int = 0,
    arrangement: PoolSharing | None = None,
    histories: Path | None = None,
    sweeps: Sequence[str] = SWEEPS,
    arms: Sequence[str] = ARM_NAMES,
) -> MeasureRequest:
    """Read and check what was asked for before anything runs.

    The defaults are the embedded config, requests drawn from the bundled profile, and the backend's decoder. Raises
    ValueError for bad input of any kind.
    """
    config_name = DEFAULT_PRESET if config_name is None else config_name
    config = load_config(config_name)
    make_plan(config)
    requests, workload = open_workload(trace, seed=seed)
    made = make_backend(backend)
    if histories is not None and made.name != "cuda":
        raise ValueError(f"histories is {str(histories)!r}: only the cuda backend has one, and this is {made.name}")
    return MeasureRequest(
        config_name=config_name,
        config=config,
        shape=attrs.evolve(shape, window=config.window) if shape else default_shape(made, config.window),
        backend=made,
        requests=tuple(requests),
        workload=workload,
        steps=steps,
        seed=seed,
        command=command,
        arrangement=arrangement,
        histories=histories,
        sweeps=tuple(dict.fromkeys(sweeps)),
        arms=tuple(dict.fromkeys(arms)),
    )


Suite = Callable[[MeasureRequest], tuple[list[Record], str]]


def run_suites(names: Iterable[str], request: MeasureRequest, out: Path) -> Iterator[tuple[Path, str]]:
    """Run the named suites, write each record into `out`, and yield its path and a summary in markdown.

    A record's name is its kind, its suite's subject and the device; a sweep of steps is written when it is done.
    Raises ValueError for what cannot be run, and before anything runs where `out` cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out is {str(out)!r}: no folder can be made there: {error.strerror}") from None
    for name in dict.fromkeys(names):
        results = _steps(request) if name == STEPS else [SUITES[name](request)]
        for records, summary in results:
            for index, record in enumerate(records):
                path = out / record.file_name
                write_record(record, path)
                yield path, summary if index == 0 else ""


def _record(request: MeasureRequest, kind: str, settings: dict[str, object], points: list[Point]) -> Record:
    return Record(
        kind=kind,
        environment=describe_environment(request.backend.device),
        command=request.command,
        seed=request.seed,
        settings=settings,
        points=points,
    )


def _plan_settings(request: MeasureRequest, *variant: str) -> dict[str, object]:
    """What the records of one config's graphs share, and a variant where they are not of all that is usual.

    It says which part was measured, and the decoder if that is not the device's own: such a record has its own file.
    """
    usual = default_shape(request.backend, request.shape.window)
    parts = [*([] if request.shape.name == usual.name else [request.shape.name]), *variant]
    settings: dict[str, object] = {
        "subject": request.subject,
        "model": request.shape.name,
        "window": request.shape.window,
    }
    return settings | ({"variant": "-".join(parts)} if parts else {})


def _run(request: MeasureRequest) -> tuple[list[Record], str]:
    """STEPS steps of the config on the workload: a `run` record, and a `capture` record of its graphs."""
    report = execute_steps(
        request.config,
        request.requests,
        num_steps=request.steps,
        backend=request.backend,
        shape=request.shape,
        seed=request.seed,
        progress=progress_bar,
    )
    settings = _plan_settings(request) | {
        "workload": request.workload,
        "sharing": report.sharing.value,
        "replay_form": report.replay_form.value,
        "static_buffer_bytes": report.static_buffer_bytes,
        "break_buffer_bytes": report.break_buffer_bytes,
    }
    run = _record(request, "run", settings, _run_points(report))
    groups = capture_points(request.subject, report.groups)
    return [run, _record(request, "capture", settings, groups)], report.markdown(20)


def _run_points(report: RunReport) -> list[Point]:
    """Every field of each step's record, and its wall time."""

    steps = enumerate(zip(report.records, report.step_us, strict=True))
    return [{"step": index, **flat_record(record), "step_us": round(step_us, 1)} for index, (record, step_us) in steps]


def _pool(request: MeasureRequest) -> tuple[list[Record], str]:
    """Reserved memory of each sharing arrangement and order, each in a fresh process (O5)."""
    cases = pool_cases(
        request.config_name,
        request.shape.name,
        request.backend.name,
        request.seed,
        only=request.arrangement,
        histories=request.histories,
    )
    points, summary = measure_pool(cases, progress_bar)
    only = [request.arrangement.value] if request.arrangement else []
    return [_record(request, "pool", _plan_settings(request, *only), points)], summary


def _movement(request: MeasureRequest) -> tuple[list[Record], str]:
    """Gather and scatter of rows, an operation a tensor and fused, against the copy bandwidth of the same run."""
    points, settings, summary = measure_movement(request.shape, request.backend, request.seed)
    record = _record(request, "movement", {"subject": request.shape.name, **settings}, points)
    return [record], f"{summary}{_of_a_cpu(request)}"


def _steps(request: MeasureRequest) -> Iterator[tuple[list[Record], str]]:
    """The sweeps of steps, one result each; one that fails leaves the others theirs, and is raised after them.

    Its traceback is printed at once and let go, for it holds the runners' memory.
    """
    suite = StepSuite(request.config, request.shape, request.backend, request.seed, request.arms, progress_bar)
    failed = []
    for sweep in request.sweeps:
        try:
            result = suite.run(sweep)
        except Exception as error:
            traceback.print_exception(error)
            traceback.clear_frames(error.__traceback__)
            failed.append(f"{sweep}: {error}")
            suite.free()
            continue
        records = [_record(request, kind, result.settings, points) for kind, points in result.points.items()]
        yield records, result.summary
    if failed:
        raise RuntimeError(f"sweeps failed, the other sweeps' records are written: {'; '.join(failed)}")


def _region(request: MeasureRequest) -> tuple[list[Record], str]:
    """The replay region in each form, a `capture` record of what each form takes to capture, and its kernels."""
    regions, captures, summary = region_points(request.shape, request.backend, request.seed)
    request.backend.empty_cache()
    kernels, rates, table = measure_kernels(request.shape, request.backend, request.seed)
    settings: dict[str, object] = {"subject": request.shape.name, "window": request.shape.window}
    forms = _record(request, "capture", settings | {"subject": f"{request.shape.name}-replay-forms"}, captures)
    measured = _record(request, "kernels", settings | rates, kernels)
    region = _record(request, "region", settings | {"notes": region_notes(regions)}, regions)
    return [region, forms, measured], f"{summary}\n\n{table}{_of_a_cpu(request)}"


def _of_a_cpu(request: MeasureRequest) -> str:
    """What the times of kernels are on the host backend, which runs a plain implementation in their stead."""
    if request.backend.name == "cuda":
        return ""
    return "\n\nTimes are of this CPU, which runs plain operations where a GPU runs kernels: only counts carry over."


def _laptop(request: MeasureRequest) -> tuple[list[Record], str]:
    """Processor seconds and memory of planning, on this machine's CPU."""
    points, summary = measure_laptop(progress=progress_bar)
    environment = describe_environment(torch.device("cpu"))
    record = attrs.evolve(_record(request, "laptop", {"subject": "planning"}, points), environment=environment)
    return [record], summary


STEPS = "steps"
SUITES: dict[str, Suite] = {
    "run": _run,
    "pool": _pool,
    "movement": _movement,
    "region": _region,
    "laptop": _laptop,
}
