"""The replay graphs: captured as a step would set them up, dispatched to by padded size, reading static buffers."""

import gc

import pytest
import torch
from replay.fake_model import HIDDEN, REPLAY_ROWS, STREAMS, FakeModel, nothing_is_captured
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture import CaptureError, capture
from replay_sim.replay.context import get_forward_context, has_forward_context, use_forward_context
from replay_sim.replay.graphs import ReplayGraphs

PIECEWISE = CudagraphMode.PIECEWISE
SIZES, TOKENS, START = (8, 4, 2), 30, 5
# Kept rows and the padded size that they run at: exact, padded, padded more than needed, largest, smallest.
MIXES = [([3, 4, 9, 29], 4), ([0, 1, 2], 4), ([28, 29], 8), (list(range(1, 30, 4)), 8), ([17], 2), ([5, 6], 2)]


@pytest.fixture
def model(backend) -> FakeModel:
    return FakeModel(backend.device)


@pytest.fixture
def graphs(place, model) -> ReplayGraphs:
    """Graphs of every size over buffers of the largest, captured largest first."""
    captured = model.graphs(place, model.buffers())
    captured.capture(SIZES)
    model.break_rows.clear()
    model.layer_runs.clear()
    return captured


def run(graphs: ReplayGraphs, model: FakeModel, rows: list[int], padded: int, inputs: dict) -> tuple[Tensor, ...]:
    batch = model.replay_batch(rows, padded, PIECEWISE, START)
    with use_forward_context(batch.context):
        return graphs.run(batch.rows, inputs)


def assert_formula(outputs: tuple[Tensor, ...], model: FakeModel, rows: list[int], inputs: dict) -> None:
    hidden, pre = outputs
    assert hidden.shape == (len(rows), STREAMS, HIDDEN) and pre.shape == (len(rows), STREAMS)
    for place, row in enumerate(rows):
        expected = model.expected(inputs, row, START + place)
        assert (hidden[place].tolist(), pre[place].tolist()) == expected


def live_pool_bytes(place: dict) -> int:
    """Bytes of the pool's blocks that are not free."""
    if place["backend"].name == "host":
        return place["backend"].arena.allocator.allocated_bytes(place["pool"])
    handle = tuple(place["pool"].handle)
    snapshot = torch.cuda.memory_snapshot()
    return sum(segment["allocated_size"] for segment in snapshot if tuple(segment["segment_pool_id"]) == handle)


@pytest.mark.parametrize("order", [SIZES, SIZES[::-1], (4, 8, 2)])
def test_every_size_captured_in_any_order_is_dispatched_to(place, model, order: tuple[int, ...]) -> None:
    """G3, F1: a key that was captured is a key that is found."""
    graphs = model.graphs(place, model.buffers())
    assert graphs.sizes == ()
    graphs.capture(order)
    assert graphs.sizes == (2, 4, 8) and len(graphs.graphs) == 3 and graphs.failed == {}
    for size in graphs.sizes:
        model.break_rows.clear()
        inputs = model.inputs(TOKENS, size)
        rows = list(range(size))
        assert_formula(run(graphs, model, rows, size, inputs), model, rows, inputs)
        assert model.break_rows == [size]


def test_garbage_is_collected_once_for_all_sizes_and_the_collector_is_off_between_them(
    place, model, monkeypatch
) -> None:
    """C9: a collection walks all that the process made, so one a size would be most of a capture's time."""
    collected, enabled, collect = [], [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda *rest: (collected.append(rest), collect(*rest))[1])

    def sizes():
        for size in SIZES:
            enabled.append(gc.isenabled())
            yield size

    assert gc.isenabled()
    model.graphs(place, model.buffers()).capture(sizes())
    assert len(collected) == 1 and enabled == [False] * len(SIZES) and gc.isenabled()


def test_the_kept_rows_come_back_whatever_the_order_of_sizes(graphs, model, backend) -> None:
    """G2, G5, U2: each of the mixes after each other, in one set of buffers, and no capture while serving (G4)."""
    with nothing_is_captured(backend):
        for first in range(len(MIXES)):
            for second in range(len(MIXES)):
                for seed, (rows, padded) in enumerate((MIXES[first], MIXES[second])):
                    inputs = model.inputs(TOKENS, seed)
                    assert_formula(run(graphs, model, rows, padded, inputs), model, rows, inputs)
    assert model.layer_runs == []


def test_the_graph_of_the_contexts_padded_size_runs(graphs, model) -> None:
    """G2: two rows run in the graph of 8 if the context says 8."""
    run(graphs, model, [1, 2], 8, model.inputs(TOKENS))
    run(graphs, model, [1, 2], 2, model.inputs(TOKENS))
    assert model.break_rows == [8, 2]


def test_a_run_gathers_into_the_static_buffers_and_clears_the_pads(graphs, model) -> None:
    """G2, B2."""
    for buffer in graphs.buffers.tensors.values():
        buffer.fill_(7)
    inputs = model.inputs(TOKENS)
    run(graphs, model, [4, 20, 29], 4, inputs)
    for name, buffer in graphs.buffers.tensors.items():
        assert torch.equal(buffer[:3], inputs[name][[4, 20, 29]])
        assert not bool(buffer[3:4].any()) and bool((buffer[4:] == 7).all())


def test_a_batch_after_one_with_nan_and_infinities_equals_eager_in_an_operation_across_rows(place, model) -> None:
    """U2, B5: batch A has them in a row that is a pad of batch B; a maximum over all rows would see them."""

    def across_rows(inputs) -> tuple[Tensor, ...]:
        return inputs["residual"] + inputs["residual"].amax(0), inputs["pre_mix"] + inputs["pre_mix"].sum(0)

    buffers = model.buffers()
    graphs = model.graphs(place, buffers, across_rows)
    graphs.capture([8])
    first, second = model.inputs(TOKENS, 1), model.inputs(TOKENS, 2)
    for row, poison in ((5, torch.nan), (6, torch.inf), (7, 1e30)):
        first["residual"][row] = first["pre_mix"][row] = poison
    run(graphs, model, list(range(8)), 8, first)
    replayed = run(graphs, model, [2, 3, 4], 8, second)
    padded = {name: torch.cat((value[[2, 3, 4]], torch.zeros_like(value[:5]))) for name, value in second.items()}
    for actual, expected in zip(replayed, across_rows(padded), strict=True):
        assert bool(actual.isfinite().all()) and torch.equal(actual, expected[:3])


def test_each_size_is_captured_on_the_batch_that_prepare_sets_up(place, model) -> None:
    """G1, G3 of the faults: with its rows, under its context, over the first rows of the static buffers."""
    prepared, seen, buffers = {}, [], model.buffers()

    def prepare(size: int):
        assert not has_forward_context()
        prepared[size] = model.prepare(size)
        return prepared[size]

    def run_layers(inputs):
        seen.append((get_forward_context(), {name: value.data_ptr() for name, value in inputs.items()}))
        return model.run_layers(inputs)

    model.graphs(place, buffers, run_layers, prepare).capture(SIZES)
    assert tuple(prepared) == SIZES
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.tensors.items()}
    assert all(pointers == addresses for _, pointers in seen)
    for size in SIZES:
        runs = [context for context, _ in seen if context is prepared[size].context]
        assert len(runs) >= 2, "a warm-up, then the capture"


def test_a_graph_that_was_not_captured_is_an_error_that_names_those_that_were(graphs, model) -> None:
    """G3: dispatch checks what exists, A7."""
    with pytest.raises(RuntimeError, match=r"no replay graph of 6 rows was captured, only \[2, 4, 8\]"):
        run(graphs, model, [1, 2, 3], 6, model.inputs(TOKENS))


@pytest.mark.parametrize("mode", [CudagraphMode.NONE, CudagraphMode.FULL])
def test_a_batch_that_was_dispatched_to_no_graph_runs_in_none(graphs, model, mode) -> None:
    """G3: an eager batch of just as many rows as a graph has does not take it."""
    batch = model.replay_batch([1, 2], 2, mode)
    with use_forward_context(batch.context), pytest.raises(RuntimeError, match="dispatch decides"):
        graphs.run(batch.rows, model.inputs(TOKENS))


def test_more_rows_than_the_graph_holds_are_refused(graphs, model) -> None:
    """G3."""
    batch = model.replay_batch([1, 2], 2, PIECEWISE)
    rows = torch.tensor([1, 2, 3], device=model.device)
    with use_forward_context(batch.context), pytest.raises(ValueError, match="3 rows .* of 2 rows"):
        graphs.run(rows, model.inputs(TOKENS))


def test_inputs_that_break_the_contract_are_refused_before_anything_is_written_or_run(graphs, model) -> None:
    """B3."""
    inputs = model.inputs(TOKENS)
    for buffer in graphs.buffers.tensors.values():
        buffer.fill_(7)
    with pytest.raises(ValueError, match="residual is torch.float64"):
        run(graphs, model, [1, 2], 2, inputs | {"residual": inputs["residual"].double()})
    assert model.break_rows == []
    assert all(bool((buffer == 7).all()) for buffer in graphs.buffers.tensors.values())


def test_rows_as_int32_are_refused(graphs, model) -> None:
    """G8."""
    batch = model.replay_batch([1, 2], 2, PIECEWISE)
    with use_forward_context(batch.context), pytest.raises(ValueError, match="rows must be int64"):
        graphs.run(batch.rows.int(), model.inputs(TOKENS))


def test_a_moved_buffer_is_an_error_at_replay(graphs, model) -> None:
    """B4, U6: always checked, not only when debugging."""
    graphs.buffers.tensors["positions"] = graphs.buffers.tensors["positions"].clone()
    with pytest.raises(RuntimeError, match="static buffer positions moved"):
        run(graphs, model, [1, 2], 2, model.inputs(TOKENS))
    assert model.break_rows == []


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_size_whose_capture_fails_is_marked_and_the_others_serve(place, model, kind) -> None:
    """U5, G3, C7: an operation raises at 4; 8 stays, 4 and 2 cannot be dispatched to, and their memory is back."""
    broken = [4]

    def run_layers(inputs):
        outputs = model.run_layers(inputs)
        if len(outputs[0]) in broken and len(model.break_rows) > 3:  # not in the warm-up, in the middle of the capture
            raise kind("no such kernel")
        return outputs

    graphs = model.graphs(place, model.buffers(), run_layers)
    graphs.capture([8])
    model.break_rows.extend([0] * 4)
    before = live_pool_bytes(place)
    with pytest.raises(kind, match="no such kernel"):
        graphs.capture([4, 2])
    assert graphs.sizes == (8,) and graphs.failed == {4: f"{kind.__name__}: no such kernel"}
    assert live_pool_bytes(place) == before
    assert not has_forward_context()
    inputs = model.inputs(TOKENS)
    assert_formula(run(graphs, model, [1, 2], 8, inputs), model, [1, 2], inputs)
    with pytest.raises(RuntimeError, match=r"of 4 rows was captured, only \[8\]"):
        run(graphs, model, [1, 2], 4, inputs)

    broken.clear()
    graphs.capture([4, 2])
    assert graphs.sizes == (2, 4, 8) and graphs.failed == {}
    assert_formula(run(graphs, model, [1, 2], 4, inputs), model, [1, 2], inputs)


def test_a_break_that_fails_in_the_capture_leaves_the_next_capture_working(place, model) -> None:
    """E2, C7."""
    raising, real = [True], model.break_rows

    class Rows(list):
        def append(self, rows: int) -> None:
            if raising:
                raise ZeroDivisionError("in the break")

    model.break_rows = Rows()
    graphs = model.graphs(place, model.buffers())
    with pytest.raises(ZeroDivisionError, match="in the break"):
        graphs.capture(SIZES)
    assert graphs.sizes == () and list(graphs.failed) == [8]
    raising.clear()
    model.break_rows = real
    graphs.capture(SIZES)
    assert graphs.sizes == (2, 4, 8)


def test_prepare_that_fails_marks_its_size(place, model) -> None:
    """G1, G3."""

    def prepare(size: int):
        raise ValueError(f"no blocks for {size} rows")

    graphs = model.graphs(place, model.buffers(), prepare=prepare)
    with pytest.raises(ValueError, match="no blocks for 8 rows"):
        graphs.capture(SIZES)
    assert graphs.sizes == () and graphs.failed == {8: "ValueError: no blocks for 8 rows"}


def test_capturing_while_a_step_runs_is_refused(place, model) -> None:
    """G4."""
    graphs = model.graphs(place, model.buffers())
    with use_forward_context(model.prepare(2).context), nothing_is_captured(place["backend"]):
        with pytest.raises(CaptureError, match="while a step runs"):
            graphs.capture(SIZES)
    assert graphs.sizes == () and model.layer_runs == []


def test_capturing_inside_another_capture_is_refused(place, model) -> None:
    """E5, C6: not while a model graph is being captured; after that it works."""
    graphs = model.graphs(place, model.buffers())
    value = torch.ones(3, device=model.device)

    def model_graph() -> Tensor:
        doubled = value * 2
        graphs.capture([4])
        return doubled

    with pytest.raises(CaptureError, match="another capture"):
        capture(model_graph, **place)
    assert graphs.sizes == ()
    graphs.capture([4])
    assert graphs.sizes == (4,)


def test_no_replay_batch_is_set_after_the_capture(graphs) -> None:
    """G4."""
    assert not has_forward_context()


def test_a_size_beyond_the_static_buffers_is_refused(place, model) -> None:
    """L4, U4."""
    graphs = model.graphs(place, model.buffers())
    with pytest.raises(ValueError, match=f"9 rows .* of {REPLAY_ROWS} rows"):
        graphs.capture([REPLAY_ROWS + 1])
    assert graphs.sizes == () and model.layer_runs == []


def test_smaller_sizes_captured_after_the_largest_take_no_more_memory(backend, model) -> None:
    """C8, D5: outputs are held weakly, so that sizes 8, 4 and 2 take what 8 takes."""
    megabyte_a_row = 1 << 18

    def run_layers(inputs) -> tuple[Tensor, ...]:
        return (inputs["hidden_states"][:, :1].repeat(1, megabyte_a_row) + 1,)

    reserved = []
    for sizes in ([8], SIZES):
        place = {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}
        model.graphs(place, model.buffers(), run_layers).capture(sizes)
        assert live_pool_bytes(place) == 0
        reserved.append(backend.reserved_bytes(place["pool"]))
    assert reserved[0] == reserved[1] >= 8 << 20


def test_outputs_are_views_of_the_graphs_own_memory(graphs, model) -> None:
    """G2, D1 of the faults: read before the next graph of the pool runs, so nothing is copied."""
    inputs = model.inputs(TOKENS)
    first = run(graphs, model, [1, 2, 3], 4, inputs)
    second = run(graphs, model, [4], 4, inputs)
    assert [output.data_ptr() for output in first] == [output.data_ptr() for output in second]
