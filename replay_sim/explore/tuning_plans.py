"""The plans that tuning compares and chooses from: the config's own, the default rule's, and those of chosen sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from replay_sim.config import ServingConfig
from replay_sim.config.defaults import TRIM_THRESHOLD
from replay_sim.plan import CapturePlan
from replay_sim.plan.joint import JointPlanner, JointSizes, MixedSteps
from replay_sim.plan.step_costs import StepCosts

MOST_CANDIDATES = 512
MOST_THRESHOLDS = 24


def default_config(config: ServingConfig) -> ServingConfig:
    """The config without replay settings of its own: P2's sizes, the engine's threshold; the model's sizes stay (P4).

    Where the window is no smaller than the engine's threshold, which that refuses, the config's own stays.
    """
    threshold = TRIM_THRESHOLD if config.window < TRIM_THRESHOLD else config.decoder_replay_trim_threshold
    return attrs.evolve(
        config,
        cudagraph_decoder_replay=True,
        decoder_replay_cudagraph_capture_sizes=None,
        decoder_replay_trim_threshold=threshold,
    )


def config_with(config: ServingConfig, choice: JointSizes) -> ServingConfig:
    """The config with chosen sizes, all of them explicit.

    No replay size means no replay graphs. Without a size that breaks the threshold is above the largest, since the
    engine's is a number.
    """
    sizes = choice.model_sizes
    threshold = choice.trim_threshold
    if threshold is None:
        threshold = max(sizes[-1] + 1 if sizes else 0, config.window + 1)
    return attrs.evolve(
        config,
        cudagraph_capture_sizes=sizes or None,
        max_cudagraph_capture_size=sizes[-1] if sizes else config.max_cudagraph_capture_size,
        cudagraph_decoder_replay=bool(choice.replay_sizes),
        decoder_replay_cudagraph_capture_sizes=choice.replay_sizes or None,
        decoder_replay_trim_threshold=threshold,
    )


def choice_of(plan: CapturePlan) -> JointSizes:
    """A plan as a choice; its threshold is the smallest size that breaks."""
    return JointSizes(plan.model_sizes, min(plan.breaking_sizes, default=None), plan.replay_sizes, 0.0)


def kept_for_full(plan: CapturePlan) -> tuple[int, ...]:
    """Model sizes from which the engine makes the plan's FULL sizes: without one of them a FULL size would go.

    The engine rounds every model size up to a multiple of a decode's tokens (A6) and ends at the widest decode.
    """
    if not plan.full_sizes or not plan.model_sizes:
        return ()
    length, widest = plan.query_len_decode, plan.full_sizes[-1]
    kept = {-(-size // length): size for size in plan.model_sizes if -(-size // length) * length < widest}
    reaching = [size for size in plan.model_sizes if -(-size // length) * length >= widest]
    return tuple(sorted({*kept.values(), *reaching[:1]}))


def make_planner(plan: CapturePlan, steps: MixedSteps, costs: StepCosts, extra_rows: Iterable[int]) -> JointPlanner:
    """The planner of all choices that leave the FULL sizes of `plan` as they are.

    Candidates are the token counts and rows that occur, since a size between two of them pads more than the lower
    needs, and the sizes of `plan`. Of more than MOST_CANDIDATES token counts an even choice is taken, the largest
    among them. Rows are bounded by what requests can fill (P1).
    """
    tokens = [size for size in sorted(set(steps.tokens.tolist())) if size <= plan.max_num_batched_tokens]
    kept = kept_for_full(plan)
    candidates = [size for size in thinned(tokens, MOST_CANDIDATES) if _leaves_full(size, plan)]
    bound = plan.max_num_seqs * max(plan.window, plan.query_len_decode)
    rows = {*steps.rows.tolist(), *extra_rows}
    return JointPlanner(
        steps,
        costs,
        model_candidates={*candidates, *plan.model_sizes} if plan.model_sizes else (),
        replay_candidates=[row for row in rows if row <= min(bound, plan.max_num_batched_tokens)],
        kept_sizes=kept,
    )


def thresholds_to_try(plan: CapturePlan, planner: JointPlanner, others: Iterable[int | None]) -> list[int | None]:
    """No break, an even choice of the planner's candidates above the window (P5), and the thresholds of `others`."""
    above = [size for size in planner.model_candidates if size > plan.window]
    return [None, *sorted({*thinned(above, MOST_THRESHOLDS), *(size for size in others if size is not None)})]


def thinned(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the ascending values, evenly, the last among them."""
    if len(values) <= most:
        return list(values)
    return sorted({values[(index + 1) * len(values) // most - 1] for index in range(most)})


def _leaves_full(size: int, plan: CapturePlan) -> bool:
    """Whether a model size makes no FULL size that the plan does not have (A6)."""
    if not plan.full_sizes:
        return True
    padded = -(-size // plan.query_len_decode) * plan.query_len_decode
    return padded in plan.full_sizes or (padded > plan.full_sizes[-1] and has_widest_full(plan))


def has_widest_full(plan: CapturePlan) -> bool:
    """Whether a FULL graph holds the widest decode that there can be: if none does, a larger model size adds one."""
    widest = min(plan.max_num_seqs, plan.max_num_batched_tokens // plan.query_len_decode)
    return bool(plan.full_sizes) and plan.full_sizes[-1] == widest * plan.query_len_decode
