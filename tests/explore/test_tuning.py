"""Tuning a config on counted steps: scores, limits, the guarantee, and what a logged table gives (issue 6)."""

from collections import Counter
from pathlib import Path

import attrs
import numpy as np
import pytest
from explore.tuning_cases import PlainCosts, drawn_steps

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable
from replay_sim.batch.request import Batch
from replay_sim.config import ServingConfig, load_config
from replay_sim.config.presets import preset_names
from replay_sim.explore.tuning import tune
from replay_sim.explore.tuning_limits import Limits, measured_capture_seconds
from replay_sim.explore.tuning_plans import choice_of, config_with, default_config, kept_for_full
from replay_sim.explore.tuning_score import dispatched, score
from replay_sim.explore.tuning_steps import from_statistics, in_halves, mixed_steps, step_key, step_keys
from replay_sim.plan import CapturePlan, full_capture_sizes, make_plan
from replay_sim.plan.joint import JointSizes
from replay_sim.workload.scheduler import Scheduler
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.simulation import planned_dispatch
from replay_sim.workload.statistics_table import read_statistics
from replay_sim.workload.trace import TraceRequest

SMALL = ServingConfig(
    window=8,
    max_num_seqs=6,
    max_num_batched_tokens=128,
    num_speculative_tokens=2,
    cudagraph_capture_sizes=[3, 6, 12, 16, 32, 64, 96],
    decoder_replay_trim_threshold=32,
)
REQUESTS = [(11, 7), (130, 4), (5, 9), (40, 1), (77, 20), (300, 2), (16, 12), (9, 3)]
COSTS = PlainCosts()


def requests() -> list[TraceRequest]:
    return [TraceRequest(0.0, prompt, output, str(index)) for index, (prompt, output) in enumerate(REQUESTS)]


def scheduled(config: ServingConfig) -> list:
    settings = SchedulerSettings.from_config(config)
    return list(Scheduler(requests(), settings, dispatch=planned_dispatch(make_plan(config))).steps())


@pytest.mark.parametrize("replay_sizes", [None, [8, 20, 40]])
def test_a_counted_step_is_dispatched_as_the_batch_that_it_came_from(replay_sizes: list | None) -> None:
    """D1-D3, S5: counts lose nothing that dispatch looks at."""
    config = attrs.evolve(SMALL, decoder_replay_cudagraph_capture_sizes=replay_sizes)
    plan = make_plan(config)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        count = int(rng.integers(1, 7))
        decode = rng.random(count) < rng.choice([0.3, 1.0])
        lengths = np.where(decode, 3, rng.integers(1, 60, count))
        batch = Batch.from_columns(lengths, np.where(decode, 50, 0), decode)
        record = planned_dispatch(plan)(batch)
        ran = dispatched(step_key(batch, plan), plan)
        assert (ran.mode, ran.padded_tokens, ran.padded_rows) == (
            record.mode.value,
            record.padded_tokens,
            record.padded_rows,
        )
        assert ran.in_graph == (record.replay_mode is CudagraphMode.PIECEWISE)
        seen.add((record.mode, record.replay_mode))
    assert len(seen) == (4 if replay_sizes is None else 5)


def test_steps_alike_have_the_key_of_each_ones_batch() -> None:
    """Decodes that follow one another share columns, and each is counted."""
    plan, steps = make_plan(SMALL), scheduled(SMALL)
    assert len({id(step.columns) for step in steps}) < len(steps)
    assert list(step_keys(steps, plan)) == [step_key(step.batch, plan) for step in steps]


def test_a_score_is_the_sum_over_the_steps_of_a_schedule() -> None:
    """Expected step time and padded rows, against the records one by one."""
    plan = make_plan(SMALL)
    steps = scheduled(SMALL)
    us = padded = 0.0
    for step in steps:
        record = step.record
        us += COSTS.model_us(record.padded_tokens, record.mode.value, record.has_replay_batch)
        if record.has_replay_batch:
            us += COSTS.replay_us(record.padded_rows, record.replay_mode is CudagraphMode.PIECEWISE)
            padded += record.padded_rows
    first, second = in_halves(step_keys(steps, plan))
    assert (first.total(), second.total()) == ((len(steps) + 1) // 2, len(steps) // 2)
    scored = score(plan, first + second, COSTS)
    assert scored.expected_step_ms == pytest.approx(us / len(steps) / 1000)
    assert (scored.padded_rows, scored.num_replay_graphs) == (padded, len(plan.replay_sizes))


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("seed", range(2))
def test_tuned_with_as_many_graphs_is_never_worse_on_what_it_was_tuned_on(name: str, seed: int) -> None:
    """Issue 6, 4: against the default and the config's own; the unseen half is shown as it is."""
    config = load_config(name)
    tuning = tune(config, drawn_steps(config, seed, 50), drawn_steps(config, seed + 100, 50), COSTS)
    default, own, tuned = tuning.plans
    assert tuned.seen.num_replay_graphs <= max(default.seen.num_replay_graphs, own.seen.num_replay_graphs)
    assert tuned.seen.num_model_graphs <= own.seen.num_model_graphs
    assert tuned.seen.expected_step_ms <= default.seen.expected_step_ms
    assert tuned.seen.expected_step_ms <= own.seen.expected_step_ms
    assert all(plan.unseen is not None and plan.unseen.steps for plan in tuning.plans)
    assert full_capture_sizes(config) == tuned.plan.full_sizes


def test_tuning_finds_the_sizes_of_a_workload_of_two_steps() -> None:
    """Two kinds of step: each has its size, the long one breaks, and nothing else is captured."""
    config = attrs.evolve(SMALL, cudagraph_mode="PIECEWISE")
    tuning = tune(config, Counter({(90, 24, False): 3, (20, 20, False): 1}), None, COSTS)
    assert tuning.tuned.plan.model_sizes == (20, 90)
    assert tuning.tuned.plan.breaking_sizes == (90,)
    assert tuning.tuned.plan.replay_sizes == (24,)
    assert tuning.tuned.unseen is None
    assert config.cudagraph_capture_sizes == (3, 6, 12, 16, 32, 64, 96)


@pytest.mark.parametrize(
    "limits", [Limits(max_graphs=2), Limits(max_graphs=0), Limits(max_model_graphs=8, max_graphs=3)]
)
def test_limits_on_graphs_are_kept(limits: Limits) -> None:
    """The curve goes on beyond them, to show what more would buy."""
    config = load_config("default")
    if limits.max_model_graphs is not None:
        limits = attrs.evolve(limits, max_model_graphs=len(kept_for_full(make_plan(config))) + 3)
    tuned = tune(config, drawn_steps(config, 1, 60), None, COSTS, limits)
    assert len(tuned.tuned.plan.replay_sizes) <= limits.max_graphs
    assert len(tuned.tuned.plan.model_sizes) <= (limits.max_model_graphs or len(tuned.own.plan.model_sizes))
    assert max(point.score.num_replay_graphs for point in tuned.replay_curve) > limits.max_graphs
    costs = [point.score.expected_step_ms for point in tuned.replay_curve]
    assert costs == sorted(costs, reverse=True)


def test_a_limit_on_capture_seconds_picks_a_point_with_fewer_graphs() -> None:
    """Seconds a graph come from the bundled records."""
    config = load_config("default")
    seconds = measured_capture_seconds()
    assert 0.05 < seconds.replay < seconds.model < 5 and "H200" in seconds.source
    free = tune(config, drawn_steps(config, 2, 60), None, COSTS)
    most = seconds.of(free.tuned.plan) - 1.5 * seconds.model
    limited = tune(config, drawn_steps(config, 2, 60), None, COSTS, Limits(max_capture_s=most))
    assert seconds.of(limited.tuned.plan) <= most
    assert limited.tuned.seen.expected_step_ms >= free.tuned.seen.expected_step_ms
    with pytest.raises(ValueError, match="max_capture_s 0.1"):
        tune(config, drawn_steps(config, 2, 60), None, COSTS, Limits(max_capture_s=0.1))


def test_a_limit_on_pool_bytes_is_asked_of_the_prediction() -> None:
    """Memory grows with the largest size here; the point taken is within the limit."""
    config = load_config("default")
    free = tune(config, drawn_steps(config, 3, 60), None, COSTS)
    most = free.tuned.plan.largest_size - 1
    limited = tune(
        config, drawn_steps(config, 3, 60), None, COSTS, Limits(max_pool_bytes=most), lambda p: p.largest_size
    )
    assert limited.tuned.plan.largest_size <= most
    with pytest.raises(ValueError, match="max_pool_bytes 0"):
        tune(config, drawn_steps(config, 3, 60), None, COSTS, Limits(max_pool_bytes=0), lambda plan: 1)


def test_pools_are_predicted_once_for_each_plan_and_not_at_all_where_the_largest_graph_is_too_much() -> None:
    """A prediction takes seconds: no plan is asked for twice, and few in full."""
    asked = []

    def pool_bytes(plan: CapturePlan) -> int:
        asked.append(plan)
        return 10 * plan.largest_size + len(plan.model_sizes)

    config = load_config("default")
    tuning = tune(config, drawn_steps(config, 3, 60), None, COSTS, Limits(max_pool_bytes=6000), pool_bytes)
    assert 10 * tuning.tuned.plan.largest_size + len(tuning.tuned.plan.model_sizes) <= 6000
    assert len(set(asked)) == len(asked)
    assert all(plan.largest_size <= 600 for plan in asked if len(plan.model_sizes) > 1)


@pytest.mark.parametrize("name", ["max_graphs", "max_capture_s", "max_pool_bytes"])
def test_a_limit_below_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: -1})


def test_what_cannot_be_tuned_is_refused() -> None:
    for mode in ("NONE", "FULL", "FULL_DECODE_ONLY"):
        with pytest.raises(ValueError, match=f"cudagraph_mode: {mode} is .* one of PIECEWISE, FULL_AND_PIECEWISE"):
            tune(attrs.evolve(SMALL, cudagraph_mode=mode), Counter({(9, 9, False): 1}), None, COSTS)
    with pytest.raises(ValueError, match="no steps"):
        tune(SMALL, Counter(), None, COSTS)


def test_steps_that_all_run_in_full_graphs_leave_the_config_as_it_is() -> None:
    tuning = tune(SMALL, Counter({(6, 6, True): 5}), None, COSTS)
    assert tuning.tuned.seen.expected_step_ms == tuning.own.seen.expected_step_ms
    assert tuning.replay_curve == () and tuning.mixed_steps == 0


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8, 16, 64], [7, 100], [5, 6, 7, 8, 9, 90]])
def test_the_kept_sizes_make_the_same_full_graphs(sizes: list[int]) -> None:
    """FULL sizes stay as they are, and with one kept size less they would not."""
    config = attrs.evolve(SMALL, cudagraph_capture_sizes=sizes)
    plan = make_plan(config)
    kept = kept_for_full(plan)
    assert set(kept) <= set(plan.model_sizes)
    assert full_capture_sizes(attrs.evolve(config, cudagraph_capture_sizes=kept)) == plan.full_sizes
    for size in kept[:-1]:
        fewer = [other for other in kept if other != size]
        assert full_capture_sizes(attrs.evolve(config, cudagraph_capture_sizes=fewer)) != plan.full_sizes


def test_no_model_size_is_added_that_would_add_a_full_graph() -> None:
    """A6: below the widest decode the largest model size decides the FULL graphs, whatever it would buy."""
    config = attrs.evolve(SMALL, cudagraph_capture_sizes=[3, 6, 12])
    assert full_capture_sizes(config) == (3, 6, 12) and config.max_num_seqs * config.query_len_decode == 18
    tuning = tune(config, Counter({(90, 24, False): 9, (9, 9, False): 1}), None, COSTS)
    assert tuning.tuned.plan.full_sizes == (3, 6, 12) and tuning.tuned.plan.model_sizes[-1] <= 12
    wide = attrs.evolve(SMALL, cudagraph_capture_sizes=[3, 6, 18])
    tuning = tune(wide, Counter({(90, 24, False): 9, (9, 9, False): 1}), None, COSTS, Limits(max_model_graphs=4))
    assert tuning.tuned.plan.full_sizes == (3, 6, 18) and tuning.tuned.plan.model_sizes[-1] == 90


def test_the_default_is_the_config_without_its_replay_settings() -> None:
    """P2 and P4: the rule's replay sizes and threshold, the model's own sizes."""
    config = load_config("b200-tp4-c32")
    default = make_plan(default_config(config))
    assert default.model_sizes == make_plan(config).model_sizes
    assert default.replay_sizes[0] == 128 and default.trim_threshold == 768
    wide = attrs.evolve(config, window=1024, decoder_replay_trim_threshold=2048)
    assert make_plan(default_config(wide)).trim_threshold == 2048


def test_no_replay_size_and_no_break_have_a_config_too() -> None:
    """An empty list would mean the rule's sizes, and a threshold is a number."""
    config = config_with(SMALL, JointSizes((16, 32), None, (), 0.0))
    assert not config.cudagraph_decoder_replay and make_plan(config).replay_sizes == ()
    assert make_plan(config).breaking_sizes == () and config.decoder_replay_trim_threshold == 33
    assert choice_of(make_plan(config)) == JointSizes((16, 32), None, (), 0.0)


def test_a_logged_table_gives_the_steps_that_it_counts(tmp_path: Path) -> None:
    """Issue 6, 6: tokens by mode from the table, rows from the table of replay graphs, most to most."""
    plan = make_plan(SMALL)
    table = DispatchTable()
    table.extend(step.record for step in scheduled(SMALL))
    path = tmp_path / "server.log"
    path.write_text(table.markdown())
    counted = from_statistics(read_statistics(path), plan)
    truth = Counter(step_keys(scheduled(SMALL), plan))
    assert counted.counts.total() == truth.total()
    by_tokens = [Counter({key[0]: 0 for key in counts}) for counts in (counted.counts, truth)]
    for tokens, counts in zip(by_tokens, (counted.counts, truth), strict=True):
        for (number, _, _), count in counts.items():
            tokens[number] += count
    assert by_tokens[0] == by_tokens[1]
    assert all(rows <= tokens for tokens, rows, _ in counted.counts)
    tuning = tune(SMALL, counted.counts, None, COSTS)
    assert tuning.tuned.seen.expected_step_ms <= tuning.default.seen.expected_step_ms


def test_without_a_table_of_replay_graphs_rows_are_assumed_and_said(tmp_path: Path) -> None:
    """One prefill beside the usual decodes."""
    header = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n|---|---|---|---|---|\n"
    path = tmp_path / "server.log"
    path.write_text(header + "| 9 | 9 | 0 | FULL | 10 |\n| 90 | 96 | 6 | PIECEWISE | 2 |\n| 12 | 12 | 0 | NONE | 1 |\n")
    counted = from_statistics(read_statistics(path), make_plan(SMALL))
    assert counted.counts == Counter({(9, 9, True): 10, (90, 17, False): 2, (12, 12, False): 1})
    (said,) = counted.assumed
    assert "3 steps are assumed" in said and "9 decode tokens" in said


def test_mixed_steps_are_those_outside_of_full_graphs() -> None:
    counts = Counter({(6, 6, True): 4, (6, 6, False): 1, (60, 14, False): 2})
    steps = mixed_steps(counts, make_plan(SMALL))
    assert steps.tokens.tolist() == [6, 60] and steps.weights.tolist() == [1.0, 2.0]


def test_a_table_of_very_many_steps_takes_no_longer(tmp_path: Path) -> None:
    """Counts are added up, never written out."""
    path = tmp_path / "server.log"
    header = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n|---|---|---|---|---|\n"
    model = (
        "**Model graphs**\n\n" + header + "| 90 | 96 | 6 | PIECEWISE | 4000000000 |\n| 60 | 64 | 4 | PIECEWISE | 5 |\n"
    )
    replay = (
        "\n**Replay graphs**\n\n"
        + header
        + "| 20 | 24 | 4 | PIECEWISE | 3999999999 |\n| 9 | 16 | 7 | PIECEWISE | 3 |\n"
    )
    path.write_text(model + replay)
    counted = from_statistics(read_statistics(path), make_plan(SMALL))
    assert counted.counts == Counter(
        {(90, 20, False): 3999999999, (90, 9, False): 1, (60, 9, False): 2, (60, 8, False): 3}
    )
