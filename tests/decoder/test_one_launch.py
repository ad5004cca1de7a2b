"""The one-launch form of the replay graphs in whole steps: what it holds, its errors, the breakable form's bits."""

import attrs
import pytest
import torch
from decoder.serving import BLOCK_SIZE, Asked, Serving, decode, make_plan, make_runner, prefill
from torch import Tensor

from replay_sim.batch.dispatch import CudagraphMode, ReplayReason
from replay_sim.batch.metadata import ReplayMetadataBuffers
from replay_sim.config.shapes import TINY
from replay_sim.decoder.step import StepOutput, StepRunner
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing

NONE, PIECEWISE = CudagraphMode.NONE, CudagraphMode.PIECEWISE
BREAKABLE, ONE_LAUNCH = ReplayForm.BREAKABLE, ReplayForm.ONE_LAUNCH
# Steps of one serving: two model graphs in turn, each trimmed; a mix of phases; all rows read; a decode of full size;
# an eager step whose tokens the break buffers hold, as size 256 is taken away; one that they do not hold.
STEPS: list[tuple[list[Asked], CudagraphMode, int, CudagraphMode | None]] = [
    ([prefill("p", 40), prefill("q", 9)], PIECEWISE, 64, PIECEWISE),
    ([prefill("w", 16)], PIECEWISE, 16, None),
    ([prefill("z", 20), decode("p"), decode("q", 3)], PIECEWISE, 64, PIECEWISE),
    ([prefill("w", 120), prefill("y", 60)], NONE, 180, PIECEWISE),
    ([prefill("y", 33, keeps=True), decode("p")], PIECEWISE, 64, PIECEWISE),
    ([prefill("long", 290)], NONE, 290, NONE),
    ([prefill("p", 35), decode("w")], PIECEWISE, 64, PIECEWISE),
]


def both_forms(backend, shape=TINY, **settings) -> StepRunner:
    """Graphs of both forms over the model graphs; that of 256 tokens is gone, its break buffers are not."""
    runner = make_runner(backend, shape=shape, **settings)
    runner.use_replay_form(ONE_LAUNCH)
    runner.capture_replay_graphs()
    del runner.model_graphs[256]
    return runner


def tensors_of(output: StepOutput) -> list[Tensor]:
    return [output.hidden_states, output.pre_mix, *output.late_aux, *output.early_aux]


def caches(runner: StepRunner) -> list[Tensor]:
    """All KV but the block that only dummy batches write."""
    rows = runner.num_blocks * BLOCK_SIZE
    return [cache[:rows].clone() for cache in (*runner.decoder.cache.window, runner.decoder.cache.shared)]


def serve(runner: StepRunner, form: ReplayForm) -> list[list[Tensor]]:
    """Each step's outputs, and then the KV, of a serving from the start."""
    runner.use_replay_form(form)
    for cache in (*runner.decoder.cache.window, runner.decoder.cache.shared):
        cache.zero_()
    serving, results = Serving(runner), []
    for asked, *_ in STEPS:
        results.append([tensor.clone() for tensor in tensors_of(serving.step(asked))])
    return [*results, caches(runner)]


@pytest.mark.parametrize("aux", [{}, {"late_aux_layers": (3, 5)}, {"early_aux_layers": (1,)}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_in_one_launch_equal_steps_in_breakable_graphs_bit_for_bit(backend, dtype: str, aux: dict) -> None:
    """G5, L6, O1, O3: outputs with their trimmed rows, and all KV, of steps of every kind, forms changed twice."""
    runner = both_forms(backend, attrs.evolve(TINY, dtype=dtype, **aux))
    first, second, again = (serve(runner, form) for form in (BREAKABLE, ONE_LAUNCH, BREAKABLE))
    for step, (one, other, third) in enumerate(zip(first, second, again, strict=True)):
        for a, b, c in zip(one, other, third, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c), step
    assert bool(first[0][0].any()) and not bool(first[0][0][:32].any()), "the first prompt's trimmed rows are zero"


def test_the_record_says_what_ran_and_an_eager_step_takes_the_graph_if_the_break_buffers_hold_it(backend) -> None:
    """D3, D4, G3: 290 tokens are more than the 256 rows of the break buffers."""
    runner = both_forms(backend)
    serving = Serving(runner)
    for asked, mode, padded, replay_mode in STEPS:
        record = serving.step(asked).record
        assert (record.mode, record.padded_tokens, record.replay_mode) == (mode, padded, replay_mode)
    assert runner.replay_layers.graph_sizes(256) == (8, 32, 128) and runner.replay_layers.graph_sizes(257) == ()
    record = serving.step([prefill("other", 260)]).record
    assert (record.replay_mode, record.reason) == (NONE, ReplayReason.NOT_CAPTURED)
    runner.use_replay_form(BREAKABLE)
    assert serving.step([prefill("another", 260)]).record.replay_mode is PIECEWISE


def test_a_graph_is_one_segment_without_a_break(backend) -> None:
    """One launch a step, whatever the size; the breakable form breaks at every layer's attention."""
    runner = both_forms(backend)
    assert [(len(graph.segments), graph.num_breaks) for graph in runner.replay_graphs.graphs] == [(1, 0)] * 3
    runner.use_replay_form(BREAKABLE)
    breaks = TINY.num_replay_layers
    assert [(len(graph.segments), graph.num_breaks) for graph in runner.replay_graphs.graphs] == [
        (breaks + 1, breaks)
    ] * 3


def test_the_host_writes_no_replay_metadata_for_a_one_launch_graph(backend, monkeypatch) -> None:
    """S9: the graph does, from the batch that is staged for the model anyway; an eager replay batch still needs it."""
    runner = both_forms(backend)
    written: list[int] = []
    write = ReplayMetadataBuffers.write
    monkeypatch.setattr(
        ReplayMetadataBuffers,
        "write",
        lambda self, batch, *rest: (written.append(batch.num_tokens), write(self, batch, *rest)),
    )
    serving = Serving(runner)
    for asked, *_ in STEPS:
        serving.step(asked)
    assert written == [290]


def test_one_launch_graphs_in_the_model_graphs_pool_take_no_memory_of_their_own(backend) -> None:
    """O1: shared, as the breakable ones."""
    runner = make_runner(backend, captured=False)
    assert runner.sharing.sharing is PoolSharing.SHARED
    runner.capture_model_graphs()
    before = backend.reserved_bytes(runner.pool)
    runner.use_replay_form(ONE_LAUNCH)
    runner.capture_replay_graphs()
    assert runner.replay_graphs.sizes == (8, 32, 128) and backend.reserved_bytes(runner.pool) == before > 0


def test_a_capture_reads_no_inputs_of_an_earlier_step(backend) -> None:
    """U6: their memory may be gone; a captured size is usable at once."""
    runner = make_runner(backend, replay_form=ONE_LAUNCH)
    Serving(runner).step([prefill("p", 40)])
    addresses = runner.replay_layers.input_addresses
    assert all(addresses.tolist())
    runner.replay_graphs.capture([8])
    assert addresses.tolist() == [0] * len(addresses)
    assert Serving(runner).step([prefill("p", 40)]).record.padded_rows == 8 and all(addresses.tolist())


def clone_in(holder: dict, name: str) -> None:
    holder[name] = holder[name].clone()


MOVES = {
    "static buffer residual": lambda layers: clone_in(layers.inputs.tensors, "residual"),
    "table of input addresses": lambda layers: clone_in(vars(layers), "input_addresses"),
    "flags of the break buffers": lambda layers: clone_in(vars(layers.break_buffers), "written"),
    "break buffer pre_mix": lambda layers: clone_in(layers.break_buffers.tensors, "pre_mix"),
}


@pytest.mark.parametrize("tokens", [40, 90], ids=["model graph", "eager"])
@pytest.mark.parametrize("moved", MOVES)
def test_a_moved_buffer_is_an_error_at_the_step(backend, moved: str, tokens: int) -> None:
    """B4: whatever a graph reads or writes, as one that uses the layers would replace it."""
    plan = make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8,))
    runner = make_runner(backend, plan, replay_form=ONE_LAUNCH)
    MOVES[moved](runner.replay_layers)
    for capture in (runner.capture_model_graphs, runner.capture_replay_graphs):
        with pytest.raises(RuntimeError, match=f"{moved} moved from 0x"):
            capture()
    with pytest.raises(RuntimeError, match=f"{moved} moved from 0x.* never replace it"):
        Serving(runner).step([prefill("p", tokens)])


def test_other_break_buffers_than_those_of_the_capture_are_refused(backend) -> None:
    """B4."""
    runner = make_runner(backend, replay_form=ONE_LAUNCH)
    layers = runner.replay_layers
    layers.break_buffers = BreakBuffers(layers.break_buffers.specs, layers.break_buffers.max_rows, backend.device)
    with pytest.raises(RuntimeError, match="break buffer hidden_states moved"):
        Serving(runner).step([prefill("p", 40)])
    with pytest.raises(RuntimeError, match="captured with other break buffers"):
        runner.replay_graphs.run_into(layers.break_buffers, runner.prepare_replay(8), {})


def test_a_one_launch_graph_returns_no_rows(backend) -> None:
    """L6: its outputs are in the break buffers, and a caller who wants rows is told so."""
    runner = make_runner(backend, replay_form=ONE_LAUNCH)
    with pytest.raises(RuntimeError, match="call run_into"):
        runner.replay_graphs.run(runner.prepare_replay(8).rows, {})


def test_eager_steps_of_the_whole_token_budget_take_one_launch_graphs(backend) -> None:
    """G3, L6: the break buffers hold it where the form is one launch; the same bits as in breakable graphs."""
    plan = make_plan(model_sizes=(64,), full_sizes=(), replay_sizes=(8, 32))
    outputs = []
    for form in (ONE_LAUNCH, BREAKABLE):
        runner = make_runner(backend, plan, replay_form=form)
        serving = Serving(runner)
        serving.step([prefill("a", plan.max_num_batched_tokens)])
        output = serving.step([prefill("b", 70), prefill("c", plan.max_num_batched_tokens - 70)])
        assert (output.record.mode, output.record.replay_mode, output.record.padded_rows) == (NONE, PIECEWISE, 32)
        outputs.append((output.hidden_states.clone(), output.pre_mix.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert make_runner(backend, plan).replay_layers.break_buffers.max_rows == 64


def test_a_size_that_was_not_captured_is_an_error_that_names_those_that_were(backend) -> None:
    """G3."""
    runner = both_forms(backend)
    serving = Serving(runner)
    arguments = serving.arguments([prefill("p", 40)])
    record = attrs.evolve(runner.dispatch(arguments[0]), padded_rows=9)
    with pytest.raises(RuntimeError, match=r"no replay graph of 9 rows was captured, only \[8, 32, 128\]"):
        runner.run(*arguments, record)
