"""The Measure button: a run on the host backend, a stop, and failures that are said in place."""

import threading

import pytest

from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.explore import live_measure
from replay_sim.explore.live_measure import NO_GPU, LiveRun, MeasurePanel, live_run, measure_panel

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
    panel = MeasurePanel(lambda points, run: shown.append((points, run)), lambda: LIVE, HostBackend)
    assert panel.status == "one prompt a step, as every arm, at the window and experts of the controls"
    panel._button.click()
    assert panel._button.disabled and not panel._stop_button.disabled
    panel.wait()
    assert sorted((point["arm"], point["num_tokens"]) for point in panel.points) == sorted(
        (arm, tokens) for arm in ARMS for tokens in PROMPTS
    )
    assert all(point["step_us"] > 0 and point["sweep"] == "live" for point in panel.points)
    (points, run), *more = shown
    assert points == panel.points and not more
    assert run.startswith("run 1 just now on a CPU, whose times are no GPU's, torch ")
    assert panel.status == f"measured 12 steps, window 8, 8 experts, {run.removeprefix('run 1 just now ')}"
    assert not panel.is_running and panel._stop_button.disabled and not panel._button.disabled
    assert panel._bar.value == panel._bar.max == len(PROMPTS)


def test_the_stop_is_obeyed_and_keeps_nothing() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def backend() -> HostBackend:
        begun.set()
        may_go_on.wait(30)
        return HostBackend()

    panel = MeasurePanel(lambda *_: pytest.fail("a stopped run shows nothing"), lambda: LIVE, backend)
    panel.start()
    assert begun.wait(30) and panel.is_running
    assert panel.status == "starting: prompts of 20, 32 tokens, window 8, 8 experts"
    first = panel._thread
    panel.start()
    assert panel._thread is first, "a second press starts no second run"
    panel._stop_button.click()
    may_go_on.set()
    panel.wait()
    assert panel.status == "stopped; nothing was kept" and panel.points == []
    assert not panel._button.disabled
    panel._make_backend = HostBackend
    panel._show = lambda points, run: None  # a run after a stop is a run like any other
    panel.start()
    panel.wait()
    assert panel.status.startswith("measured 12 steps") and len(panel.points) == 12


def test_a_stop_after_the_last_prompt_keeps_nothing_either(monkeypatch) -> None:
    panel = MeasurePanel(lambda *_: pytest.fail("a stopped run shows nothing"), lambda: LIVE, HostBackend)

    def points(self, backend, progress):
        panel.stop()
        return [{"arm": "eager_off"}]

    monkeypatch.setattr(LiveRun, "points", points)
    panel.start()
    panel.wait()
    assert panel.status == "stopped; nothing was kept" and panel.points == []


def test_two_panels_never_measure_at_once() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def backend() -> HostBackend:
        begun.set()
        may_go_on.wait(30)
        raise RuntimeError("enough")

    first = MeasurePanel(lambda *_: None, lambda: LIVE, backend)
    second = MeasurePanel(lambda *_: None, lambda: LIVE, backend)
    first.start()
    assert begun.wait(30)
    second.start()
    assert second.status.startswith("another Measure button is at work") and not second.is_running
    may_go_on.set()
    first.wait()
    second.start()
    second.wait()
    assert second.status == "failed: RuntimeError: enough"


def test_it_measures_the_prompts_that_exceed_the_window_of_the_controls() -> None:
    """P5: a step within the window has nothing to trim."""
    assert (live_run(128, 48).prompts, live_run(1024, 8).prompts) == ((512, 2048, 8192), (2048, 8192))
    run = live_run(256, 96)
    assert (run.shape.window, run.shape.num_local_experts, run.spec().replay_sizes) == (256, 96, (256,))


def test_a_failure_is_said_in_place() -> None:
    def backend() -> HostBackend:
        raise RuntimeError("no <device>")

    panel = MeasurePanel(lambda *_: pytest.fail("a failed run shows nothing"), lambda: LIVE, backend)
    panel.start()
    panel.wait()
    assert panel.status == "failed: RuntimeError: no <device>" and "&lt;device&gt;" in panel._status.value
    assert not panel._button.disabled


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_button_stands_only_where_there_is_a_gpu(monkeypatch, has_gpu) -> None:
    monkeypatch.setattr(live_measure.torch.cuda, "is_available", lambda: has_gpu)
    widget = measure_panel(lambda *_: None, lambda: LIVE)
    buttons = [child.description for child in getattr(widget, "children", ()) if hasattr(child, "description")]
    assert ("Measure" in buttons) is has_gpu
    assert has_gpu or widget.value == NO_GPU
