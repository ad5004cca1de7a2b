"""Whole steps: which graphs ran and what the record says, bounds, failures midway, and sequences over one cache."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
from decoder.serving import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQS,
    NUM_BLOCKS,
    Asked,
    Serving,
    decode,
    make_plan,
    make_runner,
    prefill,
    slots_of,
)
from replay.fake_model import nothing_is_captured

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, ModelReason, ReplayReason
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture import BreakableGraph, CaptureError
from replay_sim.capture.eager_break import current_recorder
from replay_sim.config.shapes import TINY
from replay_sim.decoder.layer import DecoderLayer
from replay_sim.decoder.step import StepRunner
from replay_sim.replay.context import has_forward_context, use_forward_context
from replay_sim.replay.layers import ReplayLayers

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
KEEPS = {"keeps": True}
# Requests of one step, the graphs that run in order, and the record: padded tokens, mode, replay rows, padded rows,
# replay mode, reason. Model graphs of 16, 64 and 256, of which 64 and 256 break; full graphs of 2 and 4 decodes;
# replay graphs of 8, 32 and 128; window 8.
STEPS = {
    "decodes that fill a full graph": (
        [decode(f"d{index}") for index in range(4)],
        ["FULL graph of 4 tokens"],
        (4, FULL, 0, 0, None, ReplayReason.FULL_GRAPH),
    ),
    "decodes padded to a full graph": (
        [decode(f"d{index}") for index in range(3)],
        ["FULL graph of 4 tokens"],
        (4, FULL, 0, 0, None, ReplayReason.FULL_GRAPH),
    ),
    "more decodes than a full graph holds": (
        [decode(f"d{index}") for index in range(5)],
        ["PIECEWISE graph of 16 tokens"],
        (16, PIECEWISE, 0, 0, None, ReplayReason.BELOW_THRESHOLD),
    ),
    "decodes of several tokens": (
        [decode("d0", 3), decode("d1", 3)],
        ["PIECEWISE graph of 16 tokens"],
        (16, PIECEWISE, 0, 0, None, ReplayReason.BELOW_THRESHOLD),
    ),
    "a prompt in a graph below the threshold": (
        [prefill("p", 16)],
        ["PIECEWISE graph of 16 tokens"],
        (16, PIECEWISE, 0, 0, None, ReplayReason.BELOW_THRESHOLD),
    ),
    "a prompt that is trimmed": (
        [prefill("p", 17)],
        ["PIECEWISE graph of 64 tokens", "replay graph of 8 rows"],
        (64, PIECEWISE, 8, 8, PIECEWISE, ReplayReason.GRAPH),
    ),
    "prompts, a chunk, and decodes beside them": (
        [prefill("p", 30), decode("d0"), prefill("q", 3), decode("d1", 2)],
        ["PIECEWISE graph of 64 tokens", "replay graph of 32 rows"],
        (64, PIECEWISE, 14, 32, PIECEWISE, ReplayReason.GRAPH),
    ),
    "nothing to trim in a graph that breaks": (
        [prefill(f"p{index}", 7) for index in range(5)],
        ["PIECEWISE graph of 64 tokens", "replay graph of 128 rows"],
        (64, PIECEWISE, 35, 128, PIECEWISE, ReplayReason.GRAPH),
    ),
    "a prompt whose rows are all read beside one that is trimmed": (
        [prefill("p", 40, **KEEPS), prefill("q", 41)],
        ["PIECEWISE graph of 256 tokens", "replay graph of 128 rows"],
        (256, PIECEWISE, 48, 128, PIECEWISE, ReplayReason.GRAPH),
    ),
    "more kept rows than the largest replay graph": (
        [prefill("p", 150, **KEEPS)],
        ["PIECEWISE graph of 256 tokens"],
        (256, PIECEWISE, 150, 150, NONE, ReplayReason.TOO_MANY_ROWS),
    ),
    "more tokens than the largest model graph": (
        [prefill("p", 290), prefill("q", 5)],
        ["replay graph of 32 rows"],
        (295, NONE, 13, 32, PIECEWISE, ReplayReason.GRAPH),
    ),
    "an eager step that trims nothing": (
        [prefill("p", 290, **KEEPS)],
        [],
        (290, NONE, 0, 0, None, ReplayReason.NOTHING_TRIMS),
    ),
    "an eager step with more kept rows than the largest replay graph": (
        [prefill("p", 129, **KEEPS), prefill("q", 150)],
        [],
        (279, NONE, 137, 137, NONE, ReplayReason.TOO_MANY_ROWS),
    ),
    "requests of no rows beside one of a row": (
        [prefill("p", 0), prefill("q", 1), prefill("r", 0)],
        ["PIECEWISE graph of 16 tokens"],
        (16, PIECEWISE, 0, 0, None, ReplayReason.BELOW_THRESHOLD),
    ),
    "no request": ([], [], (0, NONE, 0, 0, None, ReplayReason.EMPTY)),
    "a request of no rows": ([prefill("p", 0)], [], (0, NONE, 0, 0, None, ReplayReason.EMPTY)),
}
# A life of several requests: chunks, decodes beside prefills, a prompt whose rows are all read, speculative decodes.
LIFE = [
    [prefill("a", 21), prefill("b", 5)],
    [prefill("a", 30), decode("b"), prefill("c", 37, keeps=True)],
    [prefill("a", 9), decode("b", 3), decode("c"), prefill("d", 70)],
    [decode("a"), decode("b"), decode("c"), decode("d")],
    [decode("a", 3), decode("c"), prefill("e", 1)],
    [prefill("f", 200), decode("a"), decode("d", 2), prefill("e", 12)],
    [],
    [decode("a"), decode("f")],
    [prefill("g", 300), decode("f", 10)],
    [decode("g"), decode("e")],
]


@pytest.fixture
def runner(backend) -> StepRunner:
    return make_runner(backend)


@pytest.fixture
def graphs_run(monkeypatch) -> list[str]:
    """The names of the graphs that are replayed, in order of their start."""
    names, replay = [], BreakableGraph.replay

    def spy(graph):
        names.append(graph.name)
        return replay(graph)

    monkeypatch.setattr(BreakableGraph, "replay", spy)
    return names


def outputs_of(output) -> list[torch.Tensor]:
    return [output.hidden_states, output.pre_mix, *output.late_aux, *output.early_aux]


def trimmed_rows(asked: list[Asked]) -> list[bool]:
    """Per row of the step: not among the last eight of a prompt of which not all is read."""
    return [
        ask.phase is Phase.PREFILL and not ask.all_rows_read and row < ask.query_len - 8
        for ask in asked
        for row in range(ask.query_len)
    ]


@pytest.mark.parametrize("name", STEPS)
def test_the_record_of_a_step_says_what_ran(runner, graphs_run, name: str) -> None:
    """D1 to D4, S5, G3, G4, L7."""
    asked, expected_graphs, expected = STEPS[name]
    with nothing_is_captured(runner.backend):
        record = Serving(runner).step(asked).record
    assert graphs_run == expected_graphs
    assert (record.num_tokens, record.num_reqs) == (sum(ask.query_len for ask in asked), len(asked))
    assert (
        record.padded_tokens,
        record.mode,
        record.replay_rows,
        record.padded_rows,
        record.replay_mode,
        record.reason,
    ) == expected


@pytest.mark.parametrize("name", STEPS)
def test_outputs_have_a_row_for_every_token_and_zeros_where_rows_were_trimmed(runner, name: str) -> None:
    """L6, S8: pads are not among them."""
    asked = STEPS[name][0]
    output = Serving(runner).step(asked)
    tokens = output.record.num_tokens
    assert output.hidden_states.shape == (tokens, TINY.hc_mult, TINY.hidden_size)
    assert output.pre_mix.shape == (tokens, TINY.hc_mult) and output.pre_mix.dtype == torch.float32
    replays = output.record.replay_mode is not None
    expected_zero = [replays and trimmed for trimmed in trimmed_rows(asked)]
    for value in outputs_of(output):
        assert bool(value.isfinite().all())
        assert (value == 0).flatten(1).all(1).tolist() == expected_zero


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_life_of_requests_in_graphs_equals_the_same_in_eager_steps(backend, dtype: str) -> None:
    """D1 to D3, S4, S7, G5: with a threshold that makes every PIECEWISE step trim, as every eager step does.

    All experts are chosen by every row, since a choice of some may turn on the last bit of a router's logit.
    """
    shape = attrs.evolve(TINY, dtype=dtype, num_experts_per_tok=TINY.num_experts, late_aux_layers=(4,))
    plan = make_plan(trim_threshold=9)
    graphs = Serving(make_runner(backend, plan, shape))
    eager = Serving(make_runner(backend, plan, shape, captured=False))
    modes = set()
    for asked in LIFE:
        one, other = graphs.step(asked), eager.step(asked)
        modes.add(one.record.mode)
        assert other.record.mode is NONE
        assert graphs.window_starts == eager.window_starts
        tolerance = 1e-3 if dtype == "float32" else 0.1
        for actual, expected in zip(outputs_of(one), outputs_of(other), strict=True):
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert modes == {NONE, PIECEWISE, FULL}


def test_the_same_prompt_is_trimmed_or_not_by_the_graph_that_it_runs_in(backend) -> None:
    """U11, D2: 12 tokens trim eagerly, not in a graph below the threshold; 17 in a graph of 64 trim; records say so."""
    trims = {}
    for name, captured, tokens in (("eager", False, 12), ("below", True, 12), ("at", True, 17)):
        output = Serving(make_runner(backend, captured=captured)).step([prefill("p", tokens)])
        trims[name] = (int((output.pre_mix == 0).all(1).sum()), output.record.reason)
    assert trims == {
        "eager": (4, ReplayReason.NOT_CAPTURED),
        "below": (0, ReplayReason.BELOW_THRESHOLD),
        "at": (9, ReplayReason.GRAPH),
    }


def test_every_captured_graph_is_hit_by_a_step_of_its_size(runner, graphs_run) -> None:
    """F1: the key at capture is the key at look-up."""
    serving, table = Serving(runner), DispatchTable()
    steps = [[prefill("p16", 16)], [prefill("p64", 64)], [prefill("p256", 256)], [decode("d1"), decode("d2")]]
    steps += [[decode(f"e{index}") for index in range(4)]]
    steps += [[prefill("k32", 32, keeps=True)], [prefill("k128", 128, keeps=True)]]
    for asked in steps:
        table.add(serving.step(asked).record)
    every = (*runner.model_graphs.values(), *runner.full_graphs.values(), *runner.replay_graphs.graphs)
    assert len(every) == 8 and {graph.name for graph in every} == set(graphs_run)
    assert table.num_steps == len(steps) and "| PIECEWISE" in table.markdown()


def test_until_graphs_are_captured_every_step_runs_eagerly(backend, graphs_run) -> None:
    """G3, D1: and the record says that the size was not captured."""
    record = Serving(make_runner(backend, captured=False)).step([prefill("p", 40)]).record
    assert graphs_run == []
    assert (record.mode, record.padded_tokens, record.model_reason) == (NONE, 40, ModelReason.NOT_CAPTURED)
    assert (record.replay_mode, record.padded_rows, record.reason) == (NONE, 8, ReplayReason.NOT_CAPTURED)


def test_graphs_are_captured_largest_first_and_said_so(backend) -> None:
    """C8: the model graphs, then the full ones, then the replay graphs."""
    runner, said = make_runner(backend, captured=False), []

    def progress(sizes, label):
        said.append((label, list(sizes)))
        return said[-1][1]

    runner.capture_model_graphs(progress)
    runner.capture_replay_graphs(progress)
    assert said == [("PIECEWISE", [256, 64, 16]), ("FULL", [4, 2]), ("replay", [128, 32, 8])]
    assert set(runner.model_graphs) == {16, 64, 256} and runner.replay_graphs.sizes == (8, 32, 128)


def test_model_graphs_break_once_more_for_the_replay_layers_where_they_reach_the_threshold(runner) -> None:
    """C1, L2, L4, L7: below it one break a layer; at it one a layer before the cut, the KV write, the replay layers."""
    breaks = {size: graph.num_breaks for size, graph in runner.model_graphs.items()}
    assert breaks == {16: TINY.num_layers, 64: TINY.cut + 2, 256: TINY.cut + 2}
    assert {graph.num_breaks for graph in runner.full_graphs.values()} == {0}
    assert {graph.num_breaks for graph in runner.replay_graphs.graphs} == {TINY.num_replay_layers}


def test_nothing_is_set_after_the_captures(runner) -> None:
    """G4."""
    assert not has_forward_context()


@pytest.mark.parametrize("size", [1, 5, 16, 128])
def test_a_replay_graph_is_captured_on_a_batch_set_up_as_a_steps_own(backend, size: int) -> None:
    """G1: the same rows, keys and padding that a real step with these lengths makes, through the same code."""
    runner = make_runner(backend, captured=False)
    batch = runner.prepare_replay(size)
    context = batch.context
    assert batch.rows.tolist() == list(range(size))
    assert (context.mode, context.num_tokens, context.padded_tokens) == (PIECEWISE, size, size)
    assert context.first_layer_kv_written and context.num_rows.tolist() == [size]
    assert set(context.metadata) == set(runner.replay_layers.spec.metadata_keys)
    real_batch, tables, ids = Serving(runner).arguments([prefill("p", size, keeps=True)])
    runner.contexts.batch.write(real_batch, tables, ids, size)
    real = runner.contexts.replay_batch(real_batch, size, size, PIECEWISE)
    for key, metadata in real.context.metadata.items():
        assert metadata.positions.data_ptr() == context.metadata[key].positions.data_ptr()
        assert metadata.slot_mapping.shape == context.metadata[key].slot_mapping.shape


@pytest.mark.parametrize(("size", "requests"), [(512, 16), (16, 16), (5, 5), (1, 1)])
def test_a_dummy_batch_has_no_more_requests_than_a_step_may_have(backend, size: int, requests: int) -> None:
    """A14: 512 rows are 16 requests of 32, not 512."""
    plan = make_plan(replay_sizes=(512,), model_sizes=(512,), max_num_batched_tokens=512)
    runner = make_runner(backend, plan, captured=False)
    owner = runner.prepare_replay(size).context.metadata["replay_window"].request_of_row
    assert sorted(set(owner.tolist())) == list(range(requests))


def test_dummy_batches_write_only_the_spare_block(backend) -> None:
    """B11: capturing beside live requests changes none of their KV."""
    runner = make_runner(backend, captured=False)
    caches = [*runner.decoder.cache.window, runner.decoder.cache.shared]
    for cache in caches:
        cache.fill_(3)
    runner.capture_model_graphs()
    runner.capture_replay_graphs()
    for cache in caches:
        assert cache.shape[0] == (NUM_BLOCKS + 1) * BLOCK_SIZE
        assert bool((cache[: NUM_BLOCKS * BLOCK_SIZE] == 3).all())


@pytest.mark.parametrize("name", STEPS)
def test_a_step_writes_its_own_slots_and_no_other(runner, name: str) -> None:
    """S8, B1, B11: pads write nothing, neither the last slot nor that of a parked request."""
    asked, serving = STEPS[name][0], Serving(runner)
    serving.step([prefill("parked", 50)])
    before = dict(serving.computed)
    arguments = serving.arguments(asked)
    caches = [*runner.decoder.cache.window, runner.decoder.cache.shared]
    for cache in caches:
        cache.fill_(3)
    record = runner.step(*arguments).record
    every_slot = slots_of(serving, asked, lambda name: before.get(name, 0))
    trimmed = record.replay_mode is not None
    for index, cache in enumerate(caches):
        changed = set((cache != 3).any(1).nonzero().squeeze(1).tolist())
        if trimmed and TINY.cut < index < TINY.num_layers:
            assert len(changed) == record.replay_rows and changed <= every_slot
        else:
            assert changed == every_slot


def test_capturing_while_a_step_runs_is_refused(runner) -> None:
    """G4."""
    with use_forward_context(runner.prepare_replay(8).context), nothing_is_captured(runner.backend):
        for capture in (runner.capture_model_graphs, runner.capture_replay_graphs):
            with pytest.raises(CaptureError, match="while a step runs"):
                capture()
    assert set(runner.model_graphs) == {16, 64, 256} and runner.replay_graphs.sizes == (8, 32, 128)


def outcomes_on_another_thread(*calls: Callable[[], object]) -> list[str]:
    """What each call raised on another thread, in turn."""

    def outcome(call: Callable[[], object]) -> str:
        try:
            call()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    with ThreadPoolExecutor(1) as pool:
        return list(pool.map(outcome, calls))


def test_another_thread_captures_nothing_during_a_step_and_runs_no_step_during_a_capture(backend, monkeypatch) -> None:
    """G4: a dummy batch and a step write the same metadata buffers; the outputs are those of a step alone."""
    runner, refused = make_runner(backend), []
    arguments = Serving(runner).arguments([prefill("p", 40), prefill("q", 9)])
    expected = runner.step(*arguments).hidden_states.clone()
    run_into = ReplayLayers.run_into_break_buffers

    def intruded(layers: ReplayLayers, inputs) -> None:
        captures = (runner.capture_model_graphs, runner.capture_replay_graphs)
        refused.extend(outcomes_on_another_thread(*captures, lambda: runner.step(*arguments)))
        run_into(layers, inputs)

    monkeypatch.setattr(ReplayLayers, "run_into_break_buffers", intruded)
    assert torch.equal(runner.step(*arguments).hidden_states, expected)
    monkeypatch.undo()

    def progress(sizes, _: str):
        refused.extend(outcomes_on_another_thread(lambda: runner.step(*arguments)))
        return sizes

    runner.capture_replay_graphs(progress)
    assert [message.split(":")[0] for message in refused] == [
        "CaptureError",
        "CaptureError",
        "RuntimeError",
        "RuntimeError",
    ]
    assert all("runs" in message for message in refused)
    assert torch.equal(runner.step(*arguments).hidden_states, expected)


@pytest.fixture
def failing_rows(monkeypatch) -> set[int]:
    """Row counts at which a capture raises in the layer at the cut, after its warm-up and in the middle."""
    rows, run = set(), DecoderLayer.run

    def raising(layer, state):
        if layer.is_kv_source and state.hidden_states.shape[0] in rows and current_recorder() is not None:
            raise ZeroDivisionError("no such kernel")
        run(layer, state)

    monkeypatch.setattr(DecoderLayer, "run", raising)
    return rows


def test_a_model_capture_that_fails_midway_leaves_the_sizes_before_it_usable(backend, failing_rows, graphs_run) -> None:
    """U5, C7, D1: 256 was captured, 64 raises: 40 tokens run eagerly, 200 in the graph; a second try captures all."""
    runner = make_runner(backend, captured=False)
    failing_rows.update({64})
    with pytest.raises(ZeroDivisionError, match="no such kernel"):
        runner.capture_model_graphs()
    assert list(runner.model_graphs) == [256] and not runner.full_graphs and not has_forward_context()
    record = Serving(runner).step([prefill("p", 40)]).record
    assert (record.mode, record.model_reason) == (NONE, ModelReason.NOT_CAPTURED)
    assert Serving(runner).step([prefill("q", 200)]).record.mode is PIECEWISE
    assert graphs_run == ["PIECEWISE graph of 256 tokens"]

    failing_rows.clear()
    runner.capture_model_graphs()
    assert set(runner.model_graphs) == {16, 64, 256} and set(runner.full_graphs) == {2, 4}
    assert Serving(runner).step([prefill("r", 40)]).record.padded_tokens == 64


def test_a_replay_capture_that_fails_midway_runs_that_size_eagerly(backend, failing_rows, graphs_run) -> None:
    """U5, G3: 128 was captured, 32 raises; the rows that ask for 32 do not run in 128, and the outputs are right."""
    runner = make_runner(backend, captured=False)
    runner.capture_model_graphs()
    failing_rows.update({32})
    with pytest.raises(ZeroDivisionError, match="no such kernel"):
        runner.capture_replay_graphs()
    assert runner.replay_graphs.sizes == (128,) and runner.replay_graphs.failed.keys() == {32}
    asked = [prefill("p", 30), prefill("q", 9), decode("r")]
    output = Serving(runner).step(asked)
    record = output.record
    assert (record.replay_mode, record.padded_rows, record.reason) == (NONE, 17, ReplayReason.NOT_CAPTURED)
    assert graphs_run == ["PIECEWISE graph of 64 tokens"]
    eager = Serving(make_runner(backend, captured=False)).step(asked)
    torch.testing.assert_close(output.hidden_states, eager.hidden_states, rtol=1e-3, atol=1e-3)

    failing_rows.clear()
    runner.capture_replay_graphs()
    assert runner.replay_graphs.sizes == (8, 32, 128) and runner.replay_graphs.failed == {}


NO_SIZES = {
    "no sizes at all": {"model_sizes": (), "full_sizes": (), "replay_sizes": ()},
    "no replay sizes": {"replay_sizes": ()},
    "no model sizes": {"model_sizes": (), "full_sizes": ()},
    "no threshold": {"trim_threshold": None},
}


@pytest.mark.parametrize("name", NO_SIZES)
def test_a_plan_without_some_sizes_serves_all_the_same(backend, name: str) -> None:
    """A10, G3: what has no graph runs eagerly, and its buffers take no bytes."""
    plan = make_plan(**NO_SIZES[name])
    runner = make_runner(backend, plan)
    asked = [prefill("p", 40), decode("q")]
    output = Serving(runner).step(asked)
    replay_mode = {"no sizes at all": NONE, "no replay sizes": NONE, "no model sizes": PIECEWISE, "no threshold": None}
    assert output.record.replay_mode is replay_mode[name]
    assert output.record.mode is (PIECEWISE if plan.model_sizes else NONE)
    assert (runner.replay_layers.inputs.nbytes == 0) == (not plan.replay_sizes)
    assert (runner.replay_layers.break_buffers.nbytes == 0) == (not plan.breaking_sizes)
    if name != "no threshold":
        eager = Serving(make_runner(backend, captured=False)).step(asked)
        torch.testing.assert_close(output.hidden_states, eager.hidden_states, rtol=1e-3, atol=1e-3)


def test_an_empty_batch_between_others_changes_nothing(runner) -> None:
    """S6: an idle step in the middle of a prompt."""
    serving, other = Serving(runner), Serving(runner)
    serving.step([prefill("a", 20)])
    empty = serving.step([])
    after = serving.step([prefill("a", 20)]).hidden_states.clone()
    other.step([prefill("a", 20)])
    assert torch.equal(after, other.step([prefill("a", 20)]).hidden_states)
    assert empty.hidden_states.shape[0] == 0 and empty.record.model_reason is ModelReason.EMPTY


def test_aux_states_come_back_a_row_a_token(backend) -> None:
    """O3, G5 of the faults: chosen before the capture, of early and of late layers, and of an empty batch too."""
    shape = attrs.evolve(TINY, early_aux_layers=(0, 2), late_aux_layers=(3, 4, 5))
    runner = make_runner(backend, shape=shape)
    for asked in ([prefill("p", 40)], [decode("p")], [prefill("q", 300)], []):
        output = Serving(runner).step(asked)
        tokens = sum(ask.query_len for ask in asked)
        assert [tuple(aux.shape) for aux in output.early_aux] == [(tokens, 64)] * 2
        assert [tuple(aux.shape) for aux in output.late_aux] == [(tokens, 64)] * 3
        assert all(bool(aux.isfinite().all()) for aux in (*output.early_aux, *output.late_aux))


def test_logits_are_those_of_the_rows_that_are_sampled(runner) -> None:
    """A step's last row of each request gives the head's logits."""
    output = Serving(runner).step([prefill("p", 30), decode("q")])
    logits = runner.logits(output, torch.tensor([29, 30], device=runner.backend.device))
    assert logits.shape == (2, TINY.vocab_size) and bool(logits.isfinite().all())
    assert not torch.equal(logits[0], logits[1])


def test_decodes_of_the_plans_query_length_run_in_full_graphs(backend, graphs_run) -> None:
    """D1, A2, A6: three tokens a decode; sizes are multiples of it."""
    runner = make_runner(backend, make_plan(query_len_decode=3, full_sizes=(3, 6)))
    serving = Serving(runner)
    assert serving.step([decode("a", 3), decode("b", 3)]).record.mode is FULL
    assert serving.step([decode("a", 3)]).record.padded_tokens == 3
    assert serving.step([decode("a"), decode("b")]).record.mode is PIECEWISE
    assert graphs_run == ["FULL graph of 6 tokens", "FULL graph of 3 tokens", "PIECEWISE graph of 16 tokens"]


@pytest.mark.parametrize("blocks", [[NUM_BLOCKS], [-1]])
def test_a_block_that_the_cache_does_not_lend_is_refused(runner, blocks: list[int]) -> None:
    """B11, B1: the spare block belongs to dummy batches, and -1 is no block."""
    _, _, ids = Serving(runner).arguments([prefill("p", 5)])
    with pytest.raises(ValueError, match=f"allowed are 0 to {NUM_BLOCKS - 1}"):
        runner.step(Batch([Request(5, 0, Phase.PREFILL)]), [torch.tensor(blocks).int().numpy()], ids)


def test_a_request_beyond_the_last_position_is_refused(backend) -> None:
    runner = make_runner(backend, shape=attrs.evolve(TINY, max_position=30), captured=False)
    with pytest.raises(ValueError, match="seq_len 31 .* exceeds max_position 30"):
        Serving(runner).step([prefill("p", 31)])
    assert Serving(runner).step([prefill("q", 30)]).record.num_tokens == 30


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([decode(f"d{index}") for index in range(MAX_SEQS + 1)], f"17 requests exceeds max_num_seqs {MAX_SEQS}"),
        ([prefill("p", 200), prefill("q", 200)], "padded_tokens 400 must be .* at most the 320 rows"),
        ([prefill("p", MAX_BLOCKS * BLOCK_SIZE + 1)], "padded_tokens 321"),
    ],
)
def test_a_batch_beyond_the_plan_is_refused_and_the_next_one_served(runner, asked, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Serving(runner).step(asked)
    assert not has_forward_context()
    assert Serving(runner).step([prefill("ok", 9)]).record.num_tokens == 9


def test_a_plan_that_the_cache_cannot_hold_is_refused_before_any_capture(backend) -> None:
    """A5: 256 tokens, 248 slots."""
    with pytest.raises(ValueError, match="256 .* 248 slots"):
        make_runner(backend, num_blocks=31, captured=False)


def test_a_plan_of_another_window_than_the_decoders_is_refused(backend) -> None:
    with pytest.raises(ValueError, match="window 7 of the plan differs from window 8 of tiny"):
        make_runner(backend, make_plan(window=7), captured=False)
