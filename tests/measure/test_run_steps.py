"""Runs of real steps: what was captured, which steps ran in what, and what is refused before anything runs."""

from collections import Counter

import attrs
import numpy as np
import pytest
import torch
from small_config import CONFIG, LENGTHS, NUM_MODEL_GRAPHS, NUM_REPLAY_GRAPHS

from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture.host import HostBackend, HostSegment
from replay_sim.config import FLASH_RANK, TINY, config_from_mapping
from replay_sim.decoder.step import StepRunner, default_replay_form
from replay_sim.measure.run_steps import capture_groups, default_shape, execute_steps, make_backend
from replay_sim.plan import make_plan
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import planned_dispatch
from replay_sim.workload.trace import TraceRequest

SERVING = config_from_mapping(CONFIG)
SHAPE = attrs.evolve(TINY, window=SERVING.window)
REQUESTS = tuple(TraceRequest(0.0, *lengths, str(index)) for index, lengths in enumerate(LENGTHS))
NUM_STEPS = 5


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def run(request):
    """A run of all steps of the requests, and what its progress showed."""
    shown: Counter[str] = Counter()

    def progress(items, what):
        for item in items:
            shown[what] += 1
            yield item

    backend = make_backend(request.param)
    report = execute_steps(
        SERVING, REQUESTS, num_steps=NUM_STEPS, backend=backend, shape=SHAPE, seed=3, progress=progress
    )
    return report, shown


def test_steps_run_as_the_simulation_dispatches_them(run) -> None:
    """G3, D1-D4: every size was captured, so each real step has the record of the planned one."""
    report, _ = run
    plan = make_plan(SERVING)
    steps = Scheduler(REQUESTS, SchedulerSettings.from_config(SERVING, seed=3), dispatch=planned_dispatch(plan)).steps()
    assert list(report.records) == [step.record for step in steps][:NUM_STEPS]
    assert len(report.step_us) == len(report.records) and min(report.step_us) > 0


def test_the_workload_ends_a_run_before_its_number_of_steps(run) -> None:
    report, shown = run
    prompts_and_outputs = sum(prompt + output - 1 for prompt, output in LENGTHS)
    assert sum(record.num_tokens for record in report.records) == prompts_and_outputs
    assert shown["steps"] == len(report.records) < NUM_STEPS


def test_both_groups_are_captured_whole_before_the_first_step(run) -> None:
    """O1, O5, C8."""
    report, shown = run
    model, replay = report.groups
    assert (model.group, model.num_graphs) == ("model", NUM_MODEL_GRAPHS)
    assert (replay.group, replay.num_graphs) == ("replay", NUM_REPLAY_GRAPHS)
    assert model.num_segments > model.num_graphs and replay.num_operations > replay.num_segments
    assert model.seconds > 0 and replay.seconds > 0
    assert report.sharing is PoolSharing.SHARED and replay.pool_bytes == 0 < model.pool_bytes
    assert list(shown) == ["PIECEWISE", "FULL", "replay", "steps"]


def test_replay_graphs_are_of_one_launch_on_a_gpu(run) -> None:
    """Issue 5: the default where it wins."""
    report, _ = run
    on_gpu = report.device != "the host backend"
    assert report.replay_form is (ReplayForm.ONE_LAUNCH if on_gpu else ReplayForm.BREAKABLE)
    assert report.groups[1].num_segments == NUM_REPLAY_GRAPHS * (1 if on_gpu else SHAPE.num_replay_layers + 1)
    assert f"Replay graphs: {report.replay_form.value}." in report.markdown()


def test_the_default_form_is_one_launch_on_a_gpu_alone() -> None:
    """Issue 5."""
    on_gpu = attrs.make_class("Backend", {"name": attrs.field(default="cuda")})()
    assert default_replay_form(on_gpu) is ReplayForm.ONE_LAUNCH
    assert default_replay_form(HostBackend()) is ReplayForm.BREAKABLE


def test_the_text_says_what_ran_where_and_holds_both_tables(run) -> None:
    report, _ = run
    text = report.markdown(20)
    assert "**Graphs**" in text and "**Model graphs**" in text and "**Replay graphs**" in text
    assert text.splitlines()[-1].startswith(f"Ran {len(report.records)} steps of tiny on {report.device} in ")
    assert report.table.as_dict()["model_graphs"]


def test_the_host_backend_is_never_called_a_gpu() -> None:
    report = execute_steps(SERVING, REQUESTS[2:], num_steps=1, backend=HostBackend(), shape=SHAPE)
    assert report.device == "the host backend"


def test_the_arrangement_can_be_forced_and_then_costs_memory() -> None:
    """O2, O4."""
    backend = HostBackend()
    report = execute_steps(SERVING, REQUESTS, num_steps=1, backend=backend, shape=SHAPE, sharing=PoolSharing.OWN_POOL)
    assert report.sharing is PoolSharing.OWN_POOL
    assert report.groups[1].pool_bytes > 0
    assert sum(group.pool_bytes + group.plain_bytes for group in report.groups) == backend.reserved_bytes()


def test_a_group_is_weighed_as_a_whole_in_pools_and_outside_of_them() -> None:
    """O5: both groups together are all that the capture reserved, and the model graphs' group has no replay graphs."""
    backend = HostBackend()
    runner = StepRunner(SHAPE, make_plan(SERVING), backend, num_blocks=4, max_blocks=4, block_size=64)
    before = backend.reserved_bytes()
    groups = capture_groups(runner)
    assert sum(group.pool_bytes + group.plain_bytes for group in groups) == backend.reserved_bytes() - before
    assert sum(group.pool_bytes for group in groups) == sum(backend.reserved_bytes(pool) for pool in runner.pools)
    assert groups[1].num_segments == sum(len(graph.segments) for graph in runner.replay_graphs.graphs)


def test_a_request_beyond_the_decoders_positions_is_refused_before_any_capture() -> None:
    backend = HostBackend()
    shape = attrs.evolve(SHAPE, max_position=32)
    with pytest.raises(ValueError, match="a request of 44 tokens does not fit max_position 32 of the decoder tiny"):
        execute_steps(SERVING, REQUESTS, num_steps=1, backend=backend, shape=shape)
    assert backend.reserved_bytes() == 0


def test_the_default_decoder_is_the_backends_with_the_configs_window() -> None:
    on_host = default_shape(HostBackend(), 17)
    assert on_host == attrs.evolve(TINY, window=17)
    on_gpu = default_shape(attrs.make_class("Backend", {"name": attrs.field(default="cuda")})(), 17)
    assert on_gpu == attrs.evolve(FLASH_RANK, window=17)


def test_auto_is_the_host_backend_without_a_device_and_cuda_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_backend("auto").name == make_backend("host").name == "host"
    with pytest.raises(ValueError, match="backend is 'cuda' and no CUDA device is available: it must be auto or host"):
        make_backend("cuda")


def test_another_name_is_no_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'cpu': it must be one of auto, cuda, host"):
        make_backend("cpu")


@pytest.mark.gpu
def test_auto_is_the_cuda_backend_where_there_is_a_device() -> None:
    assert make_backend("auto").name == "cuda"


def launches_of(work, backend, monkeypatch) -> int:
    """Graphs that `work` launches: in a profile on a GPU, by counting replays of segments on the host."""
    if backend.name == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            work()
            backend.synchronize()
        return sum(event.count for event in recorded.key_averages() if event.key == "cudaGraphLaunch")
    replayed: list[HostSegment] = []
    replay = HostSegment.replay
    monkeypatch.setattr(HostSegment, "replay", lambda segment: (replayed.append(segment), replay(segment)))
    work()
    return len(replayed)


def test_a_step_launches_every_segment_of_its_model_graph_and_of_its_replay_graph(backend, monkeypatch) -> None:
    """C1, H3: launches are counted, so that a step that silently ran eagerly would be seen."""
    runner = StepRunner(SHAPE, make_plan(SERVING), backend, num_blocks=4, max_blocks=4, block_size=64)
    capture_groups(runner)
    batch = Batch([Request(16, 0, Phase.PREFILL)])
    arguments = (batch, [np.zeros(1, np.int32)], np.arange(16, dtype=np.int32))
    record = runner.step(*arguments).record
    assert (record.padded_tokens, record.padded_rows) == (16, 8)
    segments = len(runner.model_graphs[16].segments) + len(runner.replay_graphs.graphs[0].segments)
    assert launches_of(lambda: runner.step(*arguments), backend, monkeypatch) == segments > 2
