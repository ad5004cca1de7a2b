"""The report's trim threshold: the break's curve, where it begins to pay, and what the config's threshold costs."""

from __future__ import annotations

from replay_sim.explore.evidence import NO_BREAK, Evidence, ThresholdEvidence
from replay_sim.explore.figures_threshold import threshold_figure
from replay_sim.explore.report_parts import Drawing, Part, Section, Words, frame_table, sentence
from replay_sim.explore.speedup_cells import CellKind


def threshold_section(found: Evidence) -> Section:
    """The curve, its figure, and a line for one, four and sixteen prompts a step."""
    at = found.threshold
    parts: list[Part] = [Words(f"Nothing is drawn: {at}.")] if isinstance(at, str) else _parts(found, at)
    return Section("threshold", "Trim threshold", parts)


def _parts(found: Evidence, at: ThresholdEvidence) -> list[Part]:
    parts: list[Part] = [Words(crossing_words(found, at)), Words(config_words(found, at))]
    source = f"{at.source}. Steps of the lowest panel: {at.steps}"
    parts.append(Drawing("threshold", threshold_figure(at.shown, at.threshold, at.costs, source)))
    if not at.table.empty:
        table = at.table.rename(columns=lambda name: str(name).replace("_", " "))
        parts.append(
            frame_table(
                "Where the break begins to pay, by prompts a step; costs with each size as frequent as any other", table
            )
        )
    parts.append(
        Words(
            f"{sentence(at.source)} Each step takes the time of the smallest size of the curve that holds it; the "
            "sizes of the config are others.",
            is_source=True,
        )
    )
    return parts


def crossing_words(found: Evidence, at: ThresholdEvidence) -> str:
    """From where on the break pays for one prompt a step."""
    kind = f"measured on {found.gpu}" if at.shown.kind is CellKind.MEASURED else at.shown.kind.value
    return f"With one prompt a step, {kind}, the break {at.shown.verdict}."


def config_words(found: Evidence, at: ThresholdEvidence) -> str:
    """What the config's threshold costs over the best."""
    plan = found.job.plan
    largest = max(plan.model_sizes, default=0)
    if not at.shown.curve.key.in_graphs:
        return (
            f"The largest PIECEWISE graph of this config has {largest:,} tokens, the window {plan.window:,}: longer "
            "steps run eagerly, and trim whatever the threshold."
        )
    best = f"{at.costs.best:,.0f}" if at.costs.best < NO_BREAK else "no break"
    regret, steps = at.costs.regret(at.threshold), f"on {at.steps}"
    if at.threshold == NO_BREAK:
        return (
            f"No PIECEWISE graph of this config, up to {largest:,} tokens, breaks for replay: that costs {regret:.1%} "
            f"more than the best threshold, {best}, {steps}."
        )
    mean = at.costs.of(at.threshold) / 1e3
    return (
        f"This config's threshold, {at.threshold:,.0f}, costs {regret:.1%} more than the best, {best}, {steps}: "
        f"{mean:,.2f} ms a step."
    )
