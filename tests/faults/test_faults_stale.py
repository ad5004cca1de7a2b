"""Known faults of stale buffers and values that a capture bakes in."""

import numpy as np
import pytest
import torch
from decoder.serving import BLOCK_SIZE, MAX_BLOCKS, Serving, decode, make_plan, make_runner, prefill
from faults.helpers import SMOOTH, TOLERANCE, outputs_of, place_of, run_beside_eager
from faults.table import fault
from replay.fake_model import FakeModel
from torch.utils._python_dispatch import TorchDispatchMode

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.metadata import BatchMetadataBuffers
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import CaptureError, capture, eager_break, warm_up
from replay_sim.capture.checker import Checker
from replay_sim.capture.host import HostBackend
from replay_sim.replay.context import use_forward_context

PIECEWISE = CudagraphMode.PIECEWISE


@eager_break
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@eager_break
def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@fault("C1", "an error at capture: a break writes into a tensor that it was given")
def test_C1_a_break_that_returns_a_fresh_tensor_is_an_error_at_capture(place, backend) -> None:
    x = torch.ones(8, 4, device=backend.device)
    with pytest.raises(CaptureError, match="doubled returned a new tensor of shape .*Write into a tensor passed as"):
        capture(lambda: doubled(x + 1) + 1, **place)
    out = torch.empty_like(x)

    def function() -> torch.Tensor:
        double_into(x + 1, out)
        return out + 1

    graph = capture(function, **place)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert torch.equal(graph.replay(), (x + 1) * 2 + 1)


def top_k_groups(place: dict, x: torch.Tensor, out: torch.Tensor | None) -> tuple:
    """Two groups of graphs in one pool: the first returns the best 4 of a row, in `out` if there is one."""

    def first() -> torch.Tensor:
        best = x.topk(4).values
        return best if out is None else out.copy_(best)

    return capture(first, name="top k", **place), capture(lambda: (x + 1).relu(), name="other", **place)


@fault("C2", "replay outputs land in buffers made from the plan before any capture; the checker names a stale read")
def test_C2_a_top_k_output_in_a_persistent_buffer_outlives_the_other_group(place, backend) -> None:
    x = torch.randn(17, 8, generator=torch.Generator().manual_seed(0)).to(backend.device)
    with backend.on_stream(place["stream"]):
        warm_up(lambda: x.topk(4).values, backend)
    first, second = top_k_groups(place, x, torch.empty(17, 4, device=backend.device))
    best = first.replay()
    second.replay()
    assert torch.equal(best, x.topk(4).values)


@fault("C2")
def test_C2_a_top_k_output_in_the_shared_pool_is_named_by_the_checker() -> None:
    backend = HostBackend(1 << 28)
    checker = Checker(backend)
    x = torch.randn(17, 8)
    first, second = top_k_groups(place_of(backend), x, None)
    best = checker.replay(first)
    checker.replay(second)
    with checker.watching():
        best.sum()
    assert "copy the tensor before other runs" in str(checker.findings[0])


@fault("C2")
def test_C2_a_steps_outputs_lie_in_the_break_buffers(backend) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,)))
    output = Serving(runner).step([prefill("p", 40)])
    buffers = runner.replay_layers.break_buffers
    assert buffers.max_rows == 64 and runner.plan.breaking_sizes == (64,)
    assert output.hidden_states.data_ptr() == buffers.tensors["hidden_states"].data_ptr()
    assert output.pre_mix.data_ptr() == buffers.tensors["pre_mix"].data_ptr()


@fault("C5", "positions, slots and window starts are device buffers that every step writes; no host number is captured")
def test_C5_three_chunks_of_one_size_equal_eager_chunks(backend) -> None:
    plan = make_plan(model_sizes=(32,), full_sizes=(), replay_sizes=(8,), trim_threshold=9)
    records = run_beside_eager(backend, plan, [[prefill("p", 24)], [prefill("p", 24)], [prefill("p", 24)]])
    assert {(record.padded_tokens, record.mode, record.padded_rows) for record in records} == {(32, PIECEWISE, 8)}


class Operations(TorchDispatchMode):
    """The names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@fault("C6", "metadata is written before the layers run, at every step; the layers make nothing on a first call")
def test_C6_a_first_run_of_the_layers_does_the_same_operations_as_every_later_one(backend) -> None:
    """What a warm-up would make and a capture reuse shows as an operation of the first run alone."""
    runner = make_runner(backend, captured=False)
    arguments = Serving(runner).arguments([prefill("p", 40), decode("d")])
    runs = []
    for _ in range(3):
        with Operations() as operations:
            runner.step(*arguments)
        runs.append(operations.names)
    assert len(runs[0]) > 100 and runs[0] == runs[1] == runs[2]


@fault("C6")
def test_C6_each_capture_is_set_up_afresh_and_reads_what_was_written_before_its_warm_up(place, backend) -> None:
    model, prepared = FakeModel(backend.device), []

    def prepare(size: int):
        prepared.append(model.prepare(size))
        return prepared[-1]

    model.graphs(place, model.buffers(), prepare=prepare).capture([8, 4])
    assert [batch.context.padded_tokens for batch in prepared] == [8, 4]


@fault(
    "C7", "a table that is too wide or too narrow is refused by name; rows and tails of the batch before are cleared"
)
def test_C7_a_table_of_17_blocks_is_refused_and_none_of_16_survives_its_step(backend) -> None:
    buffers = BatchMetadataBuffers(
        max_rows=16, max_num_seqs=4, max_blocks=16, block_size=4, window=8, device=backend.device
    )

    def write(*blocks: int) -> None:
        batch = Batch(Request(1, 4 * count - 1, Phase.DECODE) for count in blocks)
        tables = [np.arange(100, 100 + count, dtype=np.int32) for count in blocks]
        buffers.write(batch, tables, np.zeros(len(blocks), np.int32), len(blocks))

    with pytest.raises(
        ValueError, match="request 1 has 17 blocks: .* at most 16 fit: raise max_blocks, or limit max_mod"
    ):
        write(16, 17)
    assert not bool(buffers.block_table.any())
    write(16, 16, 16)
    write(2)
    assert buffers.block_table.tolist() == [[100, 101] + [0] * 14] + [[0] * 16] * 3


@fault("C7")
def test_C7_a_request_of_one_block_too_many_is_refused_in_a_step(backend) -> None:
    runner = make_runner(backend, make_plan(max_num_batched_tokens=400), captured=False)
    with pytest.raises(ValueError, match=f"has {MAX_BLOCKS + 1} blocks: .* at most {MAX_BLOCKS} fit"):
        Serving(runner).step([prefill("p", 8 * MAX_BLOCKS + 1)])
    assert Serving(runner).step([prefill("q", 9)]).record.num_tokens == 9


@fault("C7")
def test_C7_graphs_read_no_table_of_a_step_before_nor_of_one_that_was_refused(backend, form) -> None:
    """The widest table, one block too many, then narrow ones; in graphs as in the same steps eagerly."""
    plan = make_plan(model_sizes=(64, 320), full_sizes=(), replay_sizes=(32,))
    sides = [
        Serving(make_runner(backend, plan, SMOOTH, captured=captured, replay_form=form)) for captured in (True, False)
    ]
    widest, one_too_many = prefill("p", BLOCK_SIZE * MAX_BLOCKS), [prefill("o", 9), prefill("p", 1)]
    narrow = [[prefill("q", 40)], [prefill("q", 30), prefill("r", 9)]]
    for serving in sides:
        serving.step([widest])
        with pytest.raises(ValueError, match=f"request 1 has {MAX_BLOCKS + 1} blocks"):
            serving.step(one_too_many)
    for asked in narrow:
        one, other = (serving.step(asked) for serving in sides)
        assert (one.record.mode, one.record.replay_mode) == (PIECEWISE, PIECEWISE)
        for actual, expected in zip(outputs_of(one), outputs_of(other), strict=True):
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
        table = sides[0].runner.contexts.batch.block_table
        widths = [len(sides[0].tables[ask.name]) for ask in asked] + [0] * (len(table) - len(asked))
        assert not any(bool(row[width:].any()) for row, width in zip(table, widths, strict=True))


@fault("C9", "a break reads the live forward context, and the error says so where there is none")
def test_C9_a_break_reads_the_batch_of_its_replay(place, backend) -> None:
    model = FakeModel(backend.device)
    graphs = model.graphs(place, model.buffers())
    graphs.capture([4])
    inputs = model.inputs(10)
    for start in (0, 7, 3):
        batch = model.replay_batch([2, 5, 9], 4, PIECEWISE, start)
        with use_forward_context(batch.context):
            hidden, _ = graphs.run(batch.rows, inputs)
        assert [row.tolist() for row in hidden] == [
            model.expected(inputs, row, start + i)[0] for i, row in enumerate([2, 5, 9])
        ]
    with pytest.raises(RuntimeError, match="no forward context is set: run layers inside"):
        graphs.graphs[0].replay()
