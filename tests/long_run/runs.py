"""Runs of random worlds: histories of each, until so many steps ran; what was covered, and every failure shrunk."""

import gc
import traceback
from collections.abc import Callable
from itertools import product

import attrs
import hypothesis
from hypothesis import HealthCheck, given, settings
from long_run.histories import Step, histories
from long_run.served import Path, Served, Tally
from long_run.worlds import World, build, draw_world

from replay_sim.batch.dispatch import ModelReason, ReplayReason
from replay_sim.capture.host import HostBackend
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing

HISTORIES_PER_WORLD = 4
ARENA_BYTES = 1 << 28
WITH_REPLAY_BATCH = ("GRAPH", "NO_SIZES", "TOO_MANY_ROWS", "NOT_CAPTURED")


@attrs.define
class Report:
    """What ran: counts and paths, worlds, and the text of each failure, with the shortest history that shows it."""

    tally: Tally = attrs.field(factory=Tally)
    worlds: int = 0
    failures: list[str] = attrs.field(factory=list)


def possible_paths() -> set[Path]:
    """Every path that some step of some world takes; `replay=False`, which measurements ask for, is no step's.

    A one-launch graph needs break buffers that hold the step, so no step beyond the model graphs takes one.
    """
    replayed = [("NONE", reason) for reason in WITH_REPLAY_BATCH[1:]] + [("PIECEWISE", "GRAPH")]
    by_model = {
        "EMPTY": [("", "EMPTY")],
        "FULL": [("", "FULL_GRAPH")],
        "PIECEWISE": [("", "THRESHOLD_OFF"), ("", "BELOW_THRESHOLD"), *replayed],
        **dict.fromkeys(("NO_SIZES", "TOO_MANY_TOKENS", "NOT_CAPTURED"), [("", "NOTHING_TRIMS"), *replayed]),
    }
    assert set(by_model) == set(ModelReason.__members__)
    assert {reason for pairs in by_model.values() for _, reason in pairs} | {"OFF"} == set(ReplayReason.__members__)
    return {
        (model, mode, reason, form.name, sharing.name)
        for model, pairs in by_model.items()
        for (mode, reason), form, sharing in product(pairs, ReplayForm, PoolSharing)
        if not (form is ReplayForm.ONE_LAUNCH and reason == "GRAPH" and model in ("NO_SIZES", "TOO_MANY_TOKENS"))
    }


def run_worlds(first_seed: int, steps: int, progress: Callable[[int], None] = lambda done: None) -> Report:
    """Run the worlds of `first_seed` and on until `steps` steps ran right; a failure ends its world alone.

    `progress` is told the steps of each world. The same arguments run the same steps.
    """
    report, seed = Report(), first_seed
    while report.tally.steps < steps:
        tally = Tally()
        try:
            run_world(draw_world(seed), tally)
        except Exception as error:
            report.failures.append(f"world {seed}\n" + "".join(traceback.format_exception(error)))
        else:
            report.tally.add(tally)
        report.worlds += 1
        seed += 1
        progress(tally.steps)
        gc.collect()
    return report


def run_world(world: World, tally: Tally) -> None:
    """Capture the graphs of one world and serve histories; raises what fails first, with the history that shows it."""
    served = Served(world, build(world, HostBackend(ARENA_BYTES)), tally)

    @hypothesis.seed(world.seed)
    @settings(
        max_examples=HISTORIES_PER_WORLD,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @given(histories(world))
    def every_step_is_right(history: list[Step]) -> None:
        serve(served, history)

    every_step_is_right()


def serve(served: Served, history: list[Step]) -> None:
    """Serve one history from the start."""
    served.start()
    for step in history:
        served.step(step)
    served.finish()
