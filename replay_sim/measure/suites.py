"""The measurement suites of `replay-sim measure`: each runs one experiment and makes its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

from replay_sim.config import DEFAULT_PRESET, SHAPES, DecoderShape, ServingConfig, load_config
from replay_sim.measure.environment import describe_environment
from replay_sim.measure.pool_runs import measure_pool, pool_cases
from replay_sim.measure.records import Point, Record, write_record
from replay_sim.measure.row_movement import measure_movement
from replay_sim.measure.run_steps import RunReport, default_shape, execute_steps, make_backend
from replay_sim.replay.sharing import PoolSharing
from replay_sim.workload.detect import read_trace
from replay_sim.workload.generator import generate_requests
from replay_sim.workload.profiles import load_profile
from replay_sim.workload.trace import TraceRequest


@attrs.frozen(kw_only=True)
class MeasureRequest:
    """What `replay-sim measure` was asked: config, workload, steps, decoder shape, backend, seed, and the command.

    `arrangement` limits the pool suite to one, `histories` is the folder for its allocation histories.
    """

    config: str | None
    trace: Path | None
    steps: int
    shape: str | None
    backend: str
    seed: int
    command: str
    arrangement: str | None = None
    histories: Path | None = None

    def serving(self) -> ServingConfig:
        """The serving config, the embedded default if none is named."""
        return load_config(self.config or DEFAULT_PRESET)

    def decoder_shape(self) -> DecoderShape:
        """The decoder shape with the config's window; ValueError for an unknown name."""
        window = self.serving().window
        if self.shape is None:
            return default_shape(make_backend(self.backend), window)
        if self.shape not in SHAPES:
            raise ValueError(f"shape {self.shape!r} is not one of {', '.join(sorted(SHAPES))}")
        return attrs.evolve(SHAPES[self.shape], window=window)

    def requests(self) -> tuple[tuple[TraceRequest, ...], str]:
        """The workload of the run and its name."""
        if self.trace is not None:
            return read_trace(self.trace), self.trace.name
        profile = load_profile("conversation")
        return tuple(generate_requests(profile, 1000, seed=self.seed)), f"profile {profile.name}, {profile.source}"


Suite = Callable[[MeasureRequest], tuple[list[Record], str]]


def run_suites(names: Iterable[str], request: MeasureRequest, out: Path) -> Iterator[tuple[Path, str]]:
    """Run the named suites, write each record into `out`, and yield its path and a summary in markdown.

    A record's name is its kind, its suite's subject and the device. Raises ValueError for what cannot be run.
    """
    for name in names:
        records, summary = SUITES[name](request)
        for index, record in enumerate(records):
            device = str(record.environment["gpu"] or "cpu").lower().replace(" ", "-")
            path = out / f"{record.kind}-{record.settings['subject']}-{device}.json"
            write_record(record, path)
            yield path, summary if index == 0 else ""


def _record(request: MeasureRequest, kind: str, settings: dict[str, object], points: list[Point]) -> Record:
    return Record(
        kind=kind,
        environment=describe_environment(make_backend(request.backend).device),
        command=request.command,
        seed=request.seed,
        settings=settings,
        points=points,
    )


def _run(request: MeasureRequest) -> tuple[list[Record], str]:
    """STEPS steps of the config on the workload: a `run` record, and a `capture` record of its graphs."""
    requests, source = request.requests()
    shape = request.decoder_shape()
    report = execute_steps(
        request.serving(),
        requests,
        num_steps=request.steps,
        backend=make_backend(request.backend),
        shape=shape,
        seed=request.seed,
        progress=progress_bar,
    )
    subject = request.config or DEFAULT_PRESET
    settings: dict[str, object] = {
        "subject": Path(subject).stem,
        "model": shape.name,
        "window": shape.window,
        "workload": source,
        "sharing": report.sharing.value,
        "static_buffer_bytes": report.static_buffer_bytes,
        "break_buffer_bytes": report.break_buffer_bytes,
    }
    run = _record(request, "run", settings, _run_points(report))
    groups: list[Point] = [
        {
            "plan": subject,
            "group": group.group,
            "num_graphs": group.num_graphs,
            "num_segments": group.num_segments,
            "num_operations": group.num_operations,
            "seconds": group.seconds,
            "reserved_bytes": group.pool_bytes,
            "plain_bytes": group.plain_bytes,
        }
        for group in report.groups
    ]
    return [run, _record(request, "capture", settings, groups)], report.markdown(20)


def _run_points(report: RunReport) -> list[Point]:
    return [
        {
            "step": index,
            "num_tokens": record.num_tokens,
            "padded_tokens": record.padded_tokens,
            "mode": record.mode.value,
            "replay_rows": record.replay_rows,
            "padded_rows": record.padded_rows,
            "replay_mode": None if record.replay_mode is None else record.replay_mode.value,
            "reason": record.reason.value,
            "num_reqs": record.num_reqs,
            "step_us": round(step_us, 1),
        }
        for index, (record, step_us) in enumerate(zip(report.records, report.step_us, strict=True))
    ]


def _pool(request: MeasureRequest) -> tuple[list[Record], str]:
    """Reserved memory of each sharing arrangement and order, each in a fresh process (O5)."""
    subject = request.config or DEFAULT_PRESET
    shape = request.decoder_shape()
    only = None if request.arrangement is None else PoolSharing(request.arrangement)
    cases = pool_cases(subject, shape.name, request.backend, request.seed, only=only, histories=request.histories)
    points, summary = measure_pool(cases, progress_bar)
    settings: dict[str, object] = {"subject": Path(subject).stem, "model": shape.name, "window": shape.window}
    return [_record(request, "pool", settings, points)], summary


def _movement(request: MeasureRequest) -> tuple[list[Record], str]:
    """Gather and scatter of rows, an operation a tensor, against the copy bandwidth of the same run."""
    shape = request.decoder_shape()
    points, settings, summary = measure_movement(shape, make_backend(request.backend), request.seed)
    return [_record(request, "movement", {"subject": shape.name, **settings}, points)], summary


def progress_bar(items: Iterable, what: str) -> Iterable:
    """A tqdm bar on a terminal, silent elsewhere."""
    from tqdm import tqdm

    return tqdm(items, desc=what, disable=None, leave=False)


SUITES: dict[str, Suite] = {"run": _run, "pool": _pool, "movement": _movement}
