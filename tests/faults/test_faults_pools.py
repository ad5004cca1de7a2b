"""Known faults of graph pools: outputs that later graphs overwrite, memory that adds up, estimates that mislead."""

import attrs
import pytest
import torch
from decoder.serving import BLOCK_SIZE, Serving, decode, make_plan, make_runner, prefill
from faults.helpers import SMOOTH, live_pool_bytes, place_of, run_beside_eager
from faults.table import fault
from replay.fake_model import FakeModel

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable
from replay_sim.capture import capture
from replay_sim.capture.caching_allocator import OutOfMemoryError
from replay_sim.capture.checker import Checker
from replay_sim.capture.host import HostBackend
from replay_sim.config.shapes import TINY
from replay_sim.decoder import pool_prediction
from replay_sim.decoder.pool_prediction import record_plan
from replay_sim.decoder.step import StepRunner
from replay_sim.measure.run_steps import capture_groups
from replay_sim.plan import CapturePlan
from replay_sim.replay.context import use_forward_context
from replay_sim.replay.sharing import PoolSharing

FULL, PIECEWISE = CudagraphMode.FULL, CudagraphMode.PIECEWISE
WIDTH = 256
EARLY_AUX = attrs.evolve(SMOOTH, early_aux_layers=(0, 2), late_aux_layers=(4,))
# Deep enough in rows and width that graphs take segments of their own.
WIDE = attrs.evolve(TINY, hidden_size=512, num_layers=4, cut=2, moe_intermediate_size=64, num_weight_sets=1)


def layers(backend, rows: int):
    """Four layers whose temporaries die, and their last output, of `rows` KiB."""
    x = torch.ones(rows, WIDTH, device=backend.device)

    def function() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = (y * 2).tanh()
        return y

    return function


@fault("D1", "graph outputs are copied to break buffers before another graph runs; early aux states keep their stream")
def test_D1_states_read_after_the_replay_graph_are_right_on_both_sides_of_the_largest_graph(backend, form) -> None:
    plan = make_plan(model_sizes=(64, 256), full_sizes=(4,), replay_sizes=(8, 32), trim_threshold=9)
    steps = [[prefill(f"p{tokens}", tokens)] for tokens in (200, 256, 257, 300)]
    records = run_beside_eager(backend, plan, [*steps, [decode("p200"), decode("p300")]], EARLY_AUX, replay_form=form)
    modes = [record.mode for record in records]
    assert modes == [PIECEWISE, PIECEWISE, CudagraphMode.NONE, CudagraphMode.NONE, FULL]
    assert all(record.replay_mode is PIECEWISE for record in records[:4])


@fault("D1")
@pytest.mark.parametrize("sharing", [None, PoolSharing.SHARED])
def test_D1_early_aux_states_in_a_shared_pool_would_be_overwritten_and_the_checker_sees_it(form, sharing) -> None:
    backend = HostBackend(1 << 30)
    checker = Checker(backend)
    plan = make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(64,), trim_threshold=9)
    runner = make_runner(backend, plan, EARLY_AUX, sharing=sharing, replay_form=form)
    assert (runner.sharing.sharing is PoolSharing.OWN_STREAM) == (sharing is None)
    with checker.watching():
        output = Serving(runner).step([prefill("p", 60, keeps=True)])
        for state in output.early_aux:
            state.sum()
    assert bool(checker.findings) == (sharing is PoolSharing.SHARED)


class Memo:
    """A workspace that is made when it is first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.workspace = device, None

    def get(self) -> torch.Tensor:
        if self.workspace is None:
            self.workspace = torch.zeros(8, WIDTH, device=self.device)
        return self.workspace


@fault(
    "D2", "warm-ups run on the capture stream until nothing new stays; the checker names what a capture made and kept"
)
def test_D2_a_memoised_workspace_of_the_replay_layers_is_made_before_the_capture(place, backend) -> None:
    model, memo = FakeModel(backend.device), Memo(backend.device)

    def run_layers(inputs):
        scratch = memo.get()[: len(inputs["hidden_states"])]
        scratch.add_(1)
        return model.run_layers(inputs)

    graphs = model.graphs(place, model.buffers(), run_layers)
    graphs.capture([8, 4])
    assert live_pool_bytes(backend, place["pool"]) == 0
    memo.workspace.zero_()
    for turn in (1, 2):
        for rows in (8, 4):
            batch = model.prepare(rows)
            with use_forward_context(batch.context):
                graphs.run(batch.rows, model.inputs(rows))
        assert memo.workspace[:, 0].tolist() == [2 * turn] * 4 + [turn] * 4


@fault("D2")
def test_D2_a_workspace_made_in_a_capture_without_warm_up_is_named_by_the_checker() -> None:
    backend = HostBackend(1 << 28)
    checker, memo, x = Checker(backend), Memo(torch.device("cpu")), torch.ones(8, WIDTH)
    capture(lambda: (x * 2).sum(), name="first", **(place := place_of(backend)))
    capture(lambda: memo.get() + x, name="maker", **place)
    (kept,) = checker.kept()
    assert (kept.graph, kept.shape) == ("maker", (8, WIDTH))


@fault("D3", "one stream for every graph that shares the pool; another stream is a choice, reported with its bytes")
@pytest.mark.parametrize("rows", [4096, 16])
def test_D3_a_pool_gives_its_free_blocks_to_its_own_stream_alone(backend, rows: int) -> None:
    place = place_of(backend)
    kept = [capture(layers(backend, rows), **place)]
    first = backend.reserved_bytes(place["pool"])
    kept.append(capture(layers(backend, rows), **place))
    assert backend.reserved_bytes(place["pool"]) == first
    kept.append(capture(layers(backend, rows), **place_of(backend, pool=place["pool"])))
    assert backend.reserved_bytes(place["pool"]) > first


@fault("D5", "outputs are held weakly: sizes after the largest add nothing")
def test_D5_four_sizes_whose_outputs_are_kept_take_what_the_largest_takes(backend) -> None:
    reserved = {}
    for name, units, holds in (("largest", [4], False), ("all", [4, 3, 2, 1], False), ("held", [4, 3, 2, 1], True)):
        place = place_of(backend)
        graphs = [capture(layers(backend, 4096 * unit), hold_outputs=holds, **place) for unit in units]
        outputs = [graph.outputs for graph in graphs]
        assert [len(output) for output in outputs] == [4096 * unit for unit in units]
        reserved[name] = backend.reserved_bytes(place["pool"])
    assert reserved["all"] == reserved["largest"] < reserved["held"]


def plan_of_sizes(replay_sizes: tuple[int, ...]) -> CapturePlan:
    return CapturePlan(
        window=TINY.window,
        model_sizes=(),
        full_sizes=(),
        replay_sizes=replay_sizes,
        trim_threshold=None,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
    )


def captured_bytes(plan: CapturePlan, backend: HostBackend) -> int:
    """Pool bytes of the plan's replay graphs, measured over their whole capture."""
    blocks = plan.max_num_batched_tokens // BLOCK_SIZE
    runner = StepRunner(WIDE, plan, backend, num_blocks=blocks, max_blocks=blocks, block_size=BLOCK_SIZE)
    return sum(group.pool_bytes for group in capture_groups(runner))


@fault("D7", "every graph is played through a model of the allocator: the prediction is the pool's peak, to the byte")
def test_D7_32_sizes_are_predicted_by_the_peak_of_their_pool_and_not_extrapolated(monkeypatch) -> None:
    monkeypatch.setattr(pool_prediction, "allocation_order", lambda operation, args: None)
    plan = plan_of_sizes(tuple(range(32, 1025, 32)))
    memory = record_plan(WIDE, plan)
    growths = [growth for growth in memory.predict() if growth.arrangement is PoolSharing.SHARED]
    predicted = sum(growth.pool_bytes for growth in growths)
    assert predicted == captured_bytes(plan, HostBackend(1 << 30))
    by_two = sum(graph.peak_bytes for graph in memory.replay_graphs[:2])
    assert by_two / 2 * len(memory.replay_graphs) > 10 * predicted


@fault(
    "D8", "both groups are weighed in one span; with that many bytes the captures succeed, with one segment less not"
)
def test_D8_the_measured_bytes_are_enough_and_no_fewer_are() -> None:
    plan = plan_of_sizes((128, 512, 1024))
    needed = captured_bytes(plan, HostBackend(1 << 30))
    backend = HostBackend(1 << 30)
    backend.arena.allocator.capacity_bytes = needed
    assert captured_bytes(plan, backend) == needed == backend.reserved_bytes()
    backend = HostBackend(1 << 30)
    backend.arena.allocator.capacity_bytes = needed - 1
    with pytest.raises(OutOfMemoryError, match=f"of capacity_bytes={needed - 1} are reserved"):
        captured_bytes(plan, backend)


@fault("D9", "one list of graphs of each kind; pools are weighed apart, and the cache is emptied before both readings")
def test_D9_all_kinds_of_graphs_are_counted_and_no_warm_up_is() -> None:
    plan = make_plan(max_num_batched_tokens=256)
    groups = {}
    for shapes_only in (False, True):  # by shapes alone, warm-ups allocate plain memory too
        backend = HostBackend(1 << 30, shapes_only=shapes_only)
        sizes = {"num_blocks": 40, "max_blocks": 40, "block_size": BLOCK_SIZE}
        runner = backend.run_plain(StepRunner, TINY, plan, backend, **sizes)
        before = backend.reserved_bytes()
        groups[shapes_only] = capture_groups(runner)
        assert sum(group.pool_bytes for group in groups[shapes_only]) <= backend.reserved_bytes() - before
    model, replay = groups[False]
    assert model.num_graphs == len(plan.model_sizes) + len(plan.full_sizes)
    assert replay.num_graphs == len(plan.replay_sizes)
    every = [*runner.model_graphs.values(), *runner.full_graphs.values(), *runner.replay_graphs.graphs]
    assert sum(group.num_segments for group in groups[True]) == sum(len(graph.segments) for graph in every)
    assert [group.pool_bytes for group in groups[True]] == [group.pool_bytes for group in groups[False]]
    assert [group.plain_bytes for group in groups[True]] == [0, 0]


@fault("D11", "the spare block is part of the cache from the start; every eager fall-back is counted with its reason")
def test_D11_a_padded_batch_over_a_full_cache_takes_its_graph(backend) -> None:
    plan = make_plan(model_sizes=(16,), full_sizes=(4,), replay_sizes=(), max_num_seqs=4)
    runner = make_runner(backend, plan, num_blocks=3)
    serving, table = Serving(runner, free=[2, 1, 0]), DispatchTable()
    steps = [[prefill(name, 4) for name in "abc"], [decode(name) for name in "abc"]]
    for asked in steps:
        table.add(serving.step(asked).record)
    assert serving.free == []
    assert [row[:4] for row in table.model_rows()] == [(3, 4, 1, "FULL"), (12, 16, 4, "PIECEWISE")]
    assert not any("captured" in reason.value for reason in table.model_reasons)
    assert "| model    | uniform decode fits a full graph" in table.markdown()
