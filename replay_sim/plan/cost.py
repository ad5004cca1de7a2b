"""What a plan costs: graphs, segments, bytes and padding (P7)."""

from collections.abc import Mapping

import attrs

from replay_sim.config import FLASH_RANK, DecoderShape
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.plan.reachable import mostly_padding, reachable_rows, rows_selecting

FLOAT32_BYTES = 4
INT64_BYTES = 8


@attrs.frozen(kw_only=True)
class PlanCost:
    """The cost of a plan on a decoder shape.

    Attributes:
        num_replay_graphs, num_model_graphs, num_full_graphs: graphs of each kind.
        num_replay_segments: segments of all replay graphs in breakable form; each has one break a replay layer, and
            so one segment more than layers. In one-launch form a graph is one.
        static_buffer_bytes: the seven inputs, as many rows as the largest replay size (B1).
        break_buffer_bytes: the outputs, as many rows as the largest model graph that breaks (L4); 0 if none
            does. In one-launch form they hold at least `max_num_batched_tokens` rows, for eager steps.
        predicted_pool_bytes: what a memory model predicts for the graphs' pool; None where none was asked.
        mean_padding: pad rows as a share of padded rows, both summed over all row counts that select a graph:
            every reachable one once, or as often as a given histogram says. 0 if none does.
        worst_padding: the largest such share of one row count; 0 if none selects a graph.
        worst_padding_rows: the row count that has it, the smallest if several do; None if none does.
        mostly_padding_rows: how many reachable row counts run on more pads than rows.
    """

    num_replay_graphs: int
    num_model_graphs: int
    num_full_graphs: int
    num_replay_segments: int
    static_buffer_bytes: int
    break_buffer_bytes: int
    predicted_pool_bytes: int | None
    mean_padding: float
    worst_padding: float
    worst_padding_rows: int | None
    mostly_padding_rows: int


def static_bytes_per_row(shape: DecoderShape, input_id_bytes: int = 4) -> int:
    """Return the bytes of one row of the seven inputs of the replay layers; input ids are int32 or int64."""
    streams = shape.hc_mult
    hidden_states_and_residual = (1 + streams) * shape.hidden_size * shape.dtype_bytes
    mixes = (streams + streams + streams * streams) * FLOAT32_BYTES
    return hidden_states_and_residual + INT64_BYTES + input_id_bytes + mixes


def break_bytes_per_row(shape: DecoderShape) -> int:
    """Return the bytes of one row of the replay layers' outputs: streams, pre mix, late aux states."""
    vectors = shape.hc_mult + len(shape.late_aux_layers)
    return vectors * shape.hidden_size * shape.dtype_bytes + shape.hc_mult * FLOAT32_BYTES


def plan_cost(
    plan: CapturePlan,
    shape: DecoderShape = FLASH_RANK,
    *,
    histogram: Mapping[int, float] | None = None,
    input_id_bytes: int = 4,
    predicted_pool_bytes: int | None = None,
) -> PlanCost:
    """Return what `plan` costs on `shape` (P7).

    Args:
        histogram: weight by replay rows, for the padding of a workload; None for every reachable count once.
        input_id_bytes: 4 or 8.
        predicted_pool_bytes: the figure of a pool model, passed through; it is not computed here.
    """
    graphs = len(plan.replay_sizes)
    largest = plan.replay_sizes[-1] if plan.replay_sizes else 0
    breaking = plan.breaking_sizes
    worst, worst_rows = _worst_padding(plan)
    return PlanCost(
        num_replay_graphs=graphs,
        num_model_graphs=len(plan.model_sizes),
        num_full_graphs=len(plan.full_sizes),
        num_replay_segments=graphs * (shape.num_replay_layers + 1),
        static_buffer_bytes=largest * static_bytes_per_row(shape, input_id_bytes),
        break_buffer_bytes=breaking[-1] * break_bytes_per_row(shape) if breaking else 0,
        predicted_pool_bytes=predicted_pool_bytes,
        mean_padding=_mean_padding(plan) if histogram is None else _mean_padding_of(plan, histogram),
        worst_padding=worst,
        worst_padding_rows=worst_rows,
        mostly_padding_rows=sum(high - low + 1 for _, low, high in mostly_padding(plan)),
    )


def _mean_padding(plan: CapturePlan) -> float:
    """Pads over padded rows, every reachable row count once."""
    rows = padded = 0
    for size, intervals in rows_selecting(plan, reachable_rows(plan)):
        for low, high in intervals:
            rows += (low + high) * (high - low + 1) // 2
            padded += size * (high - low + 1)
    return 1 - rows / padded if padded else 0.0


def _mean_padding_of(plan: CapturePlan, histogram: Mapping[int, float]) -> float:
    """Pads over padded rows, each row count by its weight."""
    from bisect import bisect_left

    rows = padded = 0.0
    for count, weight in histogram.items():
        index = bisect_left(plan.replay_sizes, count)
        if index < len(plan.replay_sizes):
            rows += weight * count
            padded += weight * plan.replay_sizes[index]
    return 1 - rows / padded if padded else 0.0


def _worst_padding(plan: CapturePlan) -> tuple[float, int | None]:
    """The largest pad share of a reachable row count, and that count."""
    worst, worst_rows = 0.0, None
    for size, intervals in rows_selecting(plan, reachable_rows(plan)):
        for low, _ in intervals:
            share = 1 - low / size
            if worst_rows is None or share > worst:
                worst, worst_rows = share, low
    return worst, worst_rows
