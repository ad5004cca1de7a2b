"""Dispatch: the mode and size of the model and of the replay layers, the reasons, and the table."""

import json

import attrs
import pytest
from batch.oracles import dispatch_plainly
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.batch.dispatch import (
    CudagraphMode,
    DispatchTable,
    ModelReason,
    ReplayReason,
    dispatch_step,
    smallest_size,
)
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.plan.capture_plan import CapturePlan

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
WINDOW = 128
PLAN = CapturePlan(
    window=WINDOW,
    model_sizes=(1, 8, 64, 704, 768, 1024, 2048),
    full_sizes=(6, 12, 24),
    replay_sizes=(128, 256, 512),
    trim_threshold=768,
    max_num_seqs=16,
    max_num_batched_tokens=4096,
    query_len_decode=6,
)


def with_plan(**changes: object) -> CapturePlan:
    """The plan above with other settings."""
    return attrs.evolve(PLAN, **changes)


def dispatch(batch, plan=PLAN, **captured):
    """The record with everything captured that `captured` does not replace."""
    sizes = {
        "model_sizes": plan.model_sizes,
        "full_sizes": plan.full_sizes,
        "replay_sizes": plan.replay_sizes,
    }
    return dispatch_step(batch, plan, **(sizes | captured))


def prefill(*lengths: int) -> Batch:
    return Batch([Request(length, 0, Phase.PREFILL) for length in lengths])


def decode(*lengths: int) -> Batch:
    return Batch([Request(length, 500, Phase.DECODE) for length in lengths])


def test_a_uniform_decode_takes_the_smallest_full_graph_and_keeps_all_rows():
    """D1, D2, L7."""
    record = dispatch(decode(6, 6, 6))
    assert (record.mode, record.num_tokens, record.padded_tokens, record.num_reqs) == (FULL, 18, 24, 3)
    assert (record.replay_mode, record.replay_rows, record.padded_rows) == (None, 0, 0)
    assert record.reason is ReplayReason.FULL_GRAPH and record.model_reason is ModelReason.FULL
    assert not record.has_replay_batch


@pytest.mark.parametrize(
    "batch",
    [
        decode(6, 6, 6, 6, 6),  # does not fit a full graph
        decode(6, 5),  # not uniform
        decode(1, 1),  # uniform, but not what the full graphs were captured with
        prefill(6, 6),  # the shape of a decode, not its phase
    ],
)
def test_what_is_no_uniform_decode_that_fits_takes_the_smallest_piecewise_graph(batch):
    """D1."""
    record = dispatch(batch)
    assert record.mode is PIECEWISE
    assert record.padded_tokens == min(size for size in PLAN.model_sizes if size >= batch.num_tokens)
    assert record.reason is ReplayReason.BELOW_THRESHOLD


def test_more_tokens_than_the_largest_size_run_eagerly_and_trim():
    """D1, D2, D3: the replay graph serves the eager step too."""
    record = dispatch(prefill(2049))
    assert (record.mode, record.padded_tokens) == (NONE, 2049)
    assert record.model_reason is ModelReason.TOO_MANY_TOKENS
    assert (record.replay_mode, record.replay_rows, record.padded_rows) == (PIECEWISE, 128, 128)
    assert record.reason is ReplayReason.GRAPH


def test_an_eager_step_without_a_prefill_to_trim_has_no_replay_batch():
    """D2, S5."""
    plan = with_plan(model_sizes=())
    for batch in (decode(6, 1), prefill(WINDOW, 1), Batch([Request(900, 0, Phase.PREFILL, True)])):
        record = dispatch(batch, plan)
        assert (record.mode, record.replay_mode) == (NONE, None)
        assert record.model_reason is ModelReason.NO_SIZES
        assert record.reason is ReplayReason.NOTHING_TRIMS


def test_the_same_prompt_is_trimmed_or_not_by_how_it_is_dispatched_and_the_record_says_so():
    """D2, D4, U11: 700 tokens eagerly, 700 in a graph of 704, 760 in a graph of 768."""
    eager = dispatch(prefill(700), with_plan(model_sizes=()))
    below = dispatch(prefill(700))
    at = dispatch(prefill(760))
    assert (eager.mode, eager.replay_rows, eager.reason) == (NONE, 128, ReplayReason.GRAPH)
    assert (below.mode, below.padded_tokens, below.replay_mode) == (PIECEWISE, 704, None)
    assert below.reason is ReplayReason.BELOW_THRESHOLD
    assert (at.padded_tokens, at.replay_rows, at.replay_mode) == (768, 128, PIECEWISE)


def test_a_piecewise_graph_at_the_threshold_breaks_out_though_nothing_trims():
    """S5, D2."""
    batch = Batch([Request(100, 0, Phase.PREFILL)] * 8)
    record = dispatch(batch)
    assert (record.padded_tokens, record.replay_rows) == (1024, 800)
    assert record.reason is ReplayReason.TOO_MANY_ROWS


def test_without_a_threshold_a_piecewise_graph_keeps_the_layers_on_the_whole_batch():
    """L1, L7: an eager step still trims."""
    plan = with_plan(trim_threshold=None)
    assert dispatch(prefill(2000), plan).reason is ReplayReason.THRESHOLD_OFF
    assert dispatch(prefill(3000), plan).replay_rows == 128


@pytest.mark.parametrize(("rows", "padded"), [(127, 128), (128, 128), (129, 256), (511, 512), (512, 512)])
def test_a_replay_batch_takes_the_smallest_size_that_holds_its_rows(rows, padded):
    """G3: a decode is kept whole, so its tokens set the rows."""
    record = dispatch(decode(rows), with_plan(model_sizes=(2048,)))
    assert (record.replay_rows, record.padded_rows, record.replay_mode) == (rows, padded, PIECEWISE)


def test_more_rows_than_the_largest_replay_size_run_eagerly():
    """G3."""
    record = dispatch(prefill(400, 400, 400, 400, 129))
    assert (record.replay_rows, record.padded_rows, record.replay_mode) == (640, 640, NONE)
    assert record.reason is ReplayReason.TOO_MANY_ROWS


def test_a_size_whose_capture_failed_runs_eagerly_and_only_that_one():
    """G3, F4."""
    captured = {"replay_sizes": (128, 512)}
    missing = dispatch(prefill(500, 500), **captured)
    assert (missing.replay_rows, missing.padded_rows, missing.replay_mode) == (256, 256, NONE)
    assert missing.reason is ReplayReason.NOT_CAPTURED
    assert dispatch(prefill(1000), **captured).padded_rows == 128
    assert dispatch(prefill(500, 500, 500), **captured).padded_rows == 512


def test_a_model_size_that_was_never_captured_is_never_dispatched_to():
    """D1, A7: a decode of 12 tokens with no full graph of 12, then with no piecewise one of 64 either."""
    record = dispatch(decode(6, 6), full_sizes=(6,))
    assert (record.mode, record.padded_tokens) == (PIECEWISE, 64)
    record = dispatch(decode(6, 6), full_sizes=(6,), model_sizes=(1, 8))
    assert (record.mode, record.padded_tokens) == (NONE, 12)
    assert record.model_reason is ModelReason.NOT_CAPTURED


def test_without_replay_sizes_the_replay_batch_runs_eagerly():
    """G3."""
    record = dispatch(prefill(1000), with_plan(replay_sizes=()))
    assert (record.replay_mode, record.replay_rows, record.reason) == (NONE, 128, ReplayReason.NO_SIZES)


@pytest.mark.parametrize("batch", [Batch(), prefill(0), decode(0, 0)])
def test_a_batch_without_tokens_runs_nothing(batch):
    """S6: it takes no graph, and it is no idle rank (U9)."""
    record = dispatch(batch)
    assert (record.mode, record.num_tokens, record.padded_tokens, record.replay_mode) == (NONE, 0, 0, None)
    assert record.reason is ReplayReason.EMPTY and record.model_reason is ModelReason.EMPTY


@given(st.sets(st.integers(1, 200)), st.integers(0, 220))
@settings(deadline=None)
def test_the_smallest_size_is_found(sizes, count):
    """D1, G3: bisection against a scan."""
    assert smallest_size(sorted(sizes), count) == min((size for size in sizes if size >= count), default=None)


@st.composite
def small_plans(draw: st.DrawFn) -> CapturePlan:
    """Sizes, threshold and window near the lengths of `small_batches`."""
    sizes = st.lists(st.integers(1, 40), unique=True, max_size=6).map(sorted).map(tuple)
    return CapturePlan(
        window=draw(st.integers(1, 9)),
        model_sizes=draw(sizes),
        full_sizes=draw(sizes),
        replay_sizes=draw(sizes),
        trim_threshold=draw(st.none() | st.integers(2, 45)),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        query_len_decode=draw(st.integers(1, 3)),
    )


@st.composite
def small_batches(draw: st.DrawFn, query_len: int) -> Batch:
    """0 to 6 requests, often decodes of the length that full graphs take."""
    phases = draw(st.sampled_from([[Phase.DECODE], [Phase.PREFILL], list(Phase)]))
    lengths = draw(st.sampled_from([st.just(query_len), st.integers(0, 12)]))
    request = st.builds(Request, lengths, st.integers(0, 20), st.sampled_from(phases), st.booleans())
    return Batch(draw(st.lists(request, max_size=6)))


@given(st.data(), small_plans())
@settings(deadline=None)
def test_dispatch_equals_the_plain_oracle_whatever_was_captured(data, plan):
    """D1-D3, S5, G3: batches, plans and failed captures at random."""
    batch = data.draw(small_batches(plan.query_len_decode))
    kinds = {"PIECEWISE": plan.model_sizes, "FULL": plan.full_sizes, "REPLAY": plan.replay_sizes}
    captured = {kind: {size for size in sizes if data.draw(st.booleans())} for kind, sizes in kinds.items()}
    record = dispatch(
        batch,
        plan,
        model_sizes=captured["PIECEWISE"],
        full_sizes=captured["FULL"],
        replay_sizes=captured["REPLAY"],
    )
    replay_mode = None if record.replay_mode is None else record.replay_mode.value
    ran = (record.mode.value, record.padded_tokens, replay_mode, record.replay_rows, record.padded_rows)
    assert ran == dispatch_plainly(batch, plan, captured)
    assert (record.num_tokens, record.num_reqs) == (batch.num_tokens, batch.num_reqs)
    assert (record.replay_mode is PIECEWISE) == (record.reason is ReplayReason.GRAPH)


def test_every_planned_size_is_selected_by_a_batch_of_its_size():
    """F1: the key at capture is the key at look-up."""
    for size in PLAN.model_sizes:
        assert dispatch(prefill(size)).padded_tokens == size
    for size in PLAN.full_sizes:
        assert dispatch(decode(*[6] * (size // 6))).padded_tokens == size
    for size in PLAN.replay_sizes:
        batch = Batch([Request(size, 0, Phase.PREFILL, True)])
        assert dispatch(batch, with_plan(trim_threshold=size, model_sizes=(512,))).padded_rows == size


STEPS = [*[decode(6, 6, 6)] * 3, prefill(1000), prefill(1000), prefill(500, 500), prefill(3000), prefill(9)]


def test_the_table_counts_what_was_asked_what_ran_and_why():
    """G3, D4."""
    table = DispatchTable()
    table.extend(map(dispatch, STEPS))
    assert table.num_steps == len(STEPS)
    assert table.model_rows() == [
        (18, 24, 6, "FULL", 3),
        (1000, 1024, 24, "PIECEWISE", 3),
        (9, 64, 55, "PIECEWISE", 1),
        (3000, 3000, 0, "NONE", 1),
    ]
    assert table.replay_rows() == [(128, 128, 0, "PIECEWISE", 3), (256, 256, 0, "PIECEWISE", 1)]
    assert table.replay_reasons[ReplayReason.FULL_GRAPH] == 3
    assert table.replay_reasons.total() == table.model_reasons.total() == len(STEPS)


def test_rows_of_one_count_stand_by_tokens_then_size_then_mode():
    """G3."""
    table = DispatchTable()
    step = dispatch(STEPS[0])
    asked = [(5, 8, FULL), (3, 16, FULL), (5, 6, PIECEWISE), (5, 6, FULL), (3, 4, NONE)]
    for tokens, padded, mode in asked:
        table.add(attrs.evolve(step, num_tokens=tokens, padded_tokens=padded, mode=mode))
    assert [(row[0], row[1], row[3]) for row in table.model_rows()] == [
        (3, 4, "NONE"),
        (3, 16, "FULL"),
        (5, 6, "FULL"),
        (5, 6, "PIECEWISE"),
        (5, 8, "FULL"),
    ]


def test_the_table_prints_the_columns_its_users_know():
    """G3."""
    table = DispatchTable()
    table.extend(map(dispatch, STEPS))
    text = table.markdown(limit=1)
    header = "Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count"
    assert [" | ".join(part.strip() for part in line.strip("|").split("|")) for line in text.splitlines()].count(
        header
    ) == 2
    assert "3 more rows, 5 dispatches, not shown." in text
    assert "a full graph keeps all rows" in text
    assert "not shown" not in table.markdown()


def test_the_table_is_json():
    table = DispatchTable()
    table.extend(map(dispatch, STEPS))
    data = json.loads(json.dumps(table.as_dict()))
    assert data["model_graphs"][0] == {
        "unpadded_tokens": 18,
        "padded_tokens": 24,
        "num_paddings": 6,
        "runtime_mode": "FULL",
        "count": 3,
    }
    assert data["replay_reasons"]["replay graph holds the rows"] == 4
    assert json.loads(json.dumps(DispatchTable().as_dict()))["replay_graphs"] == []
