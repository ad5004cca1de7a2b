"""A tuning's outcome as text that leads with the winner and the margin, and as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from replay_sim.config import FLASH_RANK
from replay_sim.explore.tuning import CurvePoint, TunedPlan, Tuning
from replay_sim.explore.tuning_limits import CaptureSeconds, measured_capture_seconds
from replay_sim.explore.tuning_plans import has_widest_full
from replay_sim.explore.tuning_score import PlanScore
from replay_sim.plan import CapturePlan, plan_cost, unreachable_sizes
from replay_sim.plan.capture_sizes import listed

SAME = 5e-4
"""Margins below this share round to 0.0 %: they are called none."""
MIB = 1 << 20


@attrs.frozen(kw_only=True)
class About:
    """What was tuned on, in words: the config's name, the workload, what was assumed, and where costs are guesses."""

    config: str
    workload: str
    assumed: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()


def keeps_own(tuning: Tuning) -> bool:
    """Whether the config's own sizes are as good as the tuned ones, where they are judged: what to paste then."""
    return _margin(tuning) < SAME


def _margin(tuning: Tuning) -> float:
    """How much less time a step takes tuned than with the config's own sizes, as a share of 1."""
    return 1 - _judged_on(tuning.tuned).expected_step_ms / _judged_on(tuning.own).expected_step_ms


def headline(tuning: Tuning) -> str:
    """The winner and its margin, on steps that it did not see where there are such."""
    unseen = tuning.tuned.unseen is not None
    tuned, own = (_judged_on(plan) for plan in (tuning.tuned, tuning.own))
    where = "on steps that it was not tuned on" if unseen else "on the steps that it was tuned on"
    margin = _margin(tuning)
    default = 1 - tuned.expected_step_ms / _judged_on(tuning.default).expected_step_ms
    graphs = f"{tuned.num_replay_graphs} replay and {tuned.num_model_graphs} piecewise graphs"
    if abs(margin) < SAME:
        return (
            f"Keep the config: no choice with {graphs} changes its modelled step time of {own.expected_step_ms:.3f} ms "
            f"{where}{_saved(tuning)}."
        )
    if margin < 0:
        return (
            f"Keep the config: what is best on one half is {-margin:.1%} slower {where}, "
            f"{tuned.expected_step_ms:.3f} ms a step against {own.expected_step_ms:.3f}."
        )
    doubt = ""
    if tuning.error is not None and margin < tuning.error:
        doubt = f" The model itself is off by {tuning.error:.1%}, more than that: measure before you trust it."
    return (
        f"Take the tuned sizes: {graphs} take {margin:.1%} less time a step than the config's own and {default:.1%} "
        f"less than the default {where}, {tuned.expected_step_ms:.3f} ms against {own.expected_step_ms:.3f} and "
        f"{_judged_on(tuning.default).expected_step_ms:.3f} (modelled).{doubt}"
    )


def _saved(tuning: Tuning) -> str:
    """What the tuned plan captures less than the config's own, in a clause; empty if it does not."""
    tuned, own = tuning.tuned.plan, tuning.own.plan
    replay, model = len(own.replay_sizes) - len(tuned.replay_sizes), len(own.model_sizes) - len(tuned.model_sizes)
    seconds = measured_capture_seconds()
    saved = seconds.of(own) - seconds.of(tuned)
    if replay < 0 or model < 0 or not replay + model:
        return ""
    return f"; the tuned sizes capture {replay} replay and {model} piecewise graphs fewer, {saved:.1f} s at start-up"


def overrides(tuning: Tuning) -> list[str]:
    """What the tuned config sets against a bound or a choice that the user's config states, a sentence each."""
    own, tuned = tuning.own.config, tuning.tuned.config
    bound, largest = own.max_cudagraph_capture_size, max(tuning.tuned.plan.model_sizes, default=0)
    told = []
    if bound is not None and largest > bound:
        told.append(
            f"tuned raises max_cudagraph_capture_size from {bound} to {largest}: a larger graph takes more memory, "
            "which --max-pool-mib bounds"
        )
    if tuned.cudagraph_decoder_replay and not own.cudagraph_decoder_replay:
        told.append("tuned sets cudagraph_decoder_replay to true, which CONFIG sets to false")
    return told


def _judged_on(plan: TunedPlan) -> PlanScore:
    return plan.unseen or plan.seen


def as_dict(tuning: Tuning, about: About) -> dict[str, Any]:
    """The JSON object in the engine's names; `default`, `own` and `tuned` are scored on the steps tuned on."""
    capture = measured_capture_seconds()
    tuned = tuning.tuned.config
    return {
        "config": about.config,
        "workload": about.workload,
        "headline": headline(tuning),
        "overrides": overrides(tuning),
        "cudagraph_capture_sizes": list(tuned.cudagraph_capture_sizes or tuning.tuned.plan.model_sizes),
        "decoder_replay_cudagraph_capture_sizes": list(tuning.tuned.plan.replay_sizes),
        "decoder_replay_trim_threshold": tuned.decoder_replay_trim_threshold,
        "cudagraph_decoder_replay": tuned.cudagraph_decoder_replay,
        **{plan.name: _plan_dict(plan.plan, plan.seen, capture) for plan in tuning.plans},
        "unseen": {plan.name: plan.unseen.as_dict() for plan in tuning.plans if plan.unseen} or None,
        "replay_curve": [_plan_dict(point.plan, point.score, capture) for point in tuning.replay_curve],
        "model_curve": [_plan_dict(point.plan, point.score, capture) for point in tuning.model_curve],
        "kept_for_full_graphs": list(tuning.kept_sizes),
        "unreachable_sizes": {plan.name: list(unreachable_sizes(plan.plan)) for plan in tuning.plans},
        "limits": attrs.asdict(tuning.limits),
        "capture_seconds_source": capture.source,
        "assumed": list(about.assumed),
        "outside_of_what_was_measured": list(about.guesses),
    }


def _plan_dict(plan: CapturePlan, score: PlanScore, capture: CaptureSeconds) -> dict[str, Any]:
    """A plan's sizes, score, and what it costs at start-up."""
    cost = plan_cost(plan, FLASH_RANK)
    return {
        **score.as_dict(),
        "cudagraph_capture_sizes": list(plan.model_sizes),
        "decoder_replay_cudagraph_capture_sizes": list(plan.replay_sizes),
        "decoder_replay_trim_threshold": plan.trim_threshold,
        "static_buffer_bytes": cost.static_buffer_bytes,
        "break_buffer_bytes": cost.break_buffer_bytes,
        "capture_s": round(capture.of(plan), 2),
    }


def as_text(tuning: Tuning, about: About) -> str:
    """Headline, plans side by side, the curve, then what to know about them."""
    tuned = tuning.tuned
    parts = [
        headline(tuning),
        *(f"Note: {told}" for told in overrides(tuning)),
        "",
        f"Workload: {about.workload}",
        "",
        _plans_table(tuning),
        "",
        f"cudagraph_capture_sizes: {_sizes(tuned.plan.model_sizes)}",
        f"decoder_replay_trim_threshold: {tuned.config.decoder_replay_trim_threshold}"
        + ("" if tuned.plan.breaking_sizes else ", above every size: no model graph breaks"),
        f"decoder_replay_cudagraph_capture_sizes: {_sizes(tuned.plan.replay_sizes)}",
        "",
        "Trade-off, replay graphs (on the steps tuned on):",
        _curve_table(tuning.replay_curve, "num_replay_graphs"),
        "",
        "Trade-off, piecewise model graphs:",
        _curve_table(tuning.model_curve, "num_model_graphs"),
        "",
        *(f"Note: {note}" for note in _notes(tuning, about)),
    ]
    return "\n".join(parts)


def _plans_table(tuning: Tuning) -> str:
    from tabulate import tabulate

    rows = []
    for plan in tuning.plans:
        for half, score in (("tuned on", plan.seen), ("unseen", plan.unseen)):
            if score is not None:
                graphs = (score.num_model_graphs, score.num_replay_graphs)
                rows.append((plan.name, half, f"{score.expected_step_ms:.3f}", score.padded_rows, *graphs))
    headers = ("plan", "steps", "step ms", "padded rows", "model graphs", "replay graphs")
    return tabulate(rows, headers, tablefmt="simple", intfmt=",", disable_numparse=[2])


def _curve_table(curve: Sequence[CurvePoint], graphs: str) -> str:
    from tabulate import tabulate

    if not curve:
        return "no choice: no step runs outside of FULL graphs, or the sizes that these need leave none"
    capture = measured_capture_seconds()
    rows = [
        (
            getattr(point.score, graphs),
            f"{point.score.expected_step_ms:.3f}",
            point.score.padded_rows,
            f"{plan_cost(point.plan, FLASH_RANK).static_buffer_bytes / MIB:,.0f}",
            f"{capture.of(point.plan):.1f}",
        )
        for point in curve
    ]
    return tabulate(
        rows,
        ("graphs", "step ms", "padded rows", "input buffers MiB", "capture s"),
        tablefmt="simple",
        intfmt=",",
        disable_numparse=[1, 3, 4],
    )


def _notes(tuning: Tuning, about: About) -> list[str]:
    """Where figures come from, what no batch can select, what could not be left out."""
    notes = [f"step times are {tuning.own.seen.source}", *about.assumed]
    notes += about.guesses
    if tuning.kept_sizes:
        notes.append(f"model sizes {listed(tuning.kept_sizes)} stay: the engine makes its FULL graphs of them")
    own = tuning.own.plan
    if own.model_sizes and own.full_sizes and not has_widest_full(own):
        notes.append(
            f"model sizes above {own.full_sizes[-1]} were not tried, as the engine would make FULL graphs of them too; "
            "they are with a larger max_cudagraph_capture_size in CONFIG"
        )
    for plan in tuning.plans:
        unreachable = unreachable_sizes(plan.plan)
        if unreachable:
            notes.append(f"{plan.name}: no batch can select the replay sizes {listed(unreachable)}")
    if not tuning.tuned.config.cudagraph_decoder_replay:
        notes.append("tuned captures no replay graphs: cudagraph_decoder_replay is false, for an empty list means P2's")
    notes.append(f"capture seconds: graphs times seconds a graph, {measured_capture_seconds().source}")
    return notes


def _sizes(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes)) or "none"
