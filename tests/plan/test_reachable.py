"""Reachable replay batches, against every batch of a small system enumerated (P6)."""

from itertools import combinations_with_replacement

from hypothesis import given, settings
from hypothesis import strategies as st

from replay_sim.config import ServingConfig, load_config
from replay_sim.plan import CapturePlan, make_plan, reachable_rows, unreachable_sizes

PREFILL, ALL_READ, DECODE = "prefill", "all rows read", "decode"


def rows_by_enumeration(plan: CapturePlan, all_rows_read: bool) -> set[int]:
    """Run every batch through D1, D2, S1 and S5 as they are written."""
    requests = [(PREFILL, length) for length in range(1, plan.max_num_batched_tokens + 1)]
    requests += [(DECODE, length) for length in range(1, plan.query_len_decode + 1)]
    if all_rows_read:
        requests += [(ALL_READ, length) for length in range(1, plan.max_num_batched_tokens + 1)]
    found = set()
    for count in range(1, plan.max_num_seqs + 1):
        for batch in combinations_with_replacement(requests, count):
            rows = _replay_rows(plan, batch)
            if rows is not None:
                found.add(rows)
    return found


def _replay_rows(plan: CapturePlan, batch: tuple[tuple[str, int], ...]) -> int | None:
    tokens = sum(length for _, length in batch)
    if tokens > plan.max_num_batched_tokens:
        return None
    uniform = all(request == (DECODE, plan.query_len_decode) for request in batch)
    if uniform and any(size >= tokens for size in plan.full_sizes):
        return None
    rows = sum(min(length, plan.window) if phase == PREFILL else length for phase, length in batch)
    padded = [size for size in plan.model_sizes if size >= tokens]
    if not padded:
        return rows if rows < tokens else None
    breaks = plan.trim_threshold is not None and padded[0] >= plan.trim_threshold
    return rows if breaks else None


@st.composite
def plans(draw: st.DrawFn) -> CapturePlan:
    window = draw(st.integers(1, 4))
    budget = draw(st.integers(1, 9))
    length = draw(st.integers(1, 4))
    sequences = draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, budget), unique=True, max_size=3).map(sorted).map(tuple)
    full = draw(st.lists(st.integers(1, sequences), unique=True, max_size=2).map(sorted))
    return CapturePlan(
        window=window,
        model_sizes=draw(sizes),
        full_sizes=tuple(length * count for count in full if length * count <= budget),
        replay_sizes=draw(sizes),
        trim_threshold=draw(st.none() | st.integers(window + 1, 10)),
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        query_len_decode=length,
    )


@settings(max_examples=400, deadline=None)
@given(plan=plans(), all_rows_read=st.booleans())
def test_reachable_rows_are_exactly_those_of_all_batches(plan: CapturePlan, all_rows_read: bool) -> None:
    """P6."""
    intervals = reachable_rows(plan, all_rows_read=all_rows_read)
    rows = {row for low, high in intervals for row in range(low, high + 1)}
    assert rows == rows_by_enumeration(plan, all_rows_read)
    assert all(high + 1 < low for (_, high), (low, _) in zip(intervals, intervals[1:], strict=False))


@settings(max_examples=100, deadline=None)
@given(plan=plans(), all_rows_read=st.booleans())
def test_unreachable_sizes_are_those_that_no_batch_selects(plan: CapturePlan, all_rows_read: bool) -> None:
    """P6, G3."""
    rows = rows_by_enumeration(plan, all_rows_read)
    selected = {next((size for size in plan.replay_sizes if size >= row), None) for row in rows}
    assert set(unreachable_sizes(plan, all_rows_read=all_rows_read)) == set(plan.replay_sizes) - selected


def test_published_explicit_sizes_below_the_window_are_never_selected() -> None:
    """P6: eleven of the thirty sizes of a published config."""
    plan = make_plan(load_config("b200-tp4-c32"))
    assert unreachable_sizes(plan) == (6, 12, 18, 24, 30, 36, 48, 60, 72, 96, 120)


def test_requests_that_keep_all_rows_reach_beyond_the_windows() -> None:
    """P6: two requests of window 128 keep 256 rows, unless all rows of one are read."""
    config = ServingConfig(max_num_seqs=2, max_cudagraph_capture_size=256)
    plan = make_plan(config)
    assert reachable_rows(plan, all_rows_read=False) == ((128, 256),)
    assert reachable_rows(plan) == ((128, 8191),)


def test_the_largest_settings_are_planned_at_once() -> None:
    """Closed form: no loop over rows or requests."""
    config = ServingConfig(
        max_num_batched_tokens=1 << 20,
        max_num_seqs=1 << 20,
        window=1,
        max_cudagraph_capture_size=4096,
        decoder_replay_trim_threshold=2,
    )
    assert unreachable_sizes(make_plan(config)) == ()


def test_rows_that_only_a_uniform_decode_in_a_full_graph_has_are_out_of_reach() -> None:
    """P6: two decodes of two tokens beside a window of one; any other two requests keep fewer rows."""
    plan = CapturePlan(
        window=1,
        model_sizes=(8,),
        full_sizes=(4,),
        replay_sizes=(3, 4),
        trim_threshold=2,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        query_len_decode=2,
    )
    assert reachable_rows(plan, all_rows_read=False) == ((1, 3),)
    assert rows_by_enumeration(plan, all_rows_read=False) == {1, 2, 3}
    assert unreachable_sizes(plan, all_rows_read=False) == (4,)
