"""A point of each kind of record, of values that its keys may have."""

from replay_sim.measure.records import REQUIRED_POINT_KEYS, Point

TEXTS = (
    "op",
    "arm",
    "form",
    "arrangement",
    "order",
    "group",
    "plan",
    "mode",
    "replay_mode",
    "reason",
    "job",
    "did",
    "of",
    "sweep",
)


def any_point(kind: str) -> Point:
    """All that a point of this kind must have, and no more."""
    point: Point = dict.fromkeys(sorted(REQUIRED_POINT_KEYS[kind]), 1)
    point |= {key: "x" for key in TEXTS if key in point}
    return point | ({"held_out": False} if "held_out" in point else {})
