"""Figures of speedup: what they draw is what they were given, counted by hand."""

import pytest
from explore.measured_cases import GPU, prefill_point, record, step_point

from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.figures_speedup import calls_figure, published_figure, relative_figure, time_figure
from replay_sim.explore.published import H100_CALLS_MS, OUR_CALLS
from replay_sim.explore.step_tables import calls_table, measured_table
from replay_sim.explore.theme import LOOKS, Meaning

GRAPHS, OFF, EAGER = "piecewise_replay_graphs", "eager_off", "eager_replay"
LAW = {(OFF, 512): 200.0, (EAGER, 512): 210.0, (GRAPHS, 512): 100.0}
LAW |= {(OFF, 8192): 400.0, (EAGER, 8192): 300.0, (GRAPHS, 8192): 240.0}


def steps_of(experts: int = 48):
    points = [step_point(arm, tokens, us, num_local_experts=experts) for (arm, tokens), us in LAW.items()]
    return measured_table([("steps-law.json", record("steps", points))], "steps", GPU)


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def test_bars_are_percent_of_replay_off_with_their_spread() -> None:
    figure = relative_figure(steps_of(), "step_us", "num_tokens", "By law", "counted by hand")
    by_name = {trace.name: trace for trace in figure.data}
    assert list(by_name) == [ARM_LOOKS[arm].label for arm in (OFF, EAGER, GRAPHS)]
    bar = by_name[ARM_LOOKS[GRAPHS].label]
    assert bar.x == ("512", "8,192") and bar.y == (50.0, 60.0)
    assert bar.error_y.array == pytest.approx((5.0, 6.0)) and bar.error_y.arrayminus == pytest.approx((5.0, 6.0))
    assert title(figure) == (
        "<b>By law, of replay off's time: eager replay 105% at 512 tokens and 75% at 8,192; graphs and replay graphs "
        "60% at 8,192 tokens and 50% at 512</b>"
    )


def test_an_arm_looks_the_same_in_bars_and_curves_and_no_two_are_alike() -> None:
    """Issue 7: the same arm has the same colour everywhere."""
    bars = relative_figure(steps_of(), "step_us", "num_tokens", "By law", "counted by hand")
    curves = published_figure(steps_of(), prefills(), (48,), "counted by hand")
    colours = {trace.name: trace.marker.color for trace in bars.data}
    for arm in (EAGER, GRAPHS):
        (curve,) = [trace for trace in curves.data if trace.name.endswith(f": {ARM_LOOKS[arm].label}")]
        assert curve.line.color == colours[ARM_LOOKS[arm].label] == LOOKS[ARM_LOOKS[arm].meaning].colour
    looks = [(look.dash, look.symbol) for look in ARM_LOOKS.values()]
    assert len(set(looks)) == len(looks)
    assert [look.label for look in ARM_LOOKS.values()] == [Meaning[name.upper()].value for name in ARM_LOOKS]


def prefills():
    points = [prefill_point(arm, 32768, us) for arm, us in ((OFF, 800.0), (EAGER, 600.0), (GRAPHS, 400.0))]
    points += [prefill_point(arm, 8192, 1.0) for arm in (OFF, EAGER, GRAPHS)]
    return measured_table([("prefill-law.json", record("prefill", points))], "prefill", GPU)


def test_ours_beside_published_are_steps_and_beyond_the_budget_prefills() -> None:
    figure = published_figure(steps_of(), prefills(), (48,), "counted by hand")
    eager, graphs = (
        next(trace for trace in figure.data if trace.name == f"ours, H200, 48 experts: {ARM_LOOKS[arm].label}")
        for arm in (EAGER, GRAPHS)
    )
    assert (eager.x, eager.y) == ((512, 8192, 32768), (105.0, 75.0, 75.0))
    assert (graphs.y, graphs.xaxis) == ((50.0, 60.0, 50.0), "x2")
    published = [trace for trace in figure.data if trace.name == "published, GB200 TP4"]
    assert published[0].y[0] == 103.1 and published[1].y[0] == 64.2
    assert "Eager replay takes 63 to 112% of replay off's time as published, 75 to 105% here" in title(figure)


def test_busy_and_idle_add_up_to_the_step() -> None:
    table = steps_of()
    figure = time_figure(table.assign(idle_share=table.idle_share), 8192, (48, 48), "counted by hand")
    busy, idle, host = figure.data[:3]
    assert [round(a + b, 3) for a, b in zip(busy.y, idle.y, strict=True)] == [0.4, 0.3, 0.24]
    assert list(host.y) == [0.2, 0.15, 0.12]
    assert "idle for 25% of a step with 48 experts" in title(figure)


def test_call_ratios_stand_side_by_side() -> None:
    points = [
        {
            "op": op,
            "rows": rows,
            "device_us": us,
            "p10": us,
            "p90": us,
            "n": 3,
            "bytes": rows,
            "flops": 1e9,
            "limit_us": 1,
        }
        for op in OUR_CALLS
        for rows, us in ((8192, 30.0), (128, 2.0))
    ]
    table = calls_table(measured_table([("calls.json", record("calls", points))], "calls", GPU))
    ours, published = calls_figure(table, "counted by hand").data
    assert set(ours.y) == {15.0} and len(ours.x) == len(H100_CALLS_MS)
    assert published.y[0] == 52.1
