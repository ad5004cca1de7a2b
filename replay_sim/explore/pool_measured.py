"""Reserved bytes of the sharing arrangements, predicted by this version and measured in a record, side by side."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pandas as pd

from replay_sim.config import DecoderShape, load_config
from replay_sim.decoder.pool_prediction import PlanMemory
from replay_sim.decoder.pool_report import growth_row
from replay_sim.explore.pool_map import GROUPS, MIB
from replay_sim.measure.records import Point, Record
from replay_sim.plan import CapturePlan, make_plan
from replay_sim.replay.sharing import PoolSharing, choose_sharing

CASES = (("largest_first", "dropped"), ("largest_first", "held"), ("smallest_first", "dropped"))
"""Order of capture and outputs, of the cases that are measured."""


@attrs.frozen
class ReservedCase:
    """Growth of the graph pools' reserved bytes, model and replay graphs, in one capture (O5).

    `measured` is None where no record has the case.
    """

    arrangement: str
    order: str
    outputs: str
    predicted: tuple[int, int]
    measured: tuple[int, int] | None

    @property
    def error(self) -> float | None:
        """How far the predicted sum is off the measured one, as a share of it."""
        return sum(self.predicted) / sum(self.measured) - 1 if self.measured else None


def reserved_cases(memory: PlanMemory, record: Record | None = None) -> tuple[ReservedCase, ...]:
    """Every arrangement in every order and use that is measured, predicted and, where `record` has it, measured."""
    predicted = {
        (row["arrangement"], row["order"], row["outputs"], row["group"]): row["predicted_bytes"]
        for order, outputs in CASES
        for row in map(
            growth_row, memory.predict(largest_first=order == "largest_first", hold_outputs=outputs == "held")
        )
    }
    points = record.points if record else []
    measured = {_key(point): point["reserved_bytes"] for point in points}

    def both(found: dict, *case: str) -> tuple[int, int]:
        model, replay = (found[*case, group] for group in GROUPS)
        return model, replay

    return tuple(
        ReservedCase(
            sharing.value,
            order,
            outputs,
            both(predicted, sharing.value, order, outputs),
            both(measured, sharing.value, order, outputs)
            if (sharing.value, order, outputs, GROUPS[0]) in measured
            else None,
        )
        for sharing in PoolSharing
        for order, outputs in CASES
    )


def record_of(plan: CapturePlan, shape: DecoderShape, records: Iterable[tuple[str, Record]]) -> Record | None:
    """The pool record of a preset with this very plan, captured on this shape; the one of most points, or None."""
    found = [record for _, record in records if record.kind == "pool" and _is_of(record, plan, shape)]
    return max(found, key=lambda record: len(record.points), default=None)


def _is_of(record: Record, plan: CapturePlan, shape: DecoderShape) -> bool:
    if record.settings.get("model") != shape.name:
        return False
    try:
        return make_plan(load_config(str(record.settings.get("subject")))) == plan
    except ValueError:
        return False


def reserved_source(plan_name: str, shape: DecoderShape, record: Record | None) -> str:
    """Where predicted and measured numbers come from, for captions."""
    predicted = f"predicted by replay_sim from the shapes of {shape.name} and the plan of {plan_name}"
    if record is None:
        return f"{predicted}; no bundled record has this plan, so nothing here is measured"
    return f"{predicted}; {record.provenance}, by {record.command}"


def prediction_table(records: Iterable[tuple[str, Record]]) -> pd.DataFrame:
    """A line for each group of every measured capture: MiB measured, predicted as the record has it, and the error."""
    rows = [
        {
            "config": point.get("plan"),
            "decoder": record.settings.get("model"),
            "arrangement": point["arrangement"],
            "order": point["order"],
            "outputs": point.get("outputs"),
            "group": point["group"],
            "graphs": point.get("num_graphs"),
            "measured MiB": _mib(point["reserved_bytes"]),
            "predicted MiB": _mib(point["predicted_bytes"]),
            "error": _error(point),
        }
        for _, record in records
        if record.kind == "pool"
        for point in record.points
    ]
    return pd.DataFrame(rows)


def arrangement_table(memory: PlanMemory) -> pd.DataFrame:
    """Each arrangement: which models may use it, which take it by themselves (O4), and its predicted MiB."""
    plain, with_aux = (choose_sharing(has_early_aux=has).sharing for has in (False, True))
    rows = {}
    for case in reserved_cases(memory):
        if (case.order, case.outputs) != CASES[0]:
            continue
        sharing = PoolSharing(case.arrangement)
        model, replay = case.predicted
        rows[sharing.value] = {
            "without early aux states": "chosen" if sharing is plain else "allowed",
            "with early aux states": "chosen"
            if sharing is with_aux
            else "corrupts them"
            if sharing is PoolSharing.SHARED
            else "allowed",
            "model graphs, MiB": model / MIB,
            "replay graphs add, MiB": replay / MIB,
        }
    return pd.DataFrame.from_dict(rows, orient="index").round(1).rename_axis("arrangement")


def _key(point: Point) -> tuple:
    return point["arrangement"], point["order"], point.get("outputs", "dropped"), point["group"]


def _mib(nbytes: object) -> float | None:
    return round(nbytes / MIB, 1) if isinstance(nbytes, int) else None


def _error(point: Point) -> float | None:
    measured, predicted = point["reserved_bytes"], point["predicted_bytes"]
    if not isinstance(measured, int) or not isinstance(predicted, int):
        return None
    return round(predicted / measured - 1, 4) if measured else float(predicted != 0)
