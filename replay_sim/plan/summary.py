"""A plan and its cost as one flat object in the engine's key names, as `plan --json` prints it."""

from typing import Any

import attrs

from replay_sim.config import DecoderShape, ServingConfig
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.cost import plan_cost
from replay_sim.plan.reachable import reachable_rows, unreachable_sizes


def plan_summary(
    config: ServingConfig, plan: CapturePlan, shape: DecoderShape, *, predicted_pool_bytes: int | None = None
) -> dict[str, Any]:
    """Return settings, sizes, costs (P7), what is unreachable and what must be said (P6); JSON values only.

    `predicted_pool_bytes` is the figure of a pool model, or None.
    """
    cost = attrs.asdict(plan_cost(plan, shape, predicted_pool_bytes=predicted_pool_bytes))
    return {
        "model": config.model,
        "shape": shape.name,
        "window": plan.window,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "num_speculative_tokens": config.num_speculative_tokens,
        "cudagraph_mode": config.cudagraph_mode,
        "max_cudagraph_capture_size": config.capture_size_limit,
        "cudagraph_capture_sizes": list(plan.model_sizes),
        "full_cudagraph_capture_sizes": list(plan.full_sizes),
        "decoder_replay_trim_threshold": plan.trim_threshold,
        "decoder_replay_cudagraph_capture_sizes": list(plan.replay_sizes),
        "unreachable_sizes": list(unreachable_sizes(plan)),
        "reachable_rows": [list(interval) for interval in reachable_rows(plan)],
        **cost,
        "notes": list(plan.notes),
    }
