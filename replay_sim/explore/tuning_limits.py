"""What a tuned plan may cost at start-up: graphs, capture seconds and pool memory."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from replay_sim.measure.records import bundled_records
from replay_sim.plan.capture_plan import CapturePlan

MIB = 1 << 20


@attrs.frozen(kw_only=True)
class Limits:
    """Most graphs of each kind, seconds of capture and bytes of graph pools; None for no limit of that kind.

    `max_graphs` counts replay graphs, `max_model_graphs` PIECEWISE model graphs: None for as many as the plan that is
    tuned has. ValueError names a limit that no plan can keep.
    """

    max_graphs: int | None = None
    max_model_graphs: int | None = None
    max_capture_s: float | None = None
    max_pool_bytes: int | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("max_graphs", "max_model_graphs", "max_capture_s", "max_pool_bytes"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}: {value} is not allowed; it must be at least 0")


@attrs.frozen
class CaptureSeconds:
    """Seconds to capture one graph of each group, the mean over the bundled records, and where these are from."""

    model: float
    replay: float
    source: str

    def of(self, plan: CapturePlan) -> float:
        """Seconds to capture all graphs of a plan."""
        model_graphs = len(plan.model_sizes) + len(plan.full_sizes)
        return self.model * model_graphs + self.replay * len(plan.replay_sizes)


def measured_capture_seconds() -> CaptureSeconds:
    """Seconds a graph over all points of the bundled `capture` records; ValueError if a group has none."""
    seconds = {"model": 0.0, "replay": 0.0}
    graphs = {"model": 0, "replay": 0}
    sources: dict[str, None] = {}
    for _, record in bundled_records("capture"):
        for point in record.points:
            group, count, taken = point.get("group"), point["num_graphs"], point["seconds"]
            if group in seconds and isinstance(count, int) and isinstance(taken, int | float):
                seconds[str(group)] += taken
                graphs[str(group)] += count
                sources[record.provenance] = None
    if not all(graphs.values()):
        raise ValueError("max_capture_s: no bundled record says how long a capture takes")
    each = {group: seconds[group] / graphs[group] for group in seconds}
    return CaptureSeconds(each["model"], each["replay"], "; ".join(sources))


def first_that_fits(
    plans: list[CapturePlan], limits: Limits, pool_bytes: Callable[[CapturePlan], int] | None
) -> int | None:
    """The index of the first plan within all limits, None if none is.

    `pool_bytes` predicts the growth of the graph pools; it is asked only if there is such a limit.
    """
    seconds = None if limits.max_capture_s is None else measured_capture_seconds()
    for index, plan in enumerate(plans):
        if limits.max_graphs is not None and len(plan.replay_sizes) > limits.max_graphs:
            continue
        if limits.max_model_graphs is not None and len(plan.model_sizes) > limits.max_model_graphs:
            continue
        if seconds is not None and limits.max_capture_s is not None and seconds.of(plan) > limits.max_capture_s:
            continue
        if limits.max_pool_bytes is None or _pool_fits(plan, limits.max_pool_bytes, pool_bytes):
            return index
    return None


def _pool_fits(plan: CapturePlan, most: int, pool_bytes: Callable[[CapturePlan], int] | None) -> bool:
    """Whether the plan's pools are predicted to take at most so many bytes.

    Graphs reuse the blocks of larger ones (C8), so that a plan takes hardly more than its largest model graph, or this
    and its FULL graphs. These are the same for many plans and quickly predicted: where they are too much, all is.
    """
    if pool_bytes is None:
        raise ValueError("max_pool_bytes: it needs a prediction of pool bytes")
    if plan.model_sizes:
        largest = plan.model_sizes[-1]
        threshold = largest if largest in plan.breaking_sizes else None
        alone = attrs.evolve(plan, model_sizes=(largest,), replay_sizes=(), trim_threshold=threshold, notes=())
        if any(pool_bytes(part) > most for part in (attrs.evolve(alone, full_sizes=()), alone)):
            return False
    return pool_bytes(plan) <= most
