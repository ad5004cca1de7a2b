"""The replay layers in a step: whole batch or replay batch, eager or in graphs, inside a model graph or not."""

import pytest
import torch
from replay.fake_model import HIDDEN, KEY, MODEL_ROWS, WINDOW, FakeModel, nothing_is_captured
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.capture import capture, warm_up
from replay_sim.replay.context import ForwardContext, use_forward_context
from replay_sim.replay.layers import ReplayLayers

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
THRESHOLD = 12
# Ten tokens of a prompt and a decode of two, padded to a model graph of 16; the last three and the two are kept.
TOKENS, PADDED, KEPT = 12, 16, [7, 8, 9, 10, 11]
REPLAY_PADDED = 8
START = 20


@pytest.fixture
def model(backend) -> FakeModel:
    return FakeModel(backend.device)


def step_context(model: FakeModel, mode: CudagraphMode, replay_mode: CudagraphMode | None, kept=KEPT) -> ForwardContext:
    """The step's context; `replay_mode` None is a step without a replay batch."""
    padded = TOKENS if mode is NONE else PADDED
    if replay_mode is None:
        return model.context(TOKENS, padded, mode)
    padded_rows = len(kept) if replay_mode is NONE else REPLAY_PADDED
    return model.context(TOKENS, padded, mode, replay_batch=model.replay_batch(kept, padded_rows, replay_mode, START))


def assert_rows(model: FakeModel, outputs: tuple[Tensor, ...], inputs: dict, starts: dict[int, int]) -> None:
    """Row by row: row r is the formula with window start starts[r], a row that is not there is zero."""
    for row in range(TOKENS):
        hidden, pre = (output[row].tolist() for output in outputs)
        if row in starts:
            assert (hidden, pre) == model.expected(inputs, row, starts[row]), row
        else:
            assert not any(map(any, hidden)) and not any(pre), row


WHOLE = {row: row for row in range(TOKENS)}
REPLAYED = {row: START + place for place, row in enumerate(KEPT)}


@pytest.mark.parametrize(
    ("mode", "replay_mode", "threshold", "padded", "uses"),
    [
        (NONE, None, THRESHOLD, TOKENS, False),
        (NONE, NONE, THRESHOLD, TOKENS, True),
        (NONE, NONE, None, TOKENS, True),
        (PIECEWISE, NONE, PADDED, PADDED, True),
        (PIECEWISE, None, PADDED, PADDED, True),
        (PIECEWISE, NONE, PADDED + 1, PADDED, False),
        (PIECEWISE, NONE, None, PADDED, False),
        (FULL, NONE, THRESHOLD, PADDED, False),
        (FULL, None, THRESHOLD, PADDED, False),
    ],
)
def test_a_forward_uses_the_replay_batch_by_mode_and_padded_size(
    model, mode, replay_mode, threshold, padded, uses: bool
) -> None:
    """L2, L7, D2: PIECEWISE by its padded size alone, at the threshold too; FULL never; eager if there is one."""
    batch = None if replay_mode is None else model.replay_batch(KEPT, len(KEPT), replay_mode)
    context = model.context(TOKENS, padded, mode, replay_batch=batch)
    assert model.layers(threshold).uses_replay_batch(context) is uses


def test_a_spec_names_the_window_the_layers_and_the_metadata_that_they_read(model) -> None:
    """L1."""
    spec = model.layers(THRESHOLD).spec
    assert (spec.window, spec.metadata_keys, spec.first_window_key) == (WINDOW, (KEY,), KEY)


@pytest.mark.parametrize(
    ("mode", "replay_mode", "threshold"), [(NONE, None, THRESHOLD), (FULL, NONE, THRESHOLD), (PIECEWISE, NONE, 17)]
)
def test_without_a_replay_batch_the_layers_run_on_the_whole_batch(model, mode, replay_mode, threshold) -> None:
    """L5, L7."""
    context = step_context(model, mode, replay_mode)
    inputs = model.inputs(context.padded_tokens)
    with use_forward_context(context):
        outputs = model.layers(threshold)(inputs)
    assert_rows(model, outputs, inputs, WHOLE)
    assert model.kv_writes == [] and model.break_rows == [context.padded_tokens]


def test_an_eager_step_runs_them_on_the_kept_rows_under_the_replay_batchs_context(model) -> None:
    """L3, L5, L6: every row's KV first, then five rows; the seven trimmed rows are zero."""
    context, inputs = step_context(model, NONE, NONE), model.inputs(TOKENS)
    with use_forward_context(context):
        outputs = model.layers(THRESHOLD)(inputs)
    assert [output.shape[0] for output in outputs] == [TOKENS, TOKENS]
    assert_rows(model, outputs, inputs, REPLAYED)
    assert model.kv_writes == [TOKENS] and model.break_rows == [len(KEPT)]


def test_an_eager_replay_batch_without_rows_runs_its_layers_on_a_pad_and_returns_zeros(model) -> None:
    """X2, L6: the layers run, as their collectives must meet those of other ranks, and no row comes of it."""
    batch = model.replay_batch([], 1, NONE, START)
    context = model.context(TOKENS, TOKENS, NONE, replay_batch=batch)
    with use_forward_context(context):
        outputs = model.layers(THRESHOLD)(model.inputs(TOKENS))
    assert [output.shape[0] for output in outputs] == [TOKENS, TOKENS]
    assert not any(bool(output.any()) for output in outputs)
    assert model.break_rows == [1] and model.kv_writes == [TOKENS]


def test_an_absent_input_stays_absent_for_eager_layers(model) -> None:
    """L5."""
    inputs = model.inputs(TOKENS) | {"input_ids": None}
    with use_forward_context(step_context(model, NONE, NONE)):
        model.layers(THRESHOLD)(inputs)
    (seen,) = model.layer_runs
    assert seen == {name: None if name == "input_ids" else len(KEPT) for name in inputs}


def with_replay_graphs(model: FakeModel, place: dict) -> ReplayLayers:
    layers = model.layers(THRESHOLD)
    layers.graphs = model.graphs(place, layers.inputs)
    layers.graphs.capture([REPLAY_PADDED])
    model.break_rows.clear()
    model.layer_runs.clear()
    return layers


def test_an_eager_step_takes_the_replay_graph_that_its_replay_batch_was_given(place, model) -> None:
    """L5, D3, G2: the graph runs 8 rows, no Python of the layers but the break's."""
    layers = with_replay_graphs(model, place)
    context, inputs = step_context(model, NONE, PIECEWISE), model.inputs(TOKENS)
    with use_forward_context(context), nothing_is_captured(place["backend"]):
        outputs = layers(inputs)
    assert_rows(model, outputs, inputs, REPLAYED)
    assert model.break_rows == [REPLAY_PADDED] and model.layer_runs == []


def capture_model_graph(model: FakeModel, layers: ReplayLayers, place: dict, inputs: dict, context: ForwardContext):
    """A model graph: one operation before the replay layers, one after, over the same addresses."""
    outputs = {}

    def forward():
        moved = inputs | {"hidden_states": inputs["hidden_states"] + 1}
        hidden, pre = layers(moved)
        outputs["streams"] = hidden
        return hidden * 2, pre

    with place["backend"].on_stream(place["stream"]), use_forward_context(context):
        warm_up(forward, place["backend"])
        model.kv_writes.clear()
        return capture(forward, **place), outputs["streams"]


def shifted(inputs: dict) -> dict:
    return inputs | {"hidden_states": inputs["hidden_states"] + 1}


@pytest.mark.parametrize("replay_mode", [NONE, PIECEWISE])
def test_a_model_graph_at_the_threshold_breaks_once_for_the_replay_layers(place, model, replay_mode) -> None:
    """L2, L4, L5, D3: what the break runs is this step's, eager or in a replay graph, and the next segment reads it."""
    layers = with_replay_graphs(model, place)
    inputs = model.inputs(PADDED)
    all_kept = list(range(TOKENS))
    context = step_context(model, PIECEWISE, NONE, kept=all_kept)
    graph, streams = capture_model_graph(model, layers, place, inputs, context)
    assert graph.num_breaks == 1 and len(graph.segments) == 2
    assert streams.data_ptr() == layers.break_buffers.tensors["hidden_states"].data_ptr()
    for seed, kept in enumerate([KEPT, [11], [0, 11], KEPT[1:]]):
        for name, value in model.inputs(PADDED, seed).items():
            inputs[name].copy_(value)
        with (
            use_forward_context(step_context(model, PIECEWISE, replay_mode, kept)),
            nothing_is_captured(place["backend"]),
        ):
            doubled, pre = graph.replay()
        starts = {row: START + place for place, row in enumerate(kept)}
        assert_rows(model, (doubled / 2, pre), shifted(inputs), starts)


def test_the_kv_of_every_row_is_written_outside_the_break_so_that_the_graph_captures_it(place, model) -> None:
    """L3: the write is an operation of the first segment."""
    latents, inputs = torch.zeros(PADDED, HIDDEN, device=model.device), model.inputs(PADDED)
    model.write_batch_kv = lambda values: latents.copy_(values["hidden_states"] * 5)
    layers = model.layers(THRESHOLD)
    graph, _ = capture_model_graph(model, layers, place, inputs, step_context(model, PIECEWISE, NONE, kept=[0]))
    inputs["hidden_states"].copy_(model.inputs(PADDED, seed=4)["hidden_states"])
    graph.entries[0].replay()
    assert torch.equal(latents, (inputs["hidden_states"] + 1) * 5)


def test_the_kv_is_written_before_the_replay_layers_run(model) -> None:
    """L3."""
    order = []
    run_layers = model.run_layers
    model.write_batch_kv = lambda _: order.append("kv of every row")
    model.run_layers = lambda inputs: (order.append("replay layers"), run_layers(inputs))[1]
    with use_forward_context(step_context(model, NONE, NONE)):
        model.layers(THRESHOLD)(model.inputs(TOKENS))
    assert order == ["kv of every row", "replay layers"]


def test_a_model_graph_below_the_threshold_holds_the_layers_on_the_whole_batch(place, model) -> None:
    """L7, U11: the same step in a graph of 16 below a threshold of 17 trims nothing, and says so by its one break."""
    layers = model.layers(PADDED + 1)
    inputs, context = model.inputs(PADDED), step_context(model, PIECEWISE, NONE)
    graph, _ = capture_model_graph(model, layers, place, inputs, context)
    with use_forward_context(context):
        doubled, pre = graph.replay()
    assert_rows(model, (doubled / 2, pre), shifted(inputs), WHOLE)
    assert model.kv_writes == [] and graph.num_breaks == 1
    assert model.break_rows[-1] == PADDED


@pytest.mark.parametrize("sizes", [[4, 16], [16, 4]])
def test_break_buffers_are_long_enough_in_any_order_of_calls(place, model, sizes: list[int]) -> None:
    """L4, U4: sized by the plan and not by the first call."""
    layers = model.layers(1)
    for size in sizes:
        inputs = model.inputs(size)
        rows = list(range(size))
        context = model.context(size, size, PIECEWISE, replay_batch=model.replay_batch(rows, size, NONE, START))
        with use_forward_context(context):
            hidden, pre = layers(inputs)
        assert hidden.data_ptr() == layers.break_buffers.tensors["hidden_states"].data_ptr()
        for row in rows:
            assert (hidden[row].tolist(), pre[row].tolist()) == model.expected(inputs, row, START + row)


def test_a_model_graph_longer_than_the_break_buffers_is_refused(model) -> None:
    """L4, U4."""
    size = MODEL_ROWS + 1
    context = model.context(size, size, PIECEWISE, replay_batch=model.replay_batch([0], 1, NONE))
    with use_forward_context(context), pytest.raises(ValueError, match=f"17 rows .* of {MODEL_ROWS} rows"):
        model.layers(THRESHOLD)(model.inputs(size))


def test_a_graph_that_breaks_out_without_a_replay_batch_is_an_error(model) -> None:
    """S5: at or above the threshold a PIECEWISE step always has one."""
    with (
        use_forward_context(step_context(model, PIECEWISE, None)),
        pytest.raises(RuntimeError, match=f"no replay batch.*trim_threshold {THRESHOLD}"),
    ):
        model.layers(THRESHOLD)(model.inputs(PADDED))


def test_a_replay_batch_that_asks_for_a_graph_where_none_was_captured_is_an_error(model) -> None:
    """G3: dispatch decides by what was captured."""
    with (
        use_forward_context(step_context(model, NONE, PIECEWISE)),
        pytest.raises(RuntimeError, match="none was captured"),
    ):
        model.layers(THRESHOLD)(model.inputs(TOKENS))


@pytest.mark.parametrize("mode", [NONE, PIECEWISE])
def test_a_deferred_hidden_state_is_refused_where_a_replay_batch_is_used(model, mode) -> None:
    """L8: before any KV is written."""
    context = step_context(model, mode, NONE)
    inputs = model.inputs(context.padded_tokens) | {"hidden_states": lambda: None}
    with use_forward_context(context), pytest.raises(ValueError, match="hidden_states is a deferred"):
        model.layers(THRESHOLD)(inputs)
    assert model.kv_writes == [] and model.layer_runs == []


def test_an_input_whose_rows_no_kernel_can_read_is_refused_in_a_graph_that_breaks(model) -> None:
    """L8, B3: before any KV is written; graphs of either form may gather it from its address."""
    context = step_context(model, PIECEWISE, NONE)
    inputs = model.inputs(context.padded_tokens)
    inputs["residual"] = inputs["residual"].transpose(1, 2).contiguous().transpose(1, 2)
    with use_forward_context(context), pytest.raises(ValueError, match="residual has strides"):
        model.layers(THRESHOLD)(inputs)
    assert model.kv_writes == [] and model.layer_runs == []


@pytest.mark.parametrize("mode", [NONE, PIECEWISE])
def test_a_row_index_of_int32_is_refused_in_a_step(model, mode) -> None:
    """G8: on the eager path too, not only where a graph is replayed."""
    context = step_context(model, mode, NONE)
    object.__setattr__(context.replay_batch, "rows", context.replay_batch.rows.int())
    with use_forward_context(context), pytest.raises(ValueError, match="rows must be int64"):
        model.layers(THRESHOLD)(model.inputs(context.padded_tokens))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_and_eager_give_the_same_bits_in_every_dtype_of_the_contract(place, dtype, ids) -> None:
    """G5, U14."""
    model = FakeModel(place["backend"].device, dtype, ids)
    layers, inputs = with_replay_graphs(model, place), model.inputs(TOKENS)
    outputs = []
    for replay_mode in (NONE, PIECEWISE):
        with use_forward_context(step_context(model, NONE, replay_mode)):
            outputs.append(layers(inputs))
    for eager, replayed in zip(*outputs, strict=True):
        assert eager.dtype == replayed.dtype and torch.equal(eager, replayed)
