"""What is written on the command line as a grid, and the design points that it stands for."""

import pytest
from explore.sweep_cases import CONFIG, POINTS, WORKLOAD

from replay_sim.config import ConfigError
from replay_sim.explore.sweep_grid import parse_grid
from replay_sim.explore.sweep_plans import check_plans
from replay_sim.explore.sweep_points import GROUP_POINTS, SCHEDULE, by_schedule, design_points, fingerprint

BAD = {
    "window": ["'window'", "NAME=VALUES"],
    "window=": ["'window='", "NAME=VALUES"],
    "=64": ["'=64'", "NAME=VALUES"],
    "windw=64": ["no axis 'windw'", "did you mean 'window'"],
    "cudagraph_capture_sizes=8": ["cudagraph_capture_sizes is a setting of CONFIG and no axis; axes are window, "],
    "window=64,,128": ["window='64,,128' has an empty value"],
    "window=big": ["window='big'", "an integer from 1 to 1048576, or a range START:STOP:STEP"],
    "window=-64": ["window='-64'", "from 1 to"],
    "window=1.5": ["window='1.5'", "an integer"],
    "window=0": ["window='0'", "from 1 to 1048576"],
    "window=9999999999": ["window='9999999999'", "from 1 to 1048576"],
    "num_speculative_tokens=1025": ["num_speculative_tokens='1025'", "from 0 to 1024"],
    "window=64:128": ["window='64:128'", "8:256:8"],
    "window=128:64:8": ["window=128:64:8", "START"],
    "window=64:128:0": ["window=64:128:0", "STEP"],
    "window=1:900000000:1": ["window='1:900000000:1'", "from 1 to 1048576"],
    "window=1:1000000:1": ["window", "more than 100,000 values"],
    "window=64,128,64": ["window", "64 twice"],
    "plan=default,default": ["plan", "'default' twice"],
    "plan=,eager": ["plan=',eager' has an empty value"],
    "cudagraph_mode=FULL,full": ["cudagraph_mode", "'FULL' twice"],
    "cudagraph_mode=PIECEWIZE": ["cudagraph_mode='PIECEWIZE'", "one of NONE, PIECEWISE, ", "did you mean 'PIECEWISE'"],
}


@pytest.mark.parametrize("text", BAD)
def test_bad_syntax_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_grid([text])
    told = str(refused.value)
    assert told.startswith("grid: ") and "\n" not in told and all(part in told for part in BAD[text]), told


def test_an_axis_is_given_once() -> None:
    with pytest.raises(ConfigError, match="window is given twice"):
        parse_grid(["window=64", "max_num_seqs=8", "window=128"])


def test_lists_and_ranges_mean_their_values_in_order_the_end_among_them() -> None:
    axes = parse_grid(
        ["window=256,64:192:64", "max_num_seqs=8:30:8", " plan = eager, optimal-4", "cudagraph_mode=none"]
    )
    assert axes == {
        "window": (256, 64, 128, 192),
        "max_num_seqs": (8, 16, 24),
        "plan": ("eager", "optimal-4"),
        "cudagraph_mode": ("NONE",),
    }
    assert list(axes) == ["window", "max_num_seqs", "plan", "cudagraph_mode"]


@pytest.mark.parametrize("name", ["best", "optimal-0", "optimal-", "optimal-4x", "Default"])
def test_a_plan_that_is_none_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"plan: '{name}' is not allowed; .*default, explicit, optimal, eager"):
        check_plans(["default", "optimal-12", name])


def test_points_are_the_product_numbered_the_plan_fastest() -> None:
    points = design_points({"a": CONFIG, "b": CONFIG}, [WORKLOAD], {"window": (4, 8)}, ("default", "eager"))
    assert [point.index for point in points] == list(range(8))
    assert [(p.config_name, p.settings, p.plan) for p in points[:3]] == [
        ("a", (("window", 4),), "default"),
        ("a", (("window", 4),), "eager"),
        ("a", (("window", 8),), "default"),
    ]
    assert points[4].config_name == "b" and points[0].asked("window") == 4 and points[0].asked("max_num_seqs") == 6


def test_groups_hold_every_point_once_and_one_schedule_each() -> None:
    groups = by_schedule(POINTS)
    assert sorted(point.index for group in groups for point in group) == list(range(len(POINTS)))
    assert len(groups) == 4 and all(len({tuple(map(p.asked, SCHEDULE)) for p in group}) == 1 for group in groups)
    many = design_points({"a": CONFIG}, [WORKLOAD], {"window": tuple(range(1, GROUP_POINTS + 2))}, ("eager",))
    assert [len(group) for group in by_schedule(many)] == [GROUP_POINTS, 1]


def test_a_fingerprint_tells_sweeps_apart() -> None:
    other = design_points({"a": CONFIG}, [WORKLOAD], {"window": (4,)}, ("eager",))
    told = fingerprint(POINTS, [WORKLOAD])
    assert fingerprint(POINTS, [WORKLOAD]) == told and set(told) == {"designs", "requests", "step times", "version"}
    for part, changed in (
        ("designs", fingerprint(other, [WORKLOAD])),
        ("requests", fingerprint(POINTS, [])),
        ("step times", fingerprint(POINTS, [WORKLOAD], "measured")),
    ):
        assert [name for name in told if changed[name] != told[name]] == [part]
