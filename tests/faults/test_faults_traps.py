"""Known traps of the design: streams, pads, first calls, partly failed captures, guesses, and dtypes."""

import attrs
import pytest
import torch
from decoder.serving import Serving, decode, make_plan, make_runner, prefill
from faults.helpers import SMOOTH, live_pool_bytes, place_of
from faults.table import fault
from replay.fake_model import FakeModel

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, ModelReason, ReplayReason, dispatch_step
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.batch.rows import select_rows
from replay_sim.capture import capture
from replay_sim.capture.eager_break import current_recorder
from replay_sim.config import ServingConfig
from replay_sim.decoder.step import StepRunner
from replay_sim.measure.run_steps import capture_groups
from replay_sim.plan import make_plan as plan_of
from replay_sim.replay.context import use_forward_context
from replay_sim.replay.movement import gather_into, scatter_into
from replay_sim.replay.sharing import PoolSharing

NONE, PIECEWISE = CudagraphMode.NONE, CudagraphMode.PIECEWISE
WIDTH = 1024


@fault("U1", "the runner makes one stream for model and replay graphs; the arrangement is reported with bytes by group")
def test_U1_two_groups_of_graphs_share_memory_on_one_stream_and_none_on_two(backend) -> None:
    x = torch.ones(1024, WIDTH, device=backend.device)
    reserved = {}
    for streams in ("one", "two"):
        place = place_of(backend)
        places = [place, place if streams == "one" else place_of(backend, pool=place["pool"])]
        kept = [
            capture(lambda rows=rows: (x[:rows] * 2).tanh().sum(0), **where)
            for where in places
            for rows in range(1024, 0, -128)
        ]
        assert len(kept) == 16
        reserved[streams] = backend.reserved_bytes(place["pool"])
    assert reserved["two"] == 2 * reserved["one"]


@fault("U1")
@pytest.mark.parametrize("sharing", [PoolSharing.SHARED, PoolSharing.OWN_STREAM])
def test_U1_a_runners_replay_graphs_add_no_bytes_on_the_model_graphs_stream(backend, sharing) -> None:
    plan = make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(32,))
    runner = make_runner(backend, plan, captured=False, sharing=sharing)
    model, replay = capture_groups(runner)
    assert runner.sharing.sharing is sharing
    assert model.pool_bytes > 0 and (replay.pool_bytes == 0) == (sharing is PoolSharing.SHARED)


@fault("U2", "every gather clears the pads of the size that runs")
def test_U2_a_batch_of_130_rows_after_one_of_256_with_infinities_equals_eager_across_rows(place, backend) -> None:
    model = FakeModel(backend.device)

    def across_rows(inputs) -> tuple[torch.Tensor, ...]:
        return inputs["residual"] + inputs["residual"].amax(0), inputs["pre_mix"] + inputs["pre_mix"].sum(0)

    graphs = model.graphs(place, model.buffers(256), across_rows)
    graphs.capture([256])
    first, second = model.inputs(256, 1), model.inputs(256, 2)
    for row, poison in ((200, torch.nan), (201, torch.inf), (202, 1e30)):
        first["residual"][row] = first["pre_mix"][row] = poison
    outputs = []
    for inputs, rows in ((first, 256), (second, 130)):
        batch = model.replay_batch(list(range(rows)), 256, PIECEWISE)
        with use_forward_context(batch.context):
            outputs = graphs.run(batch.rows, inputs)
    padded = {name: torch.cat((value[:130], torch.zeros_like(value[130:]))) for name, value in second.items()}
    for actual, expected in zip(outputs, across_rows(padded), strict=True):
        assert bool(actual.isfinite().all()) and torch.equal(actual, expected[:130])


@fault("U2")
def test_U2_a_step_of_130_rows_after_one_of_256_equals_one_that_found_clean_buffers(backend, form) -> None:
    """In both forms, with layers that read across the rows of a graph, pads too; buffers are zero when made."""
    plan = make_plan(model_sizes=(256,), full_sizes=(), replay_sizes=(256,))

    def runner_across_rows() -> StepRunner:
        runner = make_runner(backend, plan, SMOOTH, captured=False, replay_form=form)
        graphs = runner.replay_graphs
        run_layers = graphs._run_layers

        def across_rows(inputs) -> tuple[torch.Tensor, ...]:
            hidden, pre = run_layers(inputs)
            return hidden + inputs["residual"].abs().amax(0), pre + inputs["pre_mix"].sum(0)

        graphs._run_layers = across_rows
        runner.capture_model_graphs()
        runner.capture_replay_graphs()
        return runner

    used, clean = runner_across_rows(), runner_across_rows()
    Serving(used).step([prefill("p", 256, keeps=True)])
    for name in ("residual", "pre_mix"):
        for row, poison in ((200, torch.nan), (201, torch.inf), (202, 1e30)):
            used.replay_layers.inputs.tensors[name][row] = poison
    actual, expected = (Serving(runner).step([prefill("q", 130, keeps=True)]) for runner in (used, clean))
    assert (actual.record.replay_rows, actual.record.padded_rows) == (130, 256)
    assert bool(actual.hidden_states.isfinite().all())
    assert torch.equal(actual.hidden_states, expected.hidden_states) and torch.equal(actual.pre_mix, expected.pre_mix)


@fault("U4", "break buffers take the size of the plan's largest breaking graph when they are made")
def test_U4_a_first_call_of_64_rows_leaves_room_for_256(backend) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(64, 256), full_sizes=(), replay_sizes=(8,)))
    addresses = {name: value.data_ptr() for name, value in runner.replay_layers.break_buffers.tensors.items()}
    assert runner.replay_layers.break_buffers.max_rows == 256
    for tokens in (60, 250, 40):
        output = Serving(runner).step([prefill("p", tokens)])
        assert output.record.mode is PIECEWISE and len(output.hidden_states) == tokens
    assert addresses == {name: value.data_ptr() for name, value in runner.replay_layers.break_buffers.tensors.items()}
    with pytest.raises(ValueError, match="257 rows asked of static buffers of 256 rows"):
        runner.replay_layers.break_buffers.view(257)


@fault("U5", "a graph can be dispatched to once its capture has ended; a failed size is named with its error")
def test_U5_a_capture_that_fails_at_256_leaves_512_usable_and_no_hidden_memory(place, backend) -> None:
    model, failing, held = FakeModel(backend.device), [256], []

    def run_layers(inputs) -> tuple[torch.Tensor, ...]:
        outputs = model.run_layers(inputs)
        if len(outputs[0]) in failing and current_recorder() is not None:
            held.append(live_pool_bytes(backend, place["pool"]))
            raise ValueError("no such kernel")
        return outputs

    graphs = model.graphs(place, model.buffers(512), run_layers)
    graphs.capture([512])
    runs = len(model.layer_runs)
    with pytest.raises(ValueError, match="no such kernel") as caught:
        graphs.capture([256, 128])
    del caught
    assert len(model.layer_runs) > runs + 1, "after a warm-up"
    assert held[0] > 0 and live_pool_bytes(backend, place["pool"]) == 0
    assert graphs.sizes == (512,) and graphs.failed == {256: "ValueError: no such kernel"}
    plan = make_plan(model_sizes=(), full_sizes=(), replay_sizes=(128, 256, 512), max_num_batched_tokens=1024)
    batch = Batch([Request(250, 0, Phase.PREFILL, all_rows_read=True), Request(9, 0, Phase.PREFILL)])
    record = dispatch_step(batch, plan, model_sizes=(), full_sizes=(), replay_sizes=graphs.sizes)
    assert (record.replay_rows, record.replay_mode, record.padded_rows) == (258, PIECEWISE, 512)
    batch = Batch([Request(200, 0, Phase.PREFILL, all_rows_read=True), Request(9, 0, Phase.PREFILL)])
    record = dispatch_step(batch, plan, model_sizes=(), full_sizes=(), replay_sizes=graphs.sizes)
    assert (record.replay_mode, record.reason) == (NONE, ReplayReason.NOT_CAPTURED)
    failing.clear()
    graphs.capture([256, 128])
    assert graphs.sizes == (128, 256, 512) and graphs.failed == {}


MOVES = {
    "static buffer hidden_states": lambda runner: runner.replay_layers.inputs.tensors,
    "break buffer pre_mix": lambda runner: runner.replay_layers.break_buffers.tensors,
    "BatchMetadataBuffers.positions": lambda runner: vars(runner.contexts.batch),
    "BatchMetadataBuffers.block_table": lambda runner: vars(runner.contexts.batch),
    "ReplayMetadataBuffers.num_rows": lambda runner: vars(runner.contexts.replay),
    "window KV cache of layer 2": lambda runner: vars(runner.decoder.layers[2]),
    "shared KV cache of layer 4": lambda runner: vars(runner.decoder.layers[4]),
}
ATTRIBUTES = {"window KV cache of layer 2": "window_cache", "shared KV cache of layer 4": "shared_cache"}


@fault("U6", "inputs are copied in; addresses of buffers, metadata and caches are checked at every step, by name")
@pytest.mark.parametrize("name", MOVES)
def test_U6_a_step_over_a_moved_buffer_is_refused_by_name_and_the_next_one_is_right(backend, form, name: str) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,)), replay_form=form)
    arguments = Serving(runner).arguments([prefill("p", 40)])
    expected = runner.step(*arguments).hidden_states.clone()
    holder, attribute = MOVES[name](runner), ATTRIBUTES.get(name, name.rpartition(" ")[2].rpartition(".")[2])
    original = holder[attribute]
    holder[attribute] = original.clone()
    with pytest.raises(RuntimeError, match=f"{name} moved from 0x.* Write into the buffer, never replace it"):
        runner.step(*arguments)
    holder[attribute] = original
    assert torch.equal(runner.step(*arguments).hidden_states, expected)


@fault("U7", "an empty plan with the reason")
def test_U7_a_largest_capture_of_64_below_a_window_of_128_plans_no_replay_graph() -> None:
    plan = plan_of(ServingConfig(window=128, max_cudagraph_capture_size=64))
    assert plan.replay_sizes == ()
    assert any("the bound 64, the smaller of max_cudagraph_capture_size 64" in note for note in plan.notes)


@fault("U9", "the phase of a request is a required field; idleness is an empty batch, never a guess from lengths")
@pytest.mark.parametrize("phase", Phase)
def test_U9_real_requests_whose_context_is_empty_keep_all_their_rows(backend, phase: Phase) -> None:
    requests = [Request(1, 0, phase) for _ in range(12)]
    assert select_rows(Batch(requests), 8).rows.tolist() == list(range(12))
    with pytest.raises(TypeError, match="phase"):
        Request(1, 0)
    runner = make_runner(backend, make_plan(model_sizes=(16,), full_sizes=(16,), replay_sizes=()))
    ask = decode if phase is Phase.DECODE else (lambda name: prefill(name, 1))
    output = Serving(runner).step([ask(f"r{index}") for index in range(12)])
    assert output.record.num_tokens == len(output.hidden_states) == 12
    assert bool(output.hidden_states.flatten(1).any(1).all())


@fault("U11", "stated in dispatch's contract; the record of each step says whether and why it trimmed")
def test_U11_700_tokens_trim_eagerly_not_in_a_graph_of_704_and_760_trim_in_one_of_768(backend) -> None:
    plan = make_plan(
        window=128,
        model_sizes=(704, 768),
        full_sizes=(),
        replay_sizes=(128,),
        trim_threshold=768,
        max_num_batched_tokens=768,
    )
    shape = attrs.evolve(SMOOTH, window=128, num_layers=4, cut=2, num_weight_sets=1)
    settings = {"shape": shape, "block_size": 64, "max_blocks": 12}
    graphs, eager = (make_runner(backend, plan, captured=captured, **settings) for captured in (True, False))
    found, outputs = {}, {}
    for name, runner, tokens in (
        ("eager 700", eager, 700),
        ("graph 700", graphs, 700),
        ("graph 760", graphs, 760),
        ("eager 760", eager, 760),
    ):
        output = Serving(runner).step([prefill("p", tokens)])
        outputs[name] = output.pre_mix.clone()
        found[name] = (output.record.padded_tokens, int((output.pre_mix == 0).all(1).sum()), output.record.reason)
    assert found == {
        "eager 700": (700, 572, ReplayReason.NOT_CAPTURED),
        "graph 700": (704, 0, ReplayReason.BELOW_THRESHOLD),
        "graph 760": (768, 632, ReplayReason.GRAPH),
        "eager 760": (760, 632, ReplayReason.NOT_CAPTURED),
    }
    torch.testing.assert_close(outputs["graph 760"], outputs["eager 760"], rtol=1e-3, atol=1e-3)
    first_kept = 700 - 128  # its window reaches back to rows that the trimmed step has not
    assert not torch.allclose(outputs["graph 700"][first_kept], outputs["eager 700"][first_kept], rtol=0, atol=1e-5)


@fault(
    "U13", "rows are gathered into storage of their own; every step writes the whole inverse map, -1 beyond its rows"
)
def test_U13_rows_below_and_above_each_other_are_gathered_apart_and_scattered_back(backend) -> None:
    requests = [Request(1, 5, Phase.DECODE), Request(300, 0, Phase.PREFILL), Request(100, 0, Phase.PREFILL)]
    kept = select_rows(Batch(requests), 128).rows
    assert kept.tolist() == [0, *range(173, 401)]
    model = FakeModel(backend.device)
    inputs, buffers = model.inputs(401), model.buffers(401).tensors
    rows = torch.from_numpy(kept).to(backend.device)
    gather_into(rows, inputs, buffers, 256)
    for name, value in inputs.items():
        assert buffers[name][:229].tolist() == [value[row].tolist() for row in kept.tolist()]
        assert not bool(buffers[name][229:256].any())
    target = torch.full((401, 4, 2), 9.0, device=backend.device)
    source = buffers["residual"][:229].view(229, 4, 2)
    scatter_into(rows, [source], [target])
    for row in range(401):
        expected = inputs["residual"][row].view(4, 2).tolist() if row in kept else [[0.0, 0.0]] * 4
        assert target[row].tolist() == expected


@fault("U13")
def test_U13_a_gather_in_place_is_refused(backend) -> None:
    buffers = FakeModel(backend.device).buffers(401).tensors
    rows = torch.tensor([0, *range(173, 401)], device=backend.device)
    with pytest.raises(RuntimeError, match=r"written-to tensor refer to a single memory location. Please clone\(\)"):
        gather_into(rows, buffers, buffers, 256)


@fault("U13")
def test_U13_a_row_beyond_the_batch_is_refused() -> None:
    model = FakeModel(torch.device("cpu"))
    with pytest.raises(IndexError):
        gather_into(torch.tensor([401]), model.inputs(401), model.buffers(8).tensors, 2)
    with pytest.raises(IndexError):
        scatter_into(torch.tensor([8]), [torch.ones(1, 2)], [torch.zeros(8, 2)])


# By the first step's tokens: in a graph of 256, or eagerly; the rows of it that are kept, before those of SHORT.
LONG_STEPS = {
    180: ([decode("d"), prefill("a", 100), prefill("b", 79)], [0, *range(93, 101), *range(172, 180)]),
    300: ([prefill("a", 200), prefill("b", 99), decode("d")], [*range(192, 200), *range(291, 300)]),
}
SHORT, KEPT_OF_SHORT = [prefill("c", 30), decode("d")], [*range(22, 30), 30]


@fault("U13")
@pytest.mark.parametrize("tokens", LONG_STEPS)
def test_U13_a_short_step_after_a_long_one_finds_none_of_its_rows_in_map_or_outputs(backend, form, tokens: int) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(64, 256), full_sizes=(), replay_sizes=(32,)), replay_form=form)
    serving, replay = Serving(runner), runner.contexts.replay
    for asked, kept in (LONG_STEPS[tokens], (SHORT, KEPT_OF_SHORT)):
        output = serving.step(asked)
        assert (output.record.num_tokens, output.record.replay_rows) == (sum(a.query_len for a in asked), len(kept))
        places = [kept.index(row) if row in kept else -1 for row in range(replay.max_rows)]
        assert replay.output_row_of.tolist() == places
        for tensor in (output.hidden_states, output.pre_mix):
            assert rows_that_hold_something(tensor) == kept
    assert (output.record.padded_tokens, output.record.replay_mode) == (64, PIECEWISE)
    for tensor in runner.replay_layers.break_buffers.tensors.values():
        assert len(tensor) >= 256 and rows_that_hold_something(tensor) == kept


def rows_that_hold_something(tensor: torch.Tensor) -> list[int]:
    return (tensor != 0).flatten(1).any(1).nonzero().flatten().tolist()


@fault(
    "U14", "one dtype for the runner's ids; anything else is refused with both dtypes named before a byte is written"
)
def test_U14_int64_ids_beside_an_int32_buffer_are_refused_with_both_dtypes(place, backend) -> None:
    runner = make_runner(backend, captured=False)
    ids = runner.replay_layers.inputs.tensors["input_ids"].dtype
    assert ids == runner.contexts.batch.input_ids.dtype == torch.int32
    model = FakeModel(backend.device)
    layers = model.layers(12)
    inputs = model.inputs(10) | {"input_ids": torch.arange(10, device=backend.device)}
    context = model.context(10, 10, NONE, replay_batch=model.replay_batch([1, 2], 2, NONE))
    with use_forward_context(context), pytest.raises(ValueError, match="input_ids is torch.int64, .* torch.int32"):
        layers(inputs)
    assert model.kv_writes == [] and not any(bool(buffer.any()) for buffer in layers.inputs.tensors.values())


@fault("U14")
@pytest.mark.parametrize("token", [-1, SMOOTH.vocab_size, 2**31])
def test_U14_an_id_that_no_embedding_holds_is_refused_by_its_bounds(backend, token: int) -> None:
    """Its kind: 64 bits of a token that 32 would wrap."""
    runner = make_runner(backend, captured=False)
    batch, tables, ids = Serving(runner).arguments([prefill("p", 5)])
    ids = ids.astype("int64")
    ids[3] = token
    with pytest.raises(ValueError, match=rf"input_ids are from .*{token}.*: allowed are 0 to 255"):
        runner.step(batch, tables, ids)


@fault("U5")
def test_U5_steps_after_a_failed_model_capture_say_that_the_size_was_not_captured(backend, monkeypatch) -> None:
    runner = make_runner(backend, make_plan(model_sizes=(16, 64)), captured=False)
    forward = runner._forward
    monkeypatch.setattr(runner, "_forward", lambda size: 1 / 0 if size == 16 else forward(size))
    with pytest.raises(ZeroDivisionError):
        runner.capture_model_graphs()
    monkeypatch.undo()
    table = DispatchTable()
    for tokens in (12, 40):
        table.add(Serving(runner).step([prefill("p", tokens)]).record)
    assert table.model_reasons == {ModelReason.NOT_CAPTURED: 1, ModelReason.PIECEWISE: 1}
