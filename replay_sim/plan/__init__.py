"""Planning: capture sizes, trim threshold, what batches can reach, and what a plan costs.

`optimal` (the plan of least expected cost) needs numpy and is imported by name where it is used.
"""

from replay_sim.plan.capture_plan import CapturePlan, make_plan
from replay_sim.plan.capture_sizes import full_capture_sizes, model_capture_sizes, replay_capture_sizes
from replay_sim.plan.cost import PlanCost, plan_cost, static_bytes_per_row
from replay_sim.plan.dummy_batch import check_cache_slots, dummy_query_lens
from replay_sim.plan.reachable import reachable_rows, unreachable_sizes
from replay_sim.plan.trim_threshold import trim_threshold

__all__ = [
    "CapturePlan",
    "PlanCost",
    "check_cache_slots",
    "dummy_query_lens",
    "full_capture_sizes",
    "make_plan",
    "model_capture_sizes",
    "plan_cost",
    "reachable_rows",
    "replay_capture_sizes",
    "static_bytes_per_row",
    "trim_threshold",
    "unreachable_sizes",
]
