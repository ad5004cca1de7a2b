"""What one step returned and left behind, compared with plain clauses and the eager twin, bit for bit."""

from collections.abc import Sequence

import torch
from long_run.eager_twin import TwinOutput
from long_run.histories import Step
from long_run.plain_step import PlainRecord, PlainRow

from replay_sim.batch.dispatch import StepRecord
from replay_sim.decoder.step import StepOutput
from replay_sim.decoder.step_context import StepContextBuilder
from replay_sim.replay.break_buffers import BreakBuffers
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.static_buffers import StaticBuffers


def compare_record(record: StepRecord, expected: PlainRecord) -> None:
    """D1-D4, G3, S5, X1, X2."""
    replay_mode = None if record.replay_mode is None else record.replay_mode.name
    assert (
        PlainRecord(
            record.num_tokens,
            record.padded_tokens,
            record.mode.name,
            record.replay_rows,
            record.padded_rows,
            replay_mode,
            record.reason.name,
            record.num_reqs,
            record.model_reason.name,
        )
        == expected
    )


def compare_outputs(output: StepOutput, twin: TwinOutput, rows: Sequence[PlainRow], expected: PlainRecord) -> None:
    """G5, L5, L6, S8: every row's bits, zeros where trimmed, all finite whatever the pads hold."""
    pairs = [
        *zip((output.hidden_states, output.pre_mix, *output.late_aux), twin.replay, strict=True),
        *zip(output.early_aux, twin.early_aux, strict=True),
    ]
    for actual, wanted in pairs:
        assert actual.dtype == wanted.dtype and len(actual) == len(rows)
        assert bool(actual.isfinite().all()), "a row of the step is not finite"
        assert torch.equal(actual, wanted), "the step's bits differ from the eager twin's"
    if expected.replay_mode is not None:
        trimmed = [index for index, row in enumerate(rows) if not row.kept]
        assert not bool(output.hidden_states[trimmed].any()), "a trimmed row is not zero"


def compare_metadata(contexts: StepContextBuilder, rows: Sequence[PlainRow], expected: PlainRecord) -> None:
    """S1-S4, S8: the rows' metadata and that of the replay batch, on the device, entry by entry."""
    batch, replay = contexts.batch, contexts.replay
    columns = [
        (batch.positions, [row.position for row in rows]),
        (batch.slot_mapping, [row.slot for row in rows]),
        (batch.request_of_row, [row.request for row in rows]),
        (batch.window_start, [row.start for row in rows]),
    ]
    pads = [
        (batch.slot_mapping, expected.padded_tokens, len(rows)),
        (batch.request_of_row, expected.padded_tokens, len(rows)),
    ]
    if expected.replay_mode is not None:
        kept = [row for row in rows if row.kept]
        places = [index for index, row in enumerate(rows) if row.kept]
        columns += [
            (replay.rows, places),
            (replay.positions, [row.position for row in kept]),
            (replay.slot_mapping, [row.slot for row in kept]),
            (replay.request_of_row, [row.request for row in kept]),
            (replay.window_start_first, [row.start for row in kept]),
            (replay.window_start_rest, [row.start_rest for row in kept]),
            (replay.num_rows, [len(kept)]),
        ]
        pads += [
            (replay.slot_mapping, expected.padded_rows, len(kept)),
            (replay.request_of_row, expected.padded_rows, len(kept)),
        ]
        row_of = dict(zip(places, range(len(kept)), strict=True))
        assert replay.output_row_of.tolist() == [row_of.get(row, -1) for row in range(replay.max_rows)]
    for tensor, values in columns:
        assert tensor[: len(values)].tolist() == values
    for tensor, padded, count in pads:
        assert tensor[count:padded].tolist() == [-1] * (padded - count)


def compare_break_buffers(
    buffers: BreakBuffers, rows: Sequence[PlainRow], expected: PlainRecord, form: ReplayForm
) -> None:
    """L6: where no flag is set a row is zero; after a step that filled the buffers the flags name its kept rows."""
    flags = buffers.written.amax(0)
    for tensor in buffers.tensors.values():
        assert not bool(tensor[flags == 0].any()), "a row without a flag is not zero"
    one_launch = form is ReplayForm.ONE_LAUNCH and expected.replay_mode == "PIECEWISE"
    if expected.replay_mode is not None and (expected.mode == "PIECEWISE" or one_launch):
        assert flags.nonzero().flatten().tolist() == [index for index, row in enumerate(rows) if row.kept]


def compare_static_buffers(inputs: StaticBuffers, expected: PlainRecord, step: Step) -> None:
    """B2: pads are zero after a replay graph, unless they were poisoned after a breakable graph's gather."""
    if expected.replay_mode != "PIECEWISE" or (step.poison and step.form is ReplayForm.BREAKABLE):
        return
    for tensor in inputs.tensors.values():
        assert not bool(tensor[expected.replay_rows : expected.padded_rows].any()), "a pad is not zero"
