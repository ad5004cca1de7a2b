"""Whole steps against the plain float64 decoder: what a step returns and what it leaves in the KV cache."""

from collections.abc import Callable

import attrs
import numpy as np
import pytest
from decoder.oracle_session import Ask, Session, decode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.plain_decoder import PlainDecoder, Rows

from replay_sim.config.shapes import TINY, DecoderShape
from replay_sim.decoder.step import StepRunner
from replay_sim.decoder.weights import make_weights
from replay_sim.plan.capture_plan import CapturePlan

W = TINY.window
AUX = attrs.evolve(TINY, early_aux_layers=(0, 2), late_aux_layers=(3, 5))
# In bfloat16 a near tie of two experts' scores falls either way; with all experts chosen there is none.
BF16 = attrs.evolve(AUX, dtype="bfloat16", num_experts_per_tok=TINY.num_experts)
# What TINY leaves out: experts of other ranks, one output group, a clamp that binds.
RANK = attrs.evolve(
    TINY, num_local_experts=3, first_local_expert=2, num_experts_per_tok=4, o_groups=1, swiglu_limit=0.5
)
# AUX is run by every plan; TINY, without early aux states, shares the model graphs' stream and pool (O1, O3).
OTHER_SHAPES = {"no aux": TINY, "a rank's share": RANK, "bfloat16": BF16}
SMALL_W = 4
SMALL = attrs.evolve(TINY, num_layers=4, cut=1, window=SMALL_W, index_topk=6, late_aux_layers=(3,))

# Relative error of a row in the Euclidean norm, and the median of a session's rows. float32: six layers of products of
# up to 256 terms, each off by 2^-24; on a CPU 2.5e-6 at worst, 6e-7 in the median. bfloat16: each stored activation
# is off by up to 2^-9, and some dozens follow each other; 2.9e-2 at worst, 7e-3 in the median.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.5e-2}
MEDIAN_TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2}

PLAN = CapturePlan(
    window=W,
    model_sizes=(4, 16, 32, 48),
    full_sizes=(2, 4),
    replay_sizes=(8, 16),
    trim_threshold=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
PLANS = {
    "graphs": PLAN,
    "full graphs of three tokens a request": attrs.evolve(PLAN, full_sizes=(3, 9), query_len_decode=3),
    "eager replay": attrs.evolve(PLAN, replay_sizes=()),
    "no trim threshold": attrs.evolve(PLAN, trim_threshold=None),
    "eager": attrs.evolve(PLAN, model_sizes=(), full_sizes=(), replay_sizes=()),
}
SMALL_GRAPHS = CapturePlan(
    window=SMALL_W,
    model_sizes=(2, 8, 16, 24),
    full_sizes=(1, 2),
    replay_sizes=(4, 8, 12),
    trim_threshold=8,
    max_num_seqs=3,
    max_num_batched_tokens=40,
)
SMALL_PLANS = (SMALL_GRAPHS, attrs.evolve(SMALL_GRAPHS, model_sizes=(), full_sizes=(), replay_sizes=()))
BLOCK_SIZE = 4

ALL_ROWS_READ = {"all_rows_read": True}
HISTORIES = {
    "a prompt in four chunks, then decodes": [
        *([Ask("a", length)] for length in (21, 13, 3, 27)),
        *([decode("a")], [decode("a")]),
    ],
    "decodes beside prefills": [
        [Ask("a", 19), Ask("b", 1)],
        [decode("b"), Ask("a", 7), Ask("c", 30)],
        [decode("a"), decode("b"), Ask("c", 11)],
        [Ask("d", 58), decode("c"), decode("b"), decode("a")],
        [decode("a"), decode("b"), decode("c"), decode("d")],
        [decode("c"), decode("d")],
    ],
    "requests that keep all rows": [
        [Ask("a", 20, **ALL_ROWS_READ), Ask("b", 17)],
        [Ask("b", 23), Ask("a", 9, **ALL_ROWS_READ)],
        [Ask("a", 14), Ask("b", 25, **ALL_ROWS_READ)],
        [Ask("c", 60, **ALL_ROWS_READ), decode("a"), decode("b")],
        [decode("c"), decode("a"), decode("b")],
    ],
    "speculative decodes of several tokens": [
        [Ask("a", 30), Ask("b", 5)],
        [decode("a", 3), decode("b", 3)],
        [decode("a", 3, rejected=2), decode("b", 3, rejected=1)],
        [decode("a", 3), Ask("c", 26), decode("b", 3, rejected=2)],
        [decode("b", 3), decode("c", 3), decode("a", 3, rejected=1)],
        # Longer than the window and beside a prefill that trims: a decode still keeps all rows.
        [decode("a", W + 3), Ask("d", 40), decode("b", 2)],
        [decode("a", 4, rejected=W + 2)],
    ],
    "one token prompts and lengths around the window": [
        [Ask("a", 1)],
        [Ask("b", 1), decode("a"), Ask("c", 1), Ask("d", 0)],
        [Ask("c", W - 1), Ask("d", W), decode("b"), decode("a")],
        [Ask("c", W), Ask("d", W + 1), decode("b"), Ask("a", 0)],
        [Ask("e", W + 1), Ask("f", W - 1)],
        [Ask("f", W), Ask("e", 2 * W + 1), Ask("c", W + 1)],
        [decode("d"), decode("e"), decode("f"), decode("c")],
    ],
    "window starts above zero": [
        [Ask("a", 20), Ask("b", 12)],
        [Ask("a", 15, held=3), Ask("b", 5, held=0)],
        [Ask("a", 5, held=1), decode("b", held=2)],
        [Ask("a", 40, held=7), decode("b", 3, held=4)],
        [decode("a", held=2), decode("b", held=0)],
    ],
}
# Four requests of at most the window a step: the replay batch is used and has nothing to trim.
WITHIN_THE_WINDOW = [
    [Ask("a", W), Ask("b", W), Ask("c", W - 1), Ask("d", 1)],
    [Ask("a", W), Ask("b", W), Ask("c", W), Ask("d", W)],
    [Ask("a", W - 1), decode("b", 3), Ask("c", 5), decode("d", W)],
    [Ask("a", 2), decode("b")],
    [decode("a"), decode("b"), decode("c"), decode("d")],
]
# Kept are the last window of "long", all of "read", "short" and "decoding".
MIXED = [
    [Ask("decoding", 37)],
    [Ask("long", 29), Ask("read", 13, **ALL_ROWS_READ), Ask("short", 3), decode("decoding", 2)],
]
MIXED_KEPT = (W, 13, 3, 2)

# One step for each way to run: a replay graph, below the threshold, eager, FULL, ragged decodes, nothing to trim, and
# more rows than any replay graph. Then, by plan, (mode, padded tokens, replay mode, replay rows, padded rows).
EVERY_MODE = [
    [Ask("a", 19), Ask("b", 1)],
    [decode("b"), Ask("a", 3)],
    [Ask("c", 52), decode("a")],
    [decode("a"), decode("b"), decode("c")],
    [decode("a", 2), decode("b")],
    [Ask("d", 6), decode("a"), decode("b"), decode("c")],
    [Ask("e", 37, **ALL_ROWS_READ), decode("a"), Ask("d", 9)],
]
WHOLE = (None, 0, 0)
RUNS = {
    "graphs": [
        ("PIECEWISE", 32, "PIECEWISE", 9, 16),
        ("PIECEWISE", 4, *WHOLE),
        ("NONE", 53, "PIECEWISE", 9, 16),
        ("FULL", 4, *WHOLE),
        ("PIECEWISE", 4, *WHOLE),
        ("PIECEWISE", 16, "PIECEWISE", 9, 16),
        ("PIECEWISE", 48, "NONE", 46, 46),
    ],
    "no trim threshold": [
        ("PIECEWISE", 32, *WHOLE),
        ("PIECEWISE", 4, *WHOLE),
        ("NONE", 53, "PIECEWISE", 9, 16),
        ("FULL", 4, *WHOLE),
        ("PIECEWISE", 4, *WHOLE),
        ("PIECEWISE", 16, *WHOLE),
        ("PIECEWISE", 48, *WHOLE),
    ],
    "eager": [
        ("NONE", 20, "NONE", 9, 9),
        ("NONE", 4, *WHOLE),
        ("NONE", 53, "NONE", 9, 9),
        ("NONE", 3, *WHOLE),
        ("NONE", 3, *WHOLE),
        ("NONE", 9, *WHOLE),
        ("NONE", 47, "NONE", 46, 46),
    ],
}

MakeRunner = Callable[..., StepRunner]
History = list[list[Ask]]


@pytest.fixture(scope="module")
def runners() -> dict[tuple[object, ...], StepRunner]:
    """The runners made so far: capturing is most of a test's time, and sessions wipe the KV cache."""
    return {}


@pytest.fixture
def make_runner(backend, runners) -> MakeRunner:
    """A runner of a shape and plan on the test's backend, with its graphs captured."""

    def make(shape: DecoderShape, plan: CapturePlan) -> StepRunner:
        key = (type(backend), shape, plan)
        if key not in runners:
            runner = StepRunner(shape, plan, backend, num_blocks=80, max_blocks=40, block_size=BLOCK_SIZE)
            runner.capture_model_graphs()
            runner.capture_replay_graphs()
            runners[key] = runner
        return runners[key]

    return make


def serve(runner: StepRunner, history: History, *, masked: bool = True) -> Session:
    """The session after all steps of the history, with its KV cache compared at the end."""
    session = Session(runner, TOLERANCE[runner.shape.dtype], masked=masked)
    for asks in history:
        session.step(*asks)
    session.check_cache()
    assert np.median(session.errors) <= MEDIAN_TOLERANCE[runner.shape.dtype]
    return session


every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
every_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)


@every_plan
def test_where_nothing_can_trim_a_step_equals_the_plain_decoder(make_runner: MakeRunner, plan: CapturePlan) -> None:
    """S1, S5, L5: with at most `window` rows a request every row is computed, in a replay batch or not."""
    session = serve(make_runner(AUX, plan), WITHIN_THE_WINDOW, masked=False)
    breaks = bool(plan.model_sizes) and plan.trim_threshold is not None
    assert any(record.has_replay_batch for record in session.records) == breaks


@every_plan
@every_history
def test_steps_over_one_cache_equal_the_masked_decoder(
    make_runner: MakeRunner, history: History, plan: CapturePlan
) -> None:
    """S1-S8, L2-L7: kept rows, zeros for trimmed ones, aux states, logits, and every latent of the KV cache."""
    serve(make_runner(AUX, plan), history)


@every_history
@pytest.mark.parametrize("shape", OTHER_SHAPES.values(), ids=OTHER_SHAPES)
def test_steps_of_other_shapes_equal_the_masked_decoder(
    make_runner: MakeRunner, history: History, shape: DecoderShape
) -> None:
    """S1-S8, L2-L7, O1."""
    serve(make_runner(shape, PLANS["graphs"]), history)


@pytest.mark.parametrize("name", RUNS)
def test_every_mode_is_reached_and_equals_the_masked_decoder(make_runner: MakeRunner, name: str) -> None:
    """D1-D4, S5, L7, G3: a step runs as its record says, and the record is what the plan asks for."""
    records = serve(make_runner(AUX, PLANS[name]), EVERY_MODE).records
    assert [
        (r.mode.name, r.padded_tokens, r.replay_mode and r.replay_mode.name, r.replay_rows, r.padded_rows)
        for r in records
    ] == RUNS[name]


@pytest.mark.parametrize("name", ["graphs", "eager"])
@pytest.mark.parametrize("shape", [AUX, BF16], ids=["float32", "bfloat16"])
def test_a_step_trims_prefills_whose_rows_are_not_all_read(
    make_runner: MakeRunner, shape: DecoderShape, name: str
) -> None:
    """S1, S2, L6."""
    session = serve(make_runner(shape, PLANS[name]), MIXED)
    assert session.records[-1].replay_rows == sum(MIXED_KEPT)


@pytest.mark.parametrize(("shape", "rows_seen"), [(AUX, W), (BF16, W // 2)], ids=["float32", "bfloat16"])
def test_leaving_the_mask_out_would_be_seen(shape: DecoderShape, rows_seen: int) -> None:
    """S4: without it the kept rows, most of all the first ones, are off by more than the tolerance."""
    tokens = np.random.default_rng(0).integers(shape.vocab_size, size=5 * W).tolist()
    decoder = PlainDecoder(shape, make_weights(shape, "cpu", seed=0))
    masked = decoder.step([Rows(request_id="masked", token_ids=tokens)], trimmed=True)[-W:]
    plain = decoder.step([Rows(request_id="plain", token_ids=tokens)], trimmed=False)[-W:]
    off = [
        np.linalg.norm(a.streams - b.streams) / np.linalg.norm(b.streams) for a, b in zip(masked, plain, strict=True)
    ]
    assert min(off[:rows_seen]) > TOLERANCE[shape.dtype]


lengths = st.sampled_from([SMALL_W - 1, SMALL_W, SMALL_W + 1]) | st.integers(0, 3 * SMALL_W + 1)
helds = st.none() | st.integers(0, SMALL_W + 1)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """3 to 6 steps of up to three requests, in any order, each a chunk of a prompt, a decode or absent."""
    last_decode = {"a": 0, "b": 0, "c": 0}
    started: set[str] = set()
    steps = []
    for _ in range(draw(st.integers(3, 6))):
        asks = []
        for name in draw(st.permutations(list(last_decode)))[: draw(st.integers(1, 3))]:
            if name in started and draw(st.sampled_from([True, False])):
                rejected = draw(st.integers(0, max(0, last_decode[name] - 1)))
                length = draw(st.integers(1, 3) | st.just(SMALL_W + 2))
                asks.append(decode(name, length, rejected=rejected, held=draw(helds)))
                last_decode[name] = length
            else:
                all_rows_read = draw(st.sampled_from([False, False, False, True]))
                asks.append(Ask(name, draw(lengths), all_rows_read=all_rows_read, held=draw(helds)))
                last_decode[name] = 0
            started.add(name)
        steps.append(asks)
    return steps


@given(history=histories(), plan=st.sampled_from(SMALL_PLANS))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_equals_the_masked_decoder(make_runner: MakeRunner, history: History, plan: CapturePlan) -> None:
    """S1-S8, L2-L7."""
    serve(make_runner(SMALL, plan), history)
