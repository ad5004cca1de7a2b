"""Runs a workload's steps for real: captures the graphs of a serving config, runs the decoder, keeps every record."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import attrs
import torch
from tabulate import tabulate

from replay_sim.batch.dispatch import DispatchTable, StepRecord
from replay_sim.capture import BreakableGraph, CaptureBackend
from replay_sim.config import FLASH_RANK, TINY, DecoderShape, ServingConfig
from replay_sim.decoder.step import StepRunner, default_replay_form
from replay_sim.plan.capture_plan import CapturePlan, make_plan
from replay_sim.progress import Progress, no_progress
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.token_ids import token_ids
from replay_sim.workload.trace import TraceRequest

MIB = 1 << 20
BACKENDS = ("auto", "cuda", "host")


@attrs.frozen
class CaptureGroup:
    """What one group of graphs, `model` or `replay`, took to capture.

    Bytes are growth of reserved memory over the whole group (O5): in graph pools, and outside of them after emptying
    the cache, so that a warm-up's activations do not count as graph memory.
    """

    group: str
    num_graphs: int
    num_segments: int
    num_operations: int
    seconds: float
    pool_bytes: int
    plain_bytes: int


@attrs.frozen
class RunReport:
    """A finished run: what was captured, each step's record and its wall time in microseconds, device included."""

    device: str
    shape: str
    sharing: PoolSharing
    sharing_reason: str
    replay_form: ReplayForm
    groups: tuple[CaptureGroup, ...]
    records: tuple[StepRecord, ...]
    step_us: tuple[float, ...]
    static_buffer_bytes: int
    break_buffer_bytes: int

    @property
    def table(self) -> DispatchTable:
        """The dispatch table of all steps (G3)."""
        table = DispatchTable()
        table.extend(self.records)
        return table

    def markdown(self, limit: int | None = None) -> str:
        """Graphs by group, then the dispatch table, then one line that says what was done."""
        rows = [
            (g.group, g.num_graphs, g.num_segments, f"{g.seconds:.2f}", f"{g.pool_bytes / MIB:,.0f}")
            for g in self.groups
        ]
        groups = tabulate(rows, ("Group", "Graphs", "Segments", "Capture s", "Pool MiB"), tablefmt="pipe")
        buffers = (
            f"Static input buffers {self.static_buffer_bytes / MIB:,.1f} MiB, break buffers "
            f"{self.break_buffer_bytes / MIB:,.1f} MiB. Pool: {self.sharing.value}, {self.sharing_reason}. "
            f"Replay graphs: {self.replay_form.value}."
        )
        done = (
            f"Ran {len(self.records)} steps of {self.shape} on {self.device} in {sum(self.step_us) / 1e6:.2f} s; "
            f"captured {sum(g.num_graphs for g in self.groups)} graphs in {sum(g.seconds for g in self.groups):.2f} s."
        )
        return "\n\n".join((f"**Graphs**\n\n{groups}", buffers, self.table.markdown(limit), done))


def make_backend(name: str) -> CaptureBackend:
    """The capture backend `host`, `cuda`, or `auto`: cuda where there is a device.

    Raises ValueError for another name, and for cuda where there is none.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}: it must be one of {', '.join(BACKENDS)}")
    has_device = torch.cuda.is_available()
    if name == "cuda" and not has_device:
        raise ValueError("backend is 'cuda' and no CUDA device is available: it must be auto or host here")
    if has_device and name != "host":
        from replay_sim.capture.cuda import CudaBackend

        return CudaBackend()
    from replay_sim.capture.host import HostBackend

    return HostBackend()


def default_shape(backend: CaptureBackend, window: int) -> DecoderShape:
    """One rank's share of DeepSeek-V4.1-Flash on a GPU, the tiny decoder on a CPU, with the config's window."""
    return attrs.evolve(FLASH_RANK if backend.name == "cuda" else TINY, window=window)


def execute_steps(
    config: ServingConfig,
    requests: Sequence[TraceRequest],
    *,
    num_steps: int,
    backend: CaptureBackend,
    shape: DecoderShape | None = None,
    seed: int = 0,
    sharing: PoolSharing | None = None,
    progress: Progress = no_progress,
) -> RunReport:
    """Capture the config's graphs, then schedule `requests` and run the first `num_steps` steps.

    All requests are taken to wait from the start: step times are the result here, not an input. Raises ValueError
    for a workload that does not fit the decoder's positions or the config's plan.
    """
    plan = make_plan(config)
    shape = shape or default_shape(backend, config.window)
    requests = requests[: num_steps * config.max_num_seqs]
    runner = _make_runner(config, plan, shape, backend, requests, seed, sharing)
    groups = capture_groups(runner, progress)
    settings = SchedulerSettings.from_config(config, seed=seed, num_blocks=runner.num_blocks, block_size=BLOCK_SIZE)
    steps = Scheduler(requests, settings).steps()
    records, times = [], []
    for step in progress(itertools.islice(steps, num_steps), "steps"):
        ids = token_ids(step.batch, shape.vocab_size, seed)
        backend.synchronize()
        began = time.perf_counter()
        output = runner.step(step.batch, step.block_tables, ids)
        backend.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
        records.append(output.record)
    return RunReport(
        device=torch.cuda.get_device_name(backend.device) if backend.name == "cuda" else "the host backend",
        shape=shape.name,
        sharing=runner.sharing.sharing,
        sharing_reason=runner.sharing.reason,
        replay_form=runner.replay_form,
        groups=groups,
        records=tuple(records),
        step_us=tuple(times),
        static_buffer_bytes=runner.replay_layers.inputs.nbytes,
        break_buffer_bytes=runner.replay_layers.break_buffers.nbytes,
    )


def capture_groups(runner: StepRunner, progress: Progress = no_progress) -> tuple[CaptureGroup, ...]:
    """Capture the runner's model graphs and then its replay graphs, each timed and weighed as a whole (O5)."""
    model = _measured("model", runner, lambda: runner.capture_model_graphs(progress))
    replay = _measured("replay", runner, lambda: runner.capture_replay_graphs(progress))
    return model, replay


def _measured(group: str, runner: StepRunner, work: Callable[[], None]) -> CaptureGroup:
    backend = runner.backend
    before = _reserved(runner)
    began = time.perf_counter()
    work()
    backend.synchronize()
    seconds = time.perf_counter() - began
    after = _reserved(runner)
    graphs: list[BreakableGraph] = [*runner.model_graphs.values(), *runner.full_graphs.values()]
    if group == "replay":
        graphs = list(runner.replay_graphs.graphs)
    return CaptureGroup(
        group=group,
        num_graphs=len(graphs),
        num_segments=sum(len(graph.segments) for graph in graphs),
        num_operations=sum(graph.num_operations for graph in graphs),
        seconds=seconds,
        pool_bytes=after[0] - before[0],
        plain_bytes=after[1] - before[1],
    )


def _reserved(runner: StepRunner) -> tuple[int, int]:
    """Reserved bytes in the runner's graph pools, and outside of them once the cache is empty."""
    backend = runner.backend
    backend.synchronize()
    backend.empty_cache()
    in_pools = sum(backend.reserved_bytes(pool) for pool in runner.pools)
    return in_pools, backend.reserved_bytes() - in_pools


def _make_runner(
    config: ServingConfig,
    plan: CapturePlan,
    shape: DecoderShape,
    backend: CaptureBackend,
    requests: Sequence[TraceRequest],
    seed: int,
    sharing: PoolSharing | None,
) -> StepRunner:
    slack = config.query_len_decode
    longest = max((r.prompt_tokens + r.output_tokens + slack for r in requests), default=1)
    if longest > shape.max_position:
        raise ValueError(
            f"a request of {longest} tokens does not fit max_position {shape.max_position} of the decoder "
            f"{shape.name}: take a workload of shorter requests"
        )
    max_blocks = blocks_for(max(longest, plan.largest_size), BLOCK_SIZE)
    return StepRunner(
        shape,
        plan,
        backend,
        num_blocks=max_blocks * min(config.max_num_seqs, max(1, len(requests))),
        max_blocks=max_blocks,
        block_size=BLOCK_SIZE,
        seed=seed,
        replay_form=default_replay_form(backend),
        sharing=sharing,
    )
