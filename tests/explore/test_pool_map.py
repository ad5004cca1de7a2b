"""The address map: laid out and attributed as by hand, and its bytes are those that the prediction has."""

import attrs
import pytest

from replay_sim.capture.graph_memory import GraphMemory
from replay_sim.config import TINY
from replay_sim.decoder.pool_prediction import PlanMemory, record_plan
from replay_sim.explore.pool_map import GROUPS, MIB, PoolMap, pool_maps, recorded
from replay_sim.plan import CapturePlan
from replay_sim.replay.sharing import PoolSharing, SharingChoice

SHAPE = attrs.evolve(TINY, hidden_size=512, num_layers=5, moe_intermediate_size=64)
PLAN = CapturePlan(
    window=TINY.window,
    model_sizes=(8, 64, 256, 600),
    full_sizes=(4, 16),
    replay_sizes=(16, 128, 400),
    trim_threshold=64,
    max_num_seqs=16,
    max_num_batched_tokens=600,
)
NOTHING = GraphMemory("nothing", ())
# Requests from 10 MiB on get a segment of their own size, and a rest of more than 1 MiB becomes a block.
LARGE = GraphMemory("PIECEWISE graph of 9 tokens", ((1, 30 * MIB, True), (1, 0, True)), frozenset({1}))
SMALL = GraphMemory("PIECEWISE graph of 3 tokens", ((2, 40 * MIB, False), (3, 20 * MIB, True), (3, 0, True)))
REPLAY = GraphMemory("replay graph of 2 rows", ((4, 16 * MIB, True), (5, 14 * MIB, True), (4, 0, True), (5, 0, True)))
BY_HAND = PlanMemory(
    before=NOTHING,
    libraries=NOTHING,
    model_graphs=(LARGE, SMALL),
    full_graphs=(),
    replay_graphs=(REPLAY,),
    workspaces=(),
    scratch=(),
    static_bytes=0,
    break_bytes=0,
    sharing=SharingChoice(PoolSharing.SHARED, "by hand"),
    seconds=0.0,
)


def ranges(pool_map: PoolMap, graph: int) -> list[tuple[float, float, int]]:
    """Start and size in MiB and first user of what a graph touches."""
    return [(r.start / MIB, r.size / MIB, r.first_user) for r in pool_map.graphs[graph].ranges]


def segments(pool_map: PoolMap) -> list[tuple[float, float, int]]:
    return [(s.start / MIB, s.size / MIB, s.graph) for s in pool_map.segments]


def test_a_shared_pool_is_the_largest_graphs_and_every_other_graph_lies_in_it() -> None:
    """O1, C8."""
    shared = pool_maps(BY_HAND)[PoolSharing.SHARED]
    assert segments(shared) == [(0, 30, 0)]
    assert [ranges(shared, graph) for graph in range(3)] == [[(0, 30, 0)], [(0, 20, 0)], [(0, 30, 0)]]
    assert [graph.reserved_bytes for graph in shared.graphs] == [30 * MIB] * 3
    assert (shared.reserved_bytes("model"), shared.reserved_bytes("replay")) == (30 * MIB, 0)
    assert (shared.reused_bytes("replay", "model"), shared.reused_bytes("replay", "replay")) == (30 * MIB, 0)


@pytest.mark.parametrize("sharing", [PoolSharing.OWN_STREAM, PoolSharing.OWN_POOL])
def test_on_another_stream_or_in_another_pool_nothing_is_reused(sharing: PoolSharing) -> None:
    """O2: the replay graph adds two segments behind those of the model graphs."""
    own = pool_maps(BY_HAND)[sharing]
    assert segments(own) == [(0, 30, 0), (30, 16, 2), (46, 14, 2)]
    assert ranges(own, 2) == [(30, 30, 2)]
    assert own.reused_bytes("replay", "model") == 0
    assert own.reserved_bytes() == 60 * MIB


def test_smallest_first_cuts_a_graph_where_its_bytes_first_user_changes() -> None:
    """C8: the larger graph finds no block that holds it; the replay graph lies in both."""
    shared = pool_maps(BY_HAND, largest_first=False)[PoolSharing.SHARED]
    assert [graph.name[:9] for graph in shared.graphs] == ["PIECEWISE", "PIECEWISE", "replay gr"]
    assert segments(shared) == [(0, 20, 0), (20, 30, 1)]
    assert ranges(shared, 1) == [(20, 30, 1)]
    assert ranges(shared, 2) == [(0, 16, 0), (20, 14, 1)]
    assert shared.graphs[2].touched_bytes == 30 * MIB


def test_held_outputs_are_reused_by_none() -> None:
    """D5: the largest graph's output stays, and the next graphs need segments of their own."""
    held = pool_maps(BY_HAND, hold_outputs=True)[PoolSharing.SHARED]
    assert segments(held) == [(0, 30, 0), (30, 20, 1), (50, 14, 2)]
    assert ranges(held, 2) == [(30, 16, 1), (50, 14, 2)]


def test_the_reuse_table_counts_each_byte_once() -> None:
    table = pool_maps(BY_HAND)[PoolSharing.SHARED].reuse_table()
    assert table.loc["model graphs"].tolist() == [2, 30, 0, 30]
    assert table.loc["replay graphs"].tolist() == [1, 30, 0, 0]


@pytest.fixture(scope="module")
def memory() -> PlanMemory:
    return record_plan(SHAPE, PLAN)


@pytest.mark.parametrize("hold_outputs", [False, True])
@pytest.mark.parametrize("largest_first", [True, False])
def test_the_map_reserves_what_is_predicted(memory: PlanMemory, largest_first: bool, hold_outputs: bool) -> None:
    """O1-O5: 0 bytes apart, in every arrangement."""
    maps = pool_maps(memory, largest_first=largest_first, hold_outputs=hold_outputs)
    for growth in memory.predict(largest_first=largest_first, hold_outputs=hold_outputs):
        pool_map = maps[growth.arrangement]
        assert pool_map.reserved_bytes(growth.group) == growth.pool_bytes
        assert sum(graph.group == growth.group for graph in pool_map.graphs) == growth.num_graphs


def test_what_a_graph_touches_is_reserved_by_then_and_has_a_first_user_that_touched_it(memory: PlanMemory) -> None:
    for pool_map in pool_maps(memory, largest_first=False).values():
        for number, graph in enumerate(pool_map.graphs):
            edges = [(touched.start, touched.start + touched.size) for touched in graph.ranges]
            assert all(end <= start for (_, end), (start, _) in zip(edges, edges[1:], strict=False))
            assert edges[-1][1] <= graph.reserved_bytes
            for touched in graph.ranges:
                assert touched.first_user <= number
                first = pool_map.graphs[touched.first_user].ranges
                assert any(r.start <= touched.start < r.start + r.size for r in first)


def test_a_plan_is_recorded_once() -> None:
    plan = attrs.evolve(PLAN, model_sizes=(8,), full_sizes=(), replay_sizes=(16,), trim_threshold=None)
    assert recorded(SHAPE, plan) is recorded(SHAPE, attrs.evolve(plan))
    assert [graph.group for graph in pool_maps(recorded(SHAPE, plan))[PoolSharing.SHARED].graphs] == list(GROUPS)
