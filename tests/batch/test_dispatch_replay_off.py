"""Dispatch with replay off: every mode runs the layers on the whole batch, what measurements compare with."""

import pytest

from replay_sim.batch.dispatch import CudagraphMode, ReplayReason, dispatch_step
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.plan.capture_plan import CapturePlan

WINDOW, SIZES, FULL_SIZES, REPLAY_SIZES = 8, (16, 32), (2, 4), (8, 16)
PLAN = CapturePlan(
    window=WINDOW,
    model_sizes=SIZES,
    full_sizes=FULL_SIZES,
    replay_sizes=REPLAY_SIZES,
    trim_threshold=None,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)
PREFILL = Batch([Request(30, 0, Phase.PREFILL)])
LONG = Batch([Request(50, 0, Phase.PREFILL)])
DECODES = Batch([Request(1, 9, Phase.DECODE)] * 3)


@pytest.mark.parametrize(
    ("batch", "model_sizes", "mode", "padded"),
    [
        (PREFILL, SIZES, CudagraphMode.PIECEWISE, 32),
        (PREFILL, (), CudagraphMode.NONE, 30),
        (LONG, SIZES, CudagraphMode.NONE, 50),
        (DECODES, SIZES, CudagraphMode.FULL, 4),
    ],
)
def test_replay_off_keeps_the_mode_and_has_no_replay_batch(batch, model_sizes, mode, padded) -> None:
    """D1, D2: eager steps, which would trim with replay, run whole."""
    sizes = {"model_sizes": model_sizes, "full_sizes": FULL_SIZES, "replay_sizes": REPLAY_SIZES}
    record = dispatch_step(batch, PLAN, **sizes, replay=False)
    assert (record.mode, record.padded_tokens) == (mode, padded)
    assert (record.replay_rows, record.padded_rows, record.replay_mode) == (0, 0, None)
    assert record.reason is ReplayReason.OFF
    on = dispatch_step(batch, PLAN, **sizes)
    assert (on.mode, on.padded_tokens) == (mode, padded)
    assert (on.replay_mode is not None) == (mode is CudagraphMode.NONE)
