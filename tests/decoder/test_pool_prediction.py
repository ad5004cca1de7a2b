"""Pool bytes predicted from shapes: equal to a capture with tensors, cheap at any size, and every scratch declared."""

import json
import subprocess
import sys

import attrs
import pytest
import torch
from click.testing import CliRunner
from decoder.op_cases import CASES, make_case
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.capture import CaptureError
from replay_sim.capture.graph_memory import GraphMemory, MemoryPlayer
from replay_sim.capture.host import HostBackend
from replay_sim.capture.shape_recorder import Scratch
from replay_sim.commands.plan import command
from replay_sim.config import FLASH_RANK, TINY, ServingConfig, load_config
from replay_sim.decoder import pool_prediction
from replay_sim.decoder.ops import scratch
from replay_sim.decoder.pool_prediction import PlanMemory, PoolGrowth, record_plan
from replay_sim.decoder.step import StepRunner
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.replay.sharing import PoolSharing

SHAPE = attrs.evolve(TINY, hidden_size=512, num_layers=5, moe_intermediate_size=64, late_aux_layers=(4,))
PLAN = CapturePlan(
    window=TINY.window,
    model_sizes=(8, 64, 256, 600),
    full_sizes=(4, 16),
    replay_sizes=(16, 128, 400),
    trim_threshold=64,
    max_num_seqs=16,
    max_num_batched_tokens=600,
)
WITH_EARLY_AUX = attrs.evolve(SHAPE, early_aux_layers=(1, 2))
MIB = 1 << 20
LARGEST_PRESET = "b300-tp-recipe"  # its default rule plans 32 replay sizes


def growth_of(growths: tuple[PoolGrowth, ...], group: str, sharing: PoolSharing) -> PoolGrowth:
    return next(g for g in growths if g.group == group and g.arrangement is sharing)


def captured(shape, sharing: PoolSharing, largest_first: bool) -> dict[str, int]:
    """Pool bytes of each group, captured with tensors."""
    backend = HostBackend(4 << 30)
    blocks = -(-PLAN.max_num_batched_tokens // 64)
    runner = StepRunner(
        shape, PLAN, backend, num_blocks=blocks, max_blocks=blocks, sharing=sharing, largest_first=largest_first
    )
    runner.capture_model_graphs()
    model = backend.reserved_bytes()
    runner.capture_replay_graphs()
    return {"model": model, "replay": backend.reserved_bytes() - model}


@pytest.fixture(scope="module")
def without_scratch() -> dict[str, PlanMemory]:
    """Recorded as the CPU's operations allocate: nothing beside their results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_prediction, "allocation_order", lambda operation, args: None)
        return {"plain": record_plan(SHAPE, PLAN), "early_aux": record_plan(WITH_EARLY_AUX, PLAN)}


@pytest.mark.parametrize("largest_first", [True, False], ids=["largest_first", "smallest_first"])
@pytest.mark.parametrize("sharing", PoolSharing)
@pytest.mark.parametrize("name", ["plain", "early_aux"])
def test_shapes_alone_predict_what_a_capture_with_tensors_reserves(
    without_scratch, name: str, sharing: PoolSharing, largest_first: bool
) -> None:
    """O1-O5, C8: 0 bytes off, in every arrangement and order."""
    growths = without_scratch[name].predict(largest_first=largest_first)
    predicted = {group: growth_of(growths, group, sharing).pool_bytes for group in ("model", "replay")}
    assert predicted == captured(SHAPE if name == "plain" else WITH_EARLY_AUX, sharing, largest_first)


@pytest.fixture(scope="module")
def flash() -> PlanMemory:
    return record_plan(FLASH_RANK, make_plan(load_config("default")))


def test_sharing_pool_and_stream_adds_nothing_and_the_others_do(flash: PlanMemory) -> None:
    """O1, O2: at full shapes."""
    growths = flash.predict()
    assert growth_of(growths, "replay", PoolSharing.SHARED).pool_bytes == 0
    own_stream = growth_of(growths, "replay", PoolSharing.OWN_STREAM).pool_bytes
    assert own_stream == growth_of(growths, "replay", PoolSharing.OWN_POOL).pool_bytes > 100 * MIB
    assert len({growth_of(growths, "model", sharing).pool_bytes for sharing in PoolSharing}) == 1


def test_smallest_first_and_held_outputs_cost_more(flash: PlanMemory) -> None:
    """C8, D5."""

    def total(**options: bool) -> int:
        growths = flash.predict(**options)
        return sum(growth_of(growths, group, PoolSharing.OWN_POOL).pool_bytes for group in ("model", "replay"))

    usual = total()
    assert total(largest_first=False) > 1.2 * usual
    assert total(hold_outputs=True) > 1.2 * usual


def test_memory_is_about_the_largest_graph_not_the_sum(flash: PlanMemory) -> None:
    """D5, D7."""
    peaks = [memory.peak_bytes for memory in flash.model_graphs]
    model = growth_of(flash.predict(), "model", PoolSharing.SHARED).pool_bytes
    assert max(peaks) < model < sum(peaks) / 2


def test_what_libraries_and_kernels_allocate_is_listed_by_name_and_size(flash: PlanMemory) -> None:
    """Point 2 of pool reuse: shapes of tensors cannot tell it."""
    assert flash.workspaces == (("cuBLAS workspace", 32 * MIB),)
    assert {name for _, name, _ in flash.scratch} >= {"partial sums", "expert of each pair"}


def test_buffers_are_counted_as_the_plan_counts_them(flash: PlanMemory) -> None:
    """B1, L4."""
    from replay_sim.plan import plan_cost

    cost = plan_cost(make_plan(load_config("default")), FLASH_RANK)
    assert (flash.static_bytes, flash.break_bytes) == (cost.static_buffer_bytes, cost.break_buffer_bytes)


def test_early_aux_states_take_the_replay_graphs_off_the_shared_stream() -> None:
    """O3, O4."""
    memory = record_plan(WITH_EARLY_AUX, PLAN)
    assert memory.sharing.sharing is PoolSharing.OWN_STREAM


MEASURED_PROCESS = f"""
import json, resource
from replay_sim.config import FLASH_RANK, load_config
from replay_sim.decoder.pool_prediction import record_plan
from replay_sim.plan import make_plan
plan = make_plan(load_config({LARGEST_PRESET!r}))
memory = record_plan(FLASH_RANK, plan)
memory.predict()
print(json.dumps([len(plan.replay_sizes), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def test_a_plan_of_32_sizes_at_full_shapes_takes_little_memory() -> None:
    """Point 5 of pool reuse: under 1 GiB; its seconds are in the `laptop` record."""
    done = subprocess.run([sys.executable, "-c", MEASURED_PROCESS], capture_output=True, text=True, check=True)
    sizes, kib = json.loads(done.stdout)
    assert sizes == 32
    assert kib < 1 << 20


def test_the_plan_command_prints_the_prediction_only_when_asked() -> None:
    """P7: `plan --memory`."""
    plain = json.loads(CliRunner().invoke(command, ["default", "--json"], catch_exceptions=False).output)
    assert plain["predicted_pool_bytes"] is None
    asked = ["h100-tp8-log", "--shape", "tiny", "--memory"]
    summary = json.loads(CliRunner().invoke(command, [*asked, "--json"], catch_exceptions=False).output)
    rows = summary["predicted_pool"]
    assert {row["arrangement"] for row in rows} == {sharing.value for sharing in PoolSharing}
    assert summary["pool_sharing"] == "shared"
    assert summary["predicted_pool_bytes"] == sum(
        row["predicted_bytes"] for row in rows if row["arrangement"] == "shared"
    )
    table = CliRunner().invoke(command, [*asked, "--order", "smallest_first"], catch_exceptions=False).output
    assert "shared (chosen)" in table and "smallest first" in table and "cuBLAS workspace, 32.0 MiB" in table


def test_a_graph_recorded_by_shapes_cannot_run() -> None:
    """C12."""
    backend = HostBackend(1 << 30, shapes_only=True)
    backend.begin_segment(backend.make_pool(), backend.make_stream())
    torch.zeros(4).relu()
    segment = backend.end_segment()
    with pytest.raises(CaptureError, match="shapes alone"):
        segment.replay()


def test_held_outputs_are_the_only_ones_that_stay() -> None:
    """D5: two graphs of one output and one temporary each."""
    graphs = [
        GraphMemory(f"graph {n}", ((n, 4 * MIB, True), (n + 1, 3 * MIB, True), (n, 0, True), (n + 1, 0, True)), {n})
        for n in (10, 20)
    ]
    live = []
    for holds in (False, True):
        player = MemoryPlayer()
        player.allocator.retain_pool(1)
        for memory in graphs:
            player.play(memory, 1, 1, holds_outputs=holds)
        live.append(player.allocator.allocated_bytes(1))
    assert live == [0, 8 * MIB]


class FakeKernel:
    """Takes every launch and runs none."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


class Allocations(TorchDispatchMode):
    """Keeps every new tensor, in order of allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and isinstance(result, torch.Tensor):
            self.tensors.append(result)
        return result


@pytest.mark.parametrize("name", CASES)
def test_every_allocation_of_a_launcher_is_declared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point 2: what the CUDA implementations allocate, in their order, against the table of scratch."""
    pytest.importorskip("triton")
    from replay_sim.decoder.ops import cuda

    for kernel in [attribute for attribute in vars(cuda) if attribute.endswith("_kernel")]:
        monkeypatch.setattr(cuda, kernel, FakeKernel())
    args = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in make_case(name, torch.float32)]
    with Allocations() as seen:
        results = getattr(cuda, name)(*args)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    declared = scratch.allocation_order(getattr(torch.ops.replay_sim, name).default, tuple(args))
    declared = tuple(range(len(results))) if declared is None else declared

    def describe(tensor: torch.Tensor) -> int:
        """The index of a result, or the bytes of scratch."""
        same = [r.untyped_storage()._cdata == tensor.untyped_storage()._cdata for r in results]
        index = same.index(True) if True in same else None
        return -tensor.nbytes if index is None else index

    assert [describe(t) for t in seen.tensors] == [-s.nbytes if isinstance(s, Scratch) else s for s in declared]


def test_the_grouped_product_declares_its_arguments_and_descriptors() -> None:
    """Point 2: of 48 experts, in bfloat16."""
    xs = torch.empty(6, 64, dtype=torch.bfloat16, device="meta")
    w = torch.empty(48, 64, 32, dtype=torch.bfloat16, device="meta")
    order = scratch.allocation_order(torch.ops.replay_sim.grouped_matmul.default, (xs, w, None))
    assert [getattr(step, "nbytes", step) for step in order] == [0, 2880, 84480]


@pytest.mark.parametrize("mode", ["NONE", "FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_mode_has_a_prediction(mode: str) -> None:
    """P7: also a plan with neither PIECEWISE nor replay graphs."""
    config = ServingConfig(window=8, max_num_seqs=4, max_num_batched_tokens=64, cudagraph_mode=mode)
    plan = make_plan(config)
    growths = record_plan(TINY, plan).predict()
    graphs = len(plan.model_sizes) + len(plan.full_sizes)
    assert growth_of(growths, "model", PoolSharing.SHARED).num_graphs == graphs
    assert (growth_of(growths, "model", PoolSharing.SHARED).pool_bytes > 0) == (graphs > 0)
