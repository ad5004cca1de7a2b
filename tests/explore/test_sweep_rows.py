"""Rows of a sweep against dispatch and scoring step by step, each point by itself."""

import json
import math
from collections import Counter
from functools import partial

import attrs
import pytest
from explore.sweep_cases import CONFIG, FAILED, LENGTHS, POINTS, WORKLOAD, run_one_by_one

from replay_sim.batch.dispatch import CudagraphMode, dispatch_step
from replay_sim.explore.sweep_plans import config_of, plan_of
from replay_sim.explore.sweep_points import DesignPoint, SweptWorkload, schedule_of
from replay_sim.explore.sweep_rows import COLUMNS, TIMES, Row, is_row_of, run_group
from replay_sim.explore.sweep_steps import count_schedule, dispatch_steps
from replay_sim.explore.tuning_costs import fitted_costs
from replay_sim.explore.tuning_score import dispatched, score
from replay_sim.explore.tuning_steps import step_keys
from replay_sim.plan import CapturePlan, plan_cost
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import Simulation, planned_dispatch
from replay_sim.workload.trace import TraceRequest

ROWS = run_group(POINTS, WORKLOAD)
RAN = [point for point in POINTS if point.index not in FAILED]


def requests() -> list[TraceRequest]:
    return [TraceRequest(0.0, prompt, output, str(index)) for index, (prompt, output) in enumerate(LENGTHS)]


def planned(point: DesignPoint) -> CapturePlan:
    config = config_of(point)
    return plan_of(point, config, count_schedule(requests(), schedule_of(point)).at_window(config.window))


def simulated(point: DesignPoint, plan: CapturePlan) -> Simulation:
    simulation = Simulation()
    settings = SchedulerSettings.from_config(config_of(point))
    for _ in simulation.watch(Scheduler(requests(), settings, dispatch=planned_dispatch(plan)).steps()):
        pass
    return simulation


@pytest.mark.parametrize("point", RAN, ids=lambda point: f"{dict(point.settings)} {point.plan}")
def test_a_row_counts_what_dispatch_does_step_by_step(point: DesignPoint) -> None:
    """D1-D3, S5: every step of the point's own schedule under its own plan, through the dispatch of a real engine."""
    plan, row = planned(point), ROWS[point.index]
    simulation = simulated(point, plan)
    modes = Counter[CudagraphMode]()
    for (_, _, mode), count in simulation.table.model.items():
        modes[mode] += count
    graphs = sum(count for (_, _, mode), count in simulation.table.replay.items() if mode is CudagraphMode.PIECEWISE)
    assert (row["full_steps"], row["piecewise_steps"], row["eager_steps"]) == tuple(
        modes[m] for m in list(CudagraphMode)[::-1]
    )
    assert (row["steps"], row["num_tokens"]) == (simulation.steps, simulation.tokens)
    assert row["padded_tokens"] == simulation.tokens + simulation.token_pads
    assert (row["replay_steps"], row["replay_graph_steps"]) == (simulation.replay_steps, graphs)
    assert row["replay_rows"] == simulation.replay_rows
    assert row["padded_rows"] == simulation.replay_rows + simulation.replay_pads
    cost = plan_cost(plan)
    assert row["decoder_replay_cudagraph_capture_sizes"] == list(plan.replay_sizes)
    assert (row["num_replay_graphs"], row["static_buffer_bytes"]) == (cost.num_replay_graphs, cost.static_buffer_bytes)
    assert row["break_buffer_bytes"] == cost.break_buffer_bytes


@pytest.mark.parametrize("point", RAN[::3], ids=lambda point: f"{dict(point.settings)} {point.plan}")
def test_times_are_those_that_plans_are_tuned_by(point: DesignPoint) -> None:
    """As `tune` scores a plan; without replay as if every step kept all rows and no graph broke."""
    plan, row = planned(point), ROWS[point.index]
    steps = list(Scheduler(requests(), SchedulerSettings.from_config(config_of(point))).steps())
    counts, costs = Counter(step_keys(steps, plan)), fitted_costs(config_of(point))
    scored = score(plan, counts, costs)
    assert row["expected_step_ms"] == pytest.approx(scored.expected_step_ms, rel=1e-12)
    assert row["workload_s"] == pytest.approx(scored.expected_step_ms * scored.steps / 1000, rel=1e-12)
    off = partial(
        dispatch_step,
        plan=attrs.evolve(plan, trim_threshold=None, replay_sizes=()),
        model_sizes=plan.model_sizes,
        full_sizes=plan.full_sizes,
        replay_sizes=(),
        replay=False,
    )
    off_ms = sum(costs.seconds(off(step.batch)) for step in steps) * 1000 / len(steps)
    assert row["replay_off_step_ms"] == pytest.approx(off_ms, rel=1e-12)
    assert row["speedup"] == pytest.approx(off_ms / scored.expected_step_ms, rel=1e-12)
    unseen = {key: costs.outside(key, dispatched(key, plan), plan) for key in counts}
    kept = Counter({key: count for key, count in counts.items() if unseen[key]})
    guessed = score(plan, kept, costs).expected_step_ms * kept.total() if kept else 0.0
    assert row["extrapolated_share"] == pytest.approx(guessed / scored.expected_step_ms / scored.steps, abs=1e-12)
    assert set(row["outside"].split("; ")) - {""} == set(filter(None, unseen.values()))
    assert row["source"] == scored.source


@pytest.mark.parametrize("changes", [{"window": 4}, {"decoder_replay_trim_threshold": 96}, {"cudagraph_mode": "NONE"}])
def test_the_schedule_depends_on_neither_window_nor_plan(changes: dict[str, object]) -> None:
    """What lets the points of a group share one simulation: no step time, no prefix cache."""
    settings = [SchedulerSettings.from_config(config) for config in (CONFIG, attrs.evolve(CONFIG, **changes))]
    own, other = ([step.batch for step in Scheduler(requests(), each).steps()] for each in settings)
    assert len(own) > 20 and own == other


def test_dispatch_of_all_steps_at_once_is_dispatch_of_each() -> None:
    for point in RAN:
        plan = planned(point)
        steps = count_schedule(requests(), schedule_of(point)).at_window(plan.window)
        ran = dispatch_steps(steps, plan)
        for index in range(steps.tokens.size):
            one = dispatched(steps.key(index), plan)
            assert (ran.padded_tokens[index], ran.padded_rows[index]) == (one.padded_tokens, one.padded_rows)
            assert ("NONE", "PIECEWISE", "FULL")[ran.mode[index]] == one.mode and ran.in_graph[index] == one.in_graph


def test_shared_simulations_change_nothing() -> None:
    """Equal to the last digit, whatever ran before in this process."""
    assert run_one_by_one(POINTS[::-1], WORKLOAD)[::-1] == ROWS


def test_sizes_end_at_the_budget_but_for_the_configs_own() -> None:
    """P3, P4: the config's list stays as it was."""
    by_plan = {(row["plan"], row["max_num_batched_tokens"]): row for row in ROWS if row["window"] == 8}
    assert by_plan["default", 48]["cudagraph_capture_sizes"] == [3, 6, 12, 16, 32, 48]
    assert by_plan["default", 128]["cudagraph_capture_sizes"] == [3, 6, 12, 16, 32, 64, 96]
    assert by_plan["explicit", 48]["error"] and CONFIG.cudagraph_capture_sizes == (3, 6, 12, 16, 32, 64, 96)
    assert by_plan["eager", 128]["num_replay_graphs"] == 0 < by_plan["eager", 128]["replay_steps"]
    assert by_plan["optimal-1", 128]["num_replay_graphs"] == 1
    assert by_plan["optimal", 128]["padded_rows"] <= by_plan["default", 128]["padded_rows"]


def test_a_point_that_fails_is_a_row_with_its_reason() -> None:
    """Issue 9, Sweeps; P3, P5, and a budget that holds no decode."""
    assert [row["point"] for row in ROWS if row["error"]] == FAILED and 0 < len(FAILED) < len(POINTS)
    assert all(tuple(row) == COLUMNS for row in ROWS)
    row = ROWS[FAILED[-1]]
    assert "decoder_replay_trim_threshold: 32 is not allowed; it must exceed window 40" in row["error"]
    assert (row["window"], row["plan"], row["steps"], row["expected_step_ms"]) == (40, "eager", None, None)
    tight = attrs.evolve(POINTS[0], settings=(("max_num_batched_tokens", 2), ("max_num_seqs", 2)))
    (row,) = run_group([tight], WORKLOAD)
    assert "max_num_batched_tokens is 2: it must hold one decode" in row["error"]
    (row,) = run_group([POINTS[0]], SweptWorkload("nothing", ()))
    assert "no requests" in row["error"]


def test_a_fault_of_the_program_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Row:
        raise RuntimeError("CUDA error: an illegal access\nCompile with more checks\n")

    monkeypatch.setattr("replay_sim.explore.sweep_rows.step_columns", broken)
    (row,) = run_group(POINTS[:1], WORKLOAD)
    assert row["error"] == "RuntimeError: CUDA error: an illegal access Compile with more checks"


def test_every_row_is_one_of_its_sweep_as_a_file_of_json_gives_it_back() -> None:
    assert all(is_row_of(POINTS, json.loads(json.dumps(row))) for row in ROWS)


RAN_ROW, FAILED_ROW = ROWS[RAN[0].index], ROWS[FAILED[0]]
NO_ROWS: dict[str, Row] = {
    "a point alone": {"point": 0},
    "a column more": RAN_ROW | {"note": ""},
    "a column less": {name: value for name, value in RAN_ROW.items() if name != "speedup"},
    "a point beyond the sweep": RAN_ROW | {"point": len(POINTS)},
    "a point before the sweep": RAN_ROW | {"point": -1},
    "a point that is true": RAN_ROW | {"point": True},
    "the point of another design": RAN_ROW | {"point": RAN[1].index},
    "another window": RAN_ROW | {"window": 5},
    "a window that is a float": RAN_ROW | {"window": float(RAN_ROW["window"])},
    "another plan": RAN_ROW | {"plan": "tuned"},
    "a time that is text": RAN_ROW | {"workload_s": "<b>"},
    "a time beyond floats": RAN_ROW | {"workload_s": 10**400},
    "a time that is true": RAN_ROW | {"workload_s": True},
    "no time": RAN_ROW | {"workload_s": None},
    "an infinite share": RAN_ROW | {"extrapolated_share": float("inf")},
    "steps below none": RAN_ROW | {"steps": -1},
    "bytes beyond any": RAN_ROW | {"static_buffer_bytes": 1 << 63},
    "sizes in words": RAN_ROW | {"cudagraph_capture_sizes": "1 2"},
    "a size that is a float": RAN_ROW | {"cudagraph_capture_sizes": [1.0]},
    "an escape": RAN_ROW | {"source": "\x1b[2J"},
    "no Unicode": RAN_ROW | {"outside": "\ud800"},
    "no source": RAN_ROW | {"source": None},
    "figures and an error": RAN_ROW | {"error": "failed"},
    "neither figures nor an error": FAILED_ROW | {"error": ""},
}
NO_ROWS |= {f"{name} {value}": RAN_ROW | {name: value} for name in TIMES for value in (-1.0, math.nan, -math.inf)}


@pytest.mark.parametrize("row", NO_ROWS.values(), ids=NO_ROWS)
def test_what_no_point_can_have_is_no_row(row: Row) -> None:
    """Issue 8: a row that a file of finished points holds is believed only if this sweep can have made it."""
    assert not is_row_of(POINTS, row)
