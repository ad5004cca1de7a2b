"""Operations timed apart from any step, read from `calls` records: which part of a step's time is whose."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from replay_sim.config.shapes import SHAPES, DecoderShape
from replay_sim.measure import step_ops
from replay_sim.measure.records import Record
from replay_sim.measure.roofline import rates_of
from replay_sim.measure.step_features import APART, Floats, OpArrays, op_arrays, op_entry
from replay_sim.measure.step_ops import Op, Rows


@attrs.frozen(eq=False)
class MeasuredCalls:
    """Calls of one operation each: their counts, and the measured microseconds, float64 (N)."""

    ops: OpArrays
    device_us: Floats


def measured_calls(records: Iterable[Record]) -> MeasuredCalls | None:
    """The points of `calls` records; None without any. KeyError names a key, an operation or a shape unknown."""
    entries, device_us = [], []
    for record in records:
        shape, rates = SHAPES[str(record.settings["model"])], rates_of(record.settings)
        for point in record.points:
            rows, measured = point["rows"], point["device_us"]
            assert isinstance(rows, int) and isinstance(measured, int | float)
            op = called_op(shape, str(point["op"]), rows)
            entries.append((0, APART, *op_entry(op, shape, rates, even=True)))
            device_us.append(float(measured))
    return MeasuredCalls(op_arrays(entries), np.array(device_us)) if entries else None


def called_op(shape: DecoderShape, name: str, rows: int) -> Op:
    """The operation of a `calls` point: on `rows` rows of one request deep in its context, as call_times runs it."""
    window_keys, shared_keys = rows * shape.window, rows * shape.index_topk
    batch = Rows(
        padded=rows,
        real=rows,
        window_keys=window_keys,
        shared_keys=shared_keys,
        window_entries=shape.window - 1 + rows,
        shared_entries=shared_keys,
    )
    hidden, inter, shared = shape.hidden_size, shape.moe_intermediate_size, shape.shared_intermediate_size
    ops = {
        "attend_window": step_ops.attention(shape, batch, shared=False),
        "attend_shared": step_ops.attention(shape, batch, shared=True),
        "expert_w13": step_ops.grouped(shape, "w13", batch, hidden, 2 * inter),
        "expert_w2": step_ops.grouped(shape, "w2", batch, inter, hidden),
    }
    widths = {
        "wqkv_a": (hidden, shape.q_lora_rank + shape.head_dim),
        "wq_b": (shape.q_lora_rank, shape.num_heads * shape.head_dim),
        "wo_b": (shape.o_groups * shape.o_lora_rank, hidden),
        "shared_w13": (hidden, 2 * shared),
        "shared_w2": (shared, hidden),
    }
    return ops[name] if name in ops else step_ops.product(shape, name, rows, *widths[name])
