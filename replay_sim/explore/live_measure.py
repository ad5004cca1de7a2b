"""A Measure button: runs a few prefills as every arm on this machine, with a progress bar and a stop."""

from __future__ import annotations

import gc
import html
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import ipywidgets as widgets
import torch

from replay_sim.capture import CaptureBackend
from replay_sim.config import FLASH_RANK, DecoderShape
from replay_sim.measure.environment import describe_environment
from replay_sim.measure.rates import measure_rates
from replay_sim.measure.records import Point
from replay_sim.measure.run_steps import make_backend
from replay_sim.measure.step_arms import ARMS, Rig, RigSpec
from replay_sim.measure.step_points import step_point
from replay_sim.measure.step_runs import Runs, collector_off
from replay_sim.measure.step_sweeps import TimedBatch, prefill
from replay_sim.workload.kv_blocks import BLOCK_SIZE, blocks_for

SWEEP = "live"
SEED = 0


class StoppedError(Exception):
    """The run was stopped by its button."""


@attrs.frozen(kw_only=True)
class LiveRun:
    """What is measured: prompts of these lengths, one a step, at their own capture sizes; each exceeds the window."""

    shape: DecoderShape
    prompts: tuple[int, ...]

    def spec(self) -> RigSpec:
        """The pair of runners that the prompts need, and no more."""
        longest = max(self.prompts)
        blocks = blocks_for(longest, BLOCK_SIZE)
        return RigSpec(
            window=self.shape.window,
            num_local_experts=self.shape.num_local_experts,
            model_sizes=tuple(sorted(self.prompts)),
            full_sizes=(),
            replay_sizes=(self.shape.window,),
            max_num_seqs=1,
            max_num_batched_tokens=longest,
            num_blocks=blocks,
            max_blocks=blocks,
        )

    def points(self, backend: CaptureBackend, progress: Callable[[Iterable[Any], str], Iterable[Any]]) -> list[Point]:
        """Capture, time every prompt as every arm, and profile; raises what a capture or a run raises."""
        rates = measure_rates(backend.device, SEED)
        rig = Rig(self.spec(), self.shape, backend, SEED, ARMS, progress=progress)
        longest = max(self.prompts)
        timed = [TimedBatch(batch=prefill([tokens]), max_num_batched_tokens=longest) for tokens in self.prompts]
        with collector_off():
            measured = Runs(rig, SEED).measure(timed, progress)
        return [
            step_point(SWEEP, rig.shape, batch, one, rates, held_out=False)
            for batch, of_batch in zip(timed, measured, strict=True)
            for one in of_batch
        ]


PROMPTS = (512, 2048, 8192)
_ONE_RUN = threading.Lock()
"""Held by the run that is going on: a second one beside it would be in the times of both."""


def live_run(window: int, num_local_experts: int) -> LiveRun:
    """The prompts that exceed the window, on one rank's share of DeepSeek-V4.1-Flash with so many experts."""
    shape = attrs.evolve(FLASH_RANK, window=window, num_local_experts=num_local_experts)
    return LiveRun(shape=shape, prompts=tuple(tokens for tokens in PROMPTS if tokens > window))


class MeasurePanel:
    """A button, a bar and a stop; `points` are those of the last run that finished, and `show` is called with them.

    `live` says at each press what to measure. Runs happen on a thread of their own, so that the stop is heard; it is
    obeyed between two prompts or captures, and `show` is called on that thread.
    """

    def __init__(
        self,
        show: Callable[[list[Point], str], None],
        live: Callable[[], LiveRun],
        backend: Callable[[], CaptureBackend] = lambda: make_backend("cuda"),
    ) -> None:
        self.points: list[Point] = []
        self._show, self._live, self._make_backend = show, live, backend
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._runs = 0
        self._button = widgets.Button(description="Measure", tooltip="Run the prompts as every arm on this machine")
        self._stop_button = widgets.Button(description="Stop", disabled=True, tooltip="Stop after the prompt at hand")
        self._bar, self._status = widgets.IntProgress(value=0, max=1), widgets.HTML()
        self._button.on_click(lambda _: self.start())
        self._stop_button.on_click(lambda _: self.stop())
        self.widget = widgets.HBox([self._button, self._stop_button, self._bar, self._status])
        self._say("one prompt a step, as every arm, at the window and experts of the controls")

    @property
    def status(self) -> str:
        """What the panel says."""
        return html.unescape(self._status.value)

    @property
    def is_running(self) -> bool:
        """Whether a run is going on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start a run; does nothing while one is going on, and says so if it is another panel's."""
        if self.is_running:
            return
        if not _ONE_RUN.acquire(blocking=False):
            self._say("another Measure button is at work: press again when it has ended")
            return
        self._stop.clear()
        self._button.disabled, self._stop_button.disabled = True, False
        live = self._live()
        self._bar.value, self._bar.max = 0, 1
        self._say(f"starting: prompts of {_listed(live.prompts)} tokens, {_settings(live)}")
        self._thread = threading.Thread(target=self._run, args=(live,), name="measure", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the run to stop."""
        self._stop.set()
        self._say("stopping after the work at hand")

    def wait(self) -> None:
        """Return when no run is going on."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, live: LiveRun) -> None:
        try:
            self._say(self._outcome(live))
        except StoppedError:
            self._say("stopped; nothing was kept")
        except Exception as error:  # shown in place, whatever a capture raises
            self._say(f"failed: {type(error).__name__}: {error}")
        finally:
            _free()
            _ONE_RUN.release()
            self._button.disabled, self._stop_button.disabled = False, True

    def _outcome(self, live: LiveRun) -> str:
        """Measure, show, and say what was measured and where; raises what a run raises."""
        backend = self._make_backend()
        points = live.points(backend, self._progress)
        if self._stop.is_set():
            raise StoppedError
        self._runs += 1
        where = describe_environment(backend.device)
        device = f"{where['gpu']}, driver {where['driver']}" if where["gpu"] else "a CPU, whose times are no GPU's"
        device += f", torch {where['torch']}, {where['date']}"
        self.points = points
        self._show(points, f"run {self._runs} just now on {device}")
        return f"measured {len(points)} steps, {_settings(live)}, on {device}"

    def _progress(self, items: Iterable[Any], what: str) -> Iterator[Any]:
        """The items with the bar following, until the stop is pressed."""
        listed = list(items)
        self._bar.value, self._bar.max = 0, max(1, len(listed))
        for item in listed:
            if self._stop.is_set():
                raise StoppedError
            self._say(f"{what}: {self._bar.value} of {len(listed)}")
            yield item
            self._bar.value += 1
        self._say(f"{what}: {len(listed)} of {len(listed)}")
        if self._stop.is_set():
            raise StoppedError

    def _say(self, status: str) -> None:
        self._status.value = html.escape(status)


def _free() -> None:
    """Return a finished run's memory to the device: its graphs lie in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_panel(show: Callable[[list[Point], str], None], live: Callable[[], LiveRun]) -> widgets.Widget:
    """The panel on a machine with a GPU; elsewhere a sentence that says that all shown is recorded."""
    if torch.cuda.is_available():
        return MeasurePanel(show, live).widget
    return widgets.HTML(NO_GPU)


NO_GPU = (
    "No GPU on this machine: what is shown was recorded elsewhere, as the caption says. With one, a Measure button "
)
NO_GPU += "stands here and adds this machine's own points."


def _settings(live: LiveRun) -> str:
    return f"window {live.shape.window:,}, {live.shape.num_local_experts} experts"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
