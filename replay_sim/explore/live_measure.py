"""A Measure button: runs a few prefills as every arm on this machine, with a progress bar and a stop."""

from __future__ import annotations

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


LIVE = LiveRun(shape=FLASH_RANK, prompts=(512, 2048, 8192))
"""A minute or two on a data-centre GPU."""


class MeasurePanel:
    """A button, a bar and a stop; `points` are those of the last run that finished, and `show` is called with them.

    Runs happen on a thread of their own, so that the stop is heard; it is obeyed between two prompts or captures.
    """

    def __init__(
        self,
        show: Callable[[list[Point], str], None],
        live: LiveRun = LIVE,
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
        self._say(f"prompts of {_listed(live.prompts)} tokens as every arm")

    @property
    def status(self) -> str:
        """What the panel says."""
        return html.unescape(self._status.value)

    @property
    def is_running(self) -> bool:
        """Whether a run is going on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start a run; does nothing while one is going on."""
        if self.is_running:
            return
        self._stop.clear()
        self._button.disabled, self._stop_button.disabled = True, False
        self._thread = threading.Thread(target=self._run, name="measure", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the run to stop."""
        self._stop.set()
        self._say("stopping after the work at hand")

    def wait(self) -> None:
        """Return when no run is going on."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            backend = self._make_backend()
            points = self._live.points(backend, self._progress)
            self._runs += 1
            where = describe_environment(backend.device)
            device = where["gpu"] or "a CPU, whose times are no GPU's"
            self.points = points
            self._show(points, f"run {self._runs} just now on {device}")
            self._say(f"measured {len(points)} steps on {device}, torch {where['torch']}, {where['date']}")
        except StoppedError:
            self._say("stopped; nothing was kept")
        except Exception as error:  # shown in place, whatever a capture raises
            self._say(f"failed: {type(error).__name__}: {error}")
        finally:
            self._button.disabled, self._stop_button.disabled = False, True

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
        if self._stop.is_set():
            raise StoppedError

    def _say(self, status: str) -> None:
        self._status.value = html.escape(status)


def measure_panel(show: Callable[[list[Point], str], None]) -> widgets.Widget:
    """The panel on a machine with a GPU; elsewhere a sentence that says that all shown is recorded."""
    if torch.cuda.is_available():
        return MeasurePanel(show).widget
    return widgets.HTML(NO_GPU)


NO_GPU = (
    "No GPU on this machine: what is shown was recorded elsewhere, as the caption says. With one, a Measure button "
)
NO_GPU += "stands here and adds this machine's own points."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
