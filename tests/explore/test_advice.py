"""The recommendation: the winner and its margin first, every number in it what the functions return."""

import re

import attrs
import pytest
from explore.report_cases import default_evidence, default_job, small_job

from replay_sim.explore import tuning_report
from replay_sim.explore.advice import advise, plan_verdict
from replay_sim.explore.evidence import gather
from replay_sim.explore.threshold_curves import curve_key
from replay_sim.explore.tuning_score import score
from replay_sim.explore.workload_steps import tuned_workload
from replay_sim.measure.records import bundled_records
from replay_sim.measure.trim_curve import crossing, threshold_costs, trim_curves
from replay_sim.plan import plan_cost
from replay_sim.workload.source import open_workload

DROPPED = {"decoder_replay_cudagraph_capture_sizes": [2, 4, 32], "decoder_replay_trim_threshold": 32}
STEPS = {name: record for name, record in bundled_records() if record.kind in ("steps", "prefill")}
MIB = 1 << 20


def fact(pattern: str) -> tuple[str, ...]:
    """The groups of the only fact of the default's recommendation that matches as a whole."""
    (found,) = filter(None, (re.fullmatch(pattern, one) for one in advise(default_evidence()).facts))
    return found.groups()


def measured_us(name: str, arm: str, tokens: int) -> float:
    """The time of one prompt at window 128 with 48 experts, read from the points of a record."""
    key, time = ("num_tokens", "step_us") if name.startswith("steps") else ("prompt_tokens", "prefill_us")
    (us,) = (
        point[time]
        for point in STEPS[name].points
        if (point["arm"], point[key], point["window"], point["num_local_experts"]) == (arm, tokens, 128, 48)
        and (point.get("num_reqs", 1), point.get("computed", 0)) == (1, 0)
    )
    return us


def test_it_leads_with_the_winner_and_its_margin_as_tuned_afresh() -> None:
    requests, words = open_workload(num_requests=50)
    again = tuned_workload(default_job().config, tuple(requests), words)
    headline = advise(default_evidence()).headline
    assert headline == tuning_report.headline(again.tuning)
    ms = {plan.name: score(plan.plan, again.unseen, again.costs).expected_step_ms for plan in again.tuning.plans}
    assert f"take {1 - ms['tuned'] / ms['own']:.1%} less time a step" in headline
    assert f"{ms['tuned']:.3f} ms against {ms['own']:.3f} and {ms['default']:.3f} (modelled)" in headline


def test_the_margin_where_sizes_are_a_choice_is_that_of_the_scores() -> None:
    said = fact(
        r"Of these steps ([\d,]+) of ([\d,]+) run .* takes ([\d.]+)% less, ([\d.]+) ms tuned against ([\d.]+) .*"
    )
    workload = default_job().tuned
    own, tuned = (score(plan.plan, workload.unseen, workload.costs) for plan in workload.tuning.plans[1:])
    less = 1 - tuned.mixed_step_ms / own.mixed_step_ms
    assert said == (
        str(own.mixed_steps),
        str(workload.unseen.total()),
        f"{100 * less:.1f}",
        f"{tuned.mixed_step_ms:.3f}",
        f"{own.mixed_step_ms:.3f}",
    )


def test_how_much_is_extrapolated_is_what_the_costs_say() -> None:
    workload = default_job().tuned
    guesses = workload.costs.guesses(workload.tuning.tuned.plan, workload.unseen)
    said = [one for one in advise(default_evidence()).facts if one.startswith("The model is extrapolated to ")]
    listed = "; ".join(guess.removeprefix("extrapolated, ") for guess in guesses[:3])
    assert len(said) == bool(guesses) and all(listed in one for one in said)


def test_the_speedups_are_those_of_the_records_points() -> None:
    pattern = r".* takes of replay off's time ([\d.]+)% at ([\d,]+) tokens \(measured, (\S+)\), "
    pattern += r"([\d.]+)% at ([\d,]+) tokens \(measured, (\S+)\); one prompt a step, 48 experts a rank; "
    pattern += r"measured on NVIDIA H200, driver .*\."
    said = fact(pattern)
    for percent, tokens, name in (said[:3], said[3:]):
        ours, off = (
            measured_us(name, arm, int(tokens.replace(",", ""))) for arm in ("piecewise_replay_graphs", "eager_off")
        )
        assert percent == f"{100 * ours / off:.1f}"
    assert [said[1], said[4]] == ["1,024", "4,096"], (
        "the shortest and longest prompt that the default's graphs break for"
    )


def test_the_crossing_and_the_cost_of_the_threshold_are_those_of_the_measured_curve() -> None:
    points = [point for name, record in STEPS.items() if record.kind == "steps" for point in record.points]
    (curve,) = (one for one in trim_curves(points) if one.key == curve_key("piecewise_replay_graphs"))
    assert fact(r"With one prompt a step, measured on NVIDIA H200, the break (.*)\.") == (crossing(curve).text,)
    workload, plan = default_job().tuned, default_job().plan
    steps = {}
    for (tokens, _, uniform), count in (workload.seen + workload.unseen).items():
        if 128 < tokens <= plan.model_sizes[-1] and not (uniform and tokens <= plan.full_sizes[-1]):
            steps[tokens] = steps.get(tokens, 0) + count
    costs = threshold_costs(curve, steps)
    pattern = r"This config's threshold, (\d+), costs ([\d.]+)% more than the best, ([\d,]+), on this workload's "
    assert fact(pattern + r"([\d,]+) steps .*: ([\d.]+) ms a step\.") == (
        str(plan.trim_threshold),
        f"{100 * (costs.of(768) / min(costs.by_threshold.values()) - 1):.1f}",
        f"{costs.best:,.0f}",
        f"{sum(steps.values()):,}",
        f"{costs.of(768) / 1e3:.2f}",
    )


def test_what_the_plan_costs_is_what_plan_and_pool_say() -> None:
    plan = default_job().plan
    cost = plan_cost(plan, default_job().shape)
    pattern = r"The plan captures (\d+) replay graphs beside (\d+) piecewise and (\d+) full .*"
    assert fact(pattern) == tuple(str(len(sizes)) for sizes in (plan.replay_sizes, plan.model_sizes, plan.full_sizes))
    buffers = (cost.static_buffer_bytes, cost.break_buffer_bytes)
    assert fact(r".* static buffers take ([\d,]+) MiB and its break buffers ([\d,]+) MiB\.") == tuple(
        f"{nbytes / MIB:,.0f}" for nbytes in buffers
    )
    (record,) = (record for name, record in bundled_records("pool") if name == "pool-default-nvidia-h200.json")
    usual = {
        point["group"]: tuple(f"{point[key] / MIB:,.0f}" for key in ("predicted_bytes", "reserved_bytes"))
        for point in record.points
        if (point["arrangement"], point["order"], point["outputs"]) == ("shared", "largest_first", "dropped")
    }
    said = fact(r"Model graphs reserve ([\d,]+) MiB, replay graphs ([\d,]+) .*measured ([\d,]+) and ([\d,]+) MiB\)\.")
    assert (said[0], said[2]) == usual["model"] and (said[1], said[3]) == usual["replay"]
    pads = fact(r"Over all reachable row counts ([\d.]+)% .* with ([\d,]+) rows, ([\d.]+)%\.")
    assert pads == (f"{100 * cost.mean_padding:.1f}", f"{cost.worst_padding_rows:,}", f"{100 * cost.worst_padding:.1f}")


def test_dispatches_are_those_of_the_simulation() -> None:
    simulation = default_job().simulation
    said = fact(
        r"Of (\d+) steps (\d+) \(([\d.]+)%\) have .* skip ([\d,]+) of ([\d,]+) rows and run on ([\d,]+) pads .*"
    )
    rows = sum(rows * count for (rows, _, _), count in simulation.table.replay.items())
    padded = sum(padded * count for (_, padded, _), count in simulation.table.replay.items())
    assert said == (
        str(simulation.steps),
        str(simulation.table.replay.total()),
        f"{100 * simulation.table.replay.total() / simulation.steps:.1f}",
        f"{simulation.trimmed_rows:,}",
        f"{simulation.trimmed_rows + rows:,}",
        f"{padded - rows:,}",
    )
    assert fact(r"The config's own plan, by counts alone: (.*)") == (plan_verdict(default_job()),)


def test_a_config_that_was_not_tuned_leads_with_its_plan_and_says_why(tmp_path) -> None:
    advice = advise(gather(small_job(tmp_path, cudagraph_mode="NONE"), []))
    assert advice.headline.startswith("This config captures no replay graphs")
    assert advice.facts[0].startswith("The config was not tuned on this workload: cudagraph_mode: NONE is not allowed")
    assert "No record has steps of a GPU: nothing here was measured" in advice.facts[-2]


def test_prompts_that_the_config_runs_otherwise_are_said_to_be_conditional() -> None:
    found = default_evidence()
    none = tuple(attrs.evolve(one, ran=attrs.evolve(one.ran, padded_rows=0)) for one in found.prompts)
    facts = advise(attrs.evolve(found, prompts=none)).facts
    (said,) = (one for one in facts if "of replay off's time" in one)
    ratio = found.prompts[0].eager.ratio
    assert f"would take, if this config ran prompts so, of replay off's time {ratio:.1%} at 256 tokens" in said


@pytest.mark.parametrize(
    ("settings", "lengths", "verdict"),
    [
        ({"cudagraph_decoder_replay": False}, "40,3\n", "This config captures no replay graphs"),
        ({"decoder_replay_trim_threshold": None}, "40,3\n", "Replay never happens on this workload"),
        (
            {"decoder_replay_cudagraph_capture_sizes": [8]},
            "20,1\n20,1\n20,1\n",
            "Plan larger replay sizes: 1 of 1 replay batches run eagerly, the largest of 24 rows",
        ),
        (DROPPED, "40,1\n", "Drop the replay sizes 2, 4: no batch"),
        (
            {"decoder_replay_cudagraph_capture_sizes": [8, 16, 24, 32]},
            "40,1\n",
            "1 of 4 replay sizes hold every replay batch of this saturated workload; the others (16, 24, 32)",
        ),
        ({"decoder_replay_cudagraph_capture_sizes": [8]}, "40,1\n", "Keep the 1 replay sizes"),
    ],
)
def test_the_verdict_on_the_plan_names_what_to_change_first(tmp_path, settings, lengths, verdict) -> None:
    """P6."""
    assert plan_verdict(small_job(tmp_path, lengths=lengths, **settings)).startswith(verdict)


def test_the_facts_count_rows_by_hand(tmp_path) -> None:
    facts = advise(gather(small_job(tmp_path, lengths="40,1\n20,1\n"), [])).facts
    assert any("skip 44 of 60 rows and run on 0 pads" in fact for fact in facts)
    assert any("has 16 rows (100% of replay batches) and runs as 16" in fact for fact in facts)
    assert any("every draft token is accepted: the busiest case" in fact for fact in facts)


def test_a_workload_without_replay_says_so_in_a_sentence(tmp_path) -> None:
    facts = advise(gather(small_job(tmp_path, decoder_replay_trim_threshold=None), [])).facts
    assert any(
        re.fullmatch(r"None of \d+ steps has a replay batch, however many requests wait\.", one) for one in facts
    )


def test_what_the_winner_overrides_is_said_where_it_is_to_be_pasted(tmp_path) -> None:
    job = small_job(tmp_path, lengths="40,9\n20,9\n60,9\n" * 20)
    own = job.tuned.tuning.own
    narrow = attrs.evolve(own.config, cudagraph_capture_sizes=(16, 24), max_cudagraph_capture_size=24)
    slow = attrs.evolve(own, config=narrow, unseen=attrs.evolve(own.unseen, expected_step_ms=1e3))
    tuning = attrs.evolve(job.tuned.tuning, own=slow)
    (told,) = tuning_report.overrides(tuning)
    facts = advise(gather(attrs.evolve(job, tuned=attrs.evolve(job.tuned, tuning=tuning)), [])).facts
    assert facts[0] == f"{told[:1].upper()}{told[1:]}." and "raises max_cudagraph_capture_size from 24" in facts[0]
