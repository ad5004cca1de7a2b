"""The design points of a sweep: configs by workloads by settings by plans, numbered, and grouped by schedule."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from replay_sim import __version__
from replay_sim.config import ServingConfig
from replay_sim.explore.sweep_grid import Setting
from replay_sim.measure.step_model import bundled_model
from replay_sim.workload.settings import SchedulerSettings
from replay_sim.workload.trace import TraceRequest

GROUP_POINTS = 256
"""Points of one schedule that one task runs at most: a worker that is lost takes no more with it."""


@attrs.frozen
class SweptWorkload:
    """A workload as a sweep runs it: where its requests are from, in words, and their (prompt, output) tokens.

    Every request waits from the start, and there is no prefix cache, so that nothing else of them counts.
    """

    source: str
    lengths: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], source: str) -> SweptWorkload:
        """The workload of these requests, in their order."""
        return cls(source, tuple((request.prompt_tokens, request.output_tokens) for request in requests))

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, all there at 0 s."""
        for index, (prompt, output) in enumerate(self.lengths):
            yield TraceRequest(0.0, prompt, output, str(index))


@attrs.frozen
class DesignPoint:
    """One design: a config by name, settings in place of its own, and the plan; `workload` is its workload's source.

    Nothing is checked before the point is run: what cannot be is a row with a reason.
    """

    index: int
    config_name: str
    config: ServingConfig
    workload: str
    settings: tuple[tuple[str, Setting], ...]
    plan: str

    def asked(self, name: str) -> Setting | None:
        """A setting as the point asks for it: the grid's value, or else the config's own."""
        value: Setting | None = dict(self.settings).get(name, getattr(self.config, name))
        return value


def design_points(
    configs: Mapping[str, ServingConfig],
    workloads: Iterable[SweptWorkload],
    axes: Mapping[str, Sequence[Setting]],
    plans: Sequence[str],
) -> tuple[DesignPoint, ...]:
    """Every config with every workload, every value of every axis of settings and every plan, the plan fastest."""
    settings = [[(name, value) for value in values] for name, values in axes.items()]
    sources = [workload.source for workload in workloads]
    product = itertools.product(configs.items(), sources, itertools.product(*settings), plans)
    return tuple(
        DesignPoint(index, name, config, source, chosen, plan)
        for index, ((name, config), source, chosen, plan) in enumerate(product)
    )


SCHEDULE = "max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens"
"""The settings that decide a schedule where no step time is known."""


def schedule_of(point: DesignPoint) -> SchedulerSettings:
    """What decides the point's schedule; ValueError for what no scheduler can do.

    The window is not among it, nor is the plan: no step time is known, so that no request waits for a step to end, and
    without a prefix cache the window changes no prompt.
    """
    settings: dict[str, Any] = {name: point.asked(name) for name in SCHEDULE}
    return SchedulerSettings(**settings)


def by_schedule(points: Iterable[DesignPoint], most: int = GROUP_POINTS) -> list[tuple[DesignPoint, ...]]:
    """The points in groups that share config, workload and schedule, of at most `most`; all workers' the same."""
    groups: dict[tuple[object, ...], list[DesignPoint]] = {}
    for point in points:
        key = point.config_name, point.workload, *map(point.asked, SCHEDULE)
        groups.setdefault(key, []).append(point)
    starts = ((group, start) for group in groups.values() for start in range(0, len(group), most))
    return [tuple(group[start : start + most]) for group, start in starts]


def fingerprint(
    points: Sequence[DesignPoint], workloads: Iterable[SweptWorkload], times: object = None
) -> dict[str, str]:
    """What tells a sweep from any other, by what it is of: designs, requests, step times and version of the package.

    `times` is what measures them, by its text; None for the bundled step-time model.
    """
    parts = {"designs": points, "requests": tuple(workloads), "step times": bundled_model() if times is None else times}
    hashed = {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}
    return hashed | {"version": __version__}
