"""The Measure button: a run on the host backend, a stop, and failures that are said in place."""

import threading

import pytest

from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.explore import live_measure
from replay_sim.explore.live_measure import NO_GPU, LiveRun, MeasurePanel, measure_panel

PROMPTS = (20, 32)
LIVE = LiveRun(shape=TINY, prompts=PROMPTS)
ARMS = (
    "eager_off",
    "eager_replay",
    "piecewise_off",
    "piecewise_replay_eager",
    "piecewise_replay_graphs",
    "piecewise_replay_one_launch",
)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    monkeypatch.setattr("replay_sim.measure.step_runs.LEAST_ROUNDS", 2)
    monkeypatch.setattr("replay_sim.measure.step_runs.BATCH_SECONDS", 0.0)


def test_a_press_measures_every_prompt_as_every_arm_and_hands_the_points_over() -> None:
    shown = []
    panel = MeasurePanel(lambda points, run: shown.append((points, run)), LIVE, HostBackend)
    assert panel.status == "prompts of 20, 32 tokens as every arm"
    panel._button.click()
    assert panel._button.disabled and not panel._stop_button.disabled
    panel.wait()
    assert sorted((point["arm"], point["num_tokens"]) for point in panel.points) == sorted(
        (arm, tokens) for arm in ARMS for tokens in PROMPTS
    )
    assert all(point["step_us"] > 0 and point["sweep"] == "live" for point in panel.points)
    (points, run), *more = shown
    assert points == panel.points and not more
    assert run == "run 1 just now on a CPU, whose times are no GPU's"
    assert panel.status.startswith("measured 12 steps on a CPU, whose times are no GPU's, torch ")
    assert not panel.is_running and panel._stop_button.disabled and not panel._button.disabled
    assert panel._bar.value == panel._bar.max == len(PROMPTS)


def test_the_stop_is_obeyed_and_keeps_nothing() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def backend() -> HostBackend:
        begun.set()
        may_go_on.wait(30)
        return HostBackend()

    panel = MeasurePanel(lambda *_: pytest.fail("a stopped run shows nothing"), LIVE, backend)
    panel.start()
    assert begun.wait(30) and panel.is_running
    first = panel._thread
    panel.start()
    assert panel._thread is first, "a second press starts no second run"
    panel._stop_button.click()
    may_go_on.set()
    panel.wait()
    assert panel.status == "stopped; nothing was kept" and panel.points == []
    assert not panel._button.disabled


def test_a_failure_is_said_in_place() -> None:
    def backend() -> HostBackend:
        raise RuntimeError("no <device>")

    panel = MeasurePanel(lambda *_: pytest.fail("a failed run shows nothing"), LIVE, backend)
    panel.start()
    panel.wait()
    assert panel.status == "failed: RuntimeError: no <device>" and "&lt;device&gt;" in panel._status.value
    assert not panel._button.disabled


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_button_stands_only_where_there_is_a_gpu(monkeypatch, has_gpu) -> None:
    monkeypatch.setattr(live_measure.torch.cuda, "is_available", lambda: has_gpu)
    widget = measure_panel(lambda *_: None)
    buttons = [child.description for child in getattr(widget, "children", ()) if hasattr(child, "description")]
    assert ("Measure" in buttons) is has_gpu
    assert has_gpu or widget.value == NO_GPU
