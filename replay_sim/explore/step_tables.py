"""Measured steps, prefills and calls of the bundled records as tables, each with the source of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from replay_sim.config.shapes import SHAPES
from replay_sim.explore.arms import ARM_LOOKS
from replay_sim.explore.published import H100_CALLS_MS, OUR_CALLS
from replay_sim.measure.measured_steps import shape_of_point
from replay_sim.measure.records import Record
from replay_sim.measure.roofline import step_parts
from replay_sim.measure.step_case import case_of_point
from replay_sim.measure.step_model import HOST_BOUND, StepModel

ARM_NAMES = tuple(ARM_LOOKS)


def measured_table(records: Iterable[tuple[str, Record]], kind: str, gpu: str) -> pd.DataFrame:
    """The points of all records of a kind from one GPU, a line each, in the order of the arms; `record` is the file.

    `attrs["source"]` is the caption. Raises ValueError if there are none.
    """
    found = [(name, record) for name, record in records if record.kind == kind and record.environment["gpu"] == gpu]
    if not found:
        raise ValueError(f"gpu: no bundled record of kind {kind} was measured on {gpu!r}")
    table = pd.concat([pd.DataFrame(record.points).assign(record=name) for name, record in found], ignore_index=True)
    if "arm" in table:
        table = table.sort_values("arm", key=lambda arms: arms.map(ARM_NAMES.index), kind="stable")
    table.attrs = {"sources": {name: record.provenance for name, record in found}}
    return table


def source_of(table: pd.DataFrame) -> str:
    """Where the numbers of a table, or of a part of it, come from: a caption."""
    names = sorted(set(table.record))
    where = sorted({table.attrs["sources"][name] for name in names})
    return f"{'; '.join(where)}; {', '.join(names)}"


def experts_sweep(steps: pd.DataFrame, experts: int) -> pd.DataFrame:
    """The steps of one prompt at several lengths, all arms side by side in one run, with so many experts a rank."""
    return steps[(steps["sweep"] == "experts") & (steps["num_local_experts"] == experts)]


def relative(table: pd.DataFrame, time: str, by: str, base: str) -> pd.DataFrame:
    """The table with `percent`, `low`, `high`: median, p10 and p90 in % of the base arm's median at the same `by`."""
    bases = table[table["arm"] == base].set_index(by)[time]
    against = table[by].map(bases)
    new = {name: 100 * table[key] / against for name, key in (("percent", time), ("low", "p10"), ("high", "p90"))}
    return table.assign(base_us=against, **new).dropna(subset="percent")


def percent_table(table: pd.DataFrame, time: str, by: str, base: str) -> pd.DataFrame:
    """Percent of the base arm's median, a line for each `by`, a column for each arm."""
    compared = relative(table, time, by, base)
    return compared.pivot(index=by, columns="arm", values="percent").reindex(columns=_arms_in(table)).round(1)


def launch_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Launches of a step by arm over all profiled points, least to most: what each arm really ran."""
    profiled = steps.dropna(subset="graph_launches")
    rows = {}
    for arm in _arms_in(profiled):
        of_arm = profiled[profiled["arm"] == arm]
        counts = {
            name: f"{of_arm[key].min():.0f} to {of_arm[key].max():.0f}"
            for name, key in (("graph launches", "graph_launches"), ("eager kernel launches", "kernel_launches"))
        }
        rows[arm] = {**counts, "steps profiled": len(of_arm), "of": int((steps["arm"] == arm).sum())}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("arm")


PREFILL_SWEEPS = ("threshold", "prompt", "experts", "window", "budget")
"""The sweeps of prefills, of which both runs staged alike: of `requests` one waited 15 ms for threads of its own."""


def repeats_table(records: Iterable[tuple[str, Record]]) -> pd.DataFrame:
    """How times of prefills made again differ from the bundled ones, a line an arm; empty if none was made again.

    `least`, `median` and `most` are of a repeat's time over the bundled run's; the median is that of the runs' medians.
    """
    points = pd.DataFrame([point for _, record in records if record.kind == "repeat" for point in record.points])
    if points.empty:
        return points
    by_arm = points[(points["of"] == "steps") & points["sweep"].isin(PREFILL_SWEEPS)].groupby("arm")
    table = pd.DataFrame(
        {
            "runs": by_arm.size(),
            "steps": by_arm["n"].sum(),
            "least": by_arm["ratio_min"].min(),
            "median": by_arm["ratio_median"].median(),
            "most": by_arm["ratio_max"].max(),
        }
    )
    return table.reindex(arm for arm in ARM_NAMES if arm in table.index).round(3)


def where_time_goes(steps: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """One step length by arm: milliseconds of step, device and host, idle share, launches, roofline and its ratio."""
    at = steps[steps["num_tokens"] == tokens].set_index("arm")
    return pd.DataFrame(
        {
            "step ms": (at.step_us / 1e3).round(2),
            "device busy ms": (at.device_us / 1e3).round(2),
            "host ms": (at.host_us / 1e3).round(2),
            "device idle": (100 * at.idle_share).round(1).astype(str) + " %",
            "graph launches": at.graph_launches.astype("Int64"),
            "kernel launches": at.kernel_launches.astype("Int64"),
            "roofline ms": (at.limit_us / 1e3).round(2),
            "step / roofline": (at.step_us / at.limit_us).round(2),
        }
    )


def bytes_table(records: Iterable[tuple[str, Record]], tokens: Sequence[int]) -> pd.DataFrame:
    """Counted GB that a step of one prompt moves, by experts and tokens: experts' weights, the rest, and both arms.

    The steps are those of the experts sweep; counted from shapes, not measured.
    """
    rows = []
    for name, record in records:
        if record.kind != "steps":
            continue
        for point in record.points:
            if point["sweep"] != "experts" or point["arm"] not in ("eager_off", "eager_replay"):
                continue
            if point["num_tokens"] in tokens:
                rows.append({"arm": point["arm"], "record": name, **_gigabytes(record, point)})
    table = pd.DataFrame(rows)
    return table.set_index(["experts a rank", "tokens", "arm"]).drop(columns="record").sort_index().round(1)


def _gigabytes(record: Record, point: dict) -> dict[str, float]:
    shape = shape_of_point(SHAPES[str(record.settings["model"])], point)
    ops = [op for part in step_parts(shape, case_of_point(point)).values() for op in part]
    total = sum(op.count * op.nbytes for op in ops)
    experts = sum(op.count * op.nbytes for op in ops if op.weight_bytes)
    return {
        "experts a rank": shape.num_local_experts,
        "tokens": point["num_tokens"],
        "expert products GB": experts / 1e9,
        "all else GB": (total - experts) / 1e9,
        "experts' share, %": 100 * experts / total,
    }


def calls_table(calls: pd.DataFrame) -> pd.DataFrame:
    """Whole against trimmed calls: ours in microseconds, the ratio, its bytes, and the published ratio beside it."""
    rows = {}
    for op, published in OUR_CALLS.items():
        whole, kept = (calls[(calls.op == op) & (calls.rows == rows_)].iloc[0] for rows_ in (8192, 128))
        whole_ms, kept_ms = H100_CALLS_MS[published]
        rows[published] = {
            "our call": op,
            "8,192 rows µs": whole.device_us,
            "128 rows µs": kept.device_us,
            "ratio": round(whole.device_us / kept.device_us, 1),
            "bytes ratio": round(whole.bytes / kept.bytes, 1),
            "TFLOP/s at 8,192 rows": round(whole.flops / whole.device_us / 1e6),
            "published H100 ratio": round(whole_ms / kept_ms, 1),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("call")


def roofline_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Step time over its roofline, a line for each length, a column for each arm."""
    ratio = steps.assign(ratio=steps.step_us / steps.limit_us)
    table = ratio.pivot(index="num_tokens", columns="arm", values="ratio")
    return table.reindex(columns=_arms_in(steps)).round(2)


def model_error_table(model: StepModel | None) -> pd.DataFrame:
    """The step-time model's absolute error in percent: on held-out points by arm, and on steps that the host bounds.

    The latter are not all held out. No line where there is no model.
    """
    errors = model.errors if model else {}
    rows = {
        name.replace(HOST_BOUND, "bounded by the host"): {
            "points": e.n,
            "median error, %": 100 * e.median,
            "95th percentile, %": 100 * e.p95,
        }
        for name, e in errors.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").round(1).rename_axis("arm")


def model_sentence(model: StepModel | None) -> str:
    """Where the model comes from, or that there is none."""
    if model is None:
        return "No step-time model is bundled: what was not measured has no number."
    return f"The step-time model: {model.source}."


def _arms_in(table: pd.DataFrame) -> list[str]:
    present = set(table["arm"])
    return [arm for arm in ARM_NAMES if arm in present]
