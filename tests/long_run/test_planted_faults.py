"""Faults planted in the system are seen by the comparisons of the long run, each in a history of a few steps."""

from typing import Any

import attrs
import pytest
import torch
from long_run.histories import Ask, Poison, Step
from long_run.plain_step import Needs
from long_run.runs import serve
from long_run.served import Served, Tally
from long_run.worlds import World, build, draw_world

from replay_sim.batch import dispatch, metadata
from replay_sim.capture.host import HostBackend
from replay_sim.decoder.model import Decoder
from replay_sim.plan.capture_plan import CapturePlan
from replay_sim.replay import break_buffers, graphs, row_ops
from replay_sim.replay.graphs import ReplayForm
from replay_sim.replay.sharing import PoolSharing

BREAKABLE, ONE_LAUNCH = ReplayForm.BREAKABLE, ReplayForm.ONE_LAUNCH
WINDOW = 4
SHAPE = attrs.evolve(
    draw_world(0).shape,
    num_layers=3,
    cut=1,
    window=WINDOW,
    early_aux_layers=(0,),
    late_aux_layers=(2,),
    max_position=400,
)
WORLD = World(
    seed=0,
    shape=SHAPE,
    plan=CapturePlan(
        window=WINDOW,
        model_sizes=(3, 12, 24),
        full_sizes=(2,),
        replay_sizes=(6, 12),
        trim_threshold=WINDOW + 1,
        max_num_seqs=4,
        max_num_batched_tokens=30,
    ),
    forms=(BREAKABLE, ONE_LAUNCH),
    sharing=None,
    largest_first=True,
    hold_outputs=False,
    missing=frozenset({("PIECEWISE", 3)}),
    num_blocks=60,
    max_blocks=20,
    block_size=4,
    against_float64=True,
)
# Trimmed prompts, a chunk after one, a decode, all rows read, an eager step, a step beside a rank that asks for more.
ASKED: list[tuple[Ask, ...]] = [
    (Ask("a", 21),),
    (Ask("a", 7), Ask("b", 2)),
    (Ask("a", 1, decodes=True), Ask("b", 1, decodes=True)),
    (Ask("c", 9, all_rows_read=True), Ask("b", 1, decodes=True)),
    (Ask("d", 29), Ask("c", 1, decodes=True)),
    (Ask("a", 2, decodes=True), Ask("b", 5)),
]
HISTORY = [
    *(Step(asks, form=form) for form in (BREAKABLE, ONE_LAUNCH) for asks in ASKED),
    Step((Ask("a", 3),), finished="abcd", poison=Poison.NAN, form=BREAKABLE, other=Needs(20, 1, False, 12, True)),
    Step((Ask("b", 13),), poison=Poison.NAN, form=ONE_LAUNCH, interrupted=1),
]


def served(world: World = WORLD) -> Served:
    return Served(world, build(world, HostBackend(1 << 28)), Tally())


def pads_stay(rows: torch.Tensor, inputs: Any, buffers: Any, padded: int) -> None:
    for name, buffer in buffers.items():
        buffer[: len(rows)] = inputs[name][rows]


def smallest_captured(sizes: Any, count: int) -> int | None:
    return next((size for size in reversed(sizes) if size >= count), None)


def no_early_kv(decoder: Decoder, inputs: Any) -> None:
    """The first replay layer's KV of the whole batch is not written."""


def scatter_without_clearing(targets: Any, written: torch.Tensor, outputs: Any, *index: torch.Tensor) -> None:
    fresh = torch.zeros_like(written)
    row_ops.scatter_rows(targets, fresh, outputs, *index)
    written.copy_(fresh)


def starts_of_the_batch(buffers: Any, padded_rows: int, source: Any, *, first_layer: bool) -> Any:
    """S4 left out: the layers after the first attend as far back as the first."""
    return metadata_of(buffers, padded_rows, source, first_layer=True)


metadata_of = metadata.ReplayMetadataBuffers.metadata
PLANTED = {
    "pads of the static buffers are not cleared": (graphs, "gather_into", pads_stay),
    "a larger size than the smallest that fits": (dispatch, "smallest_size", smallest_captured),
    "KV of trimmed rows is not written": (Decoder, "write_batch_kv", no_early_kv),
    "rows of an earlier step stay in the break buffers": (break_buffers, "scatter_rows", scatter_without_clearing),
    "layers after the first keep the batch's window starts": (
        metadata.ReplayMetadataBuffers,
        "metadata",
        starts_of_the_batch,
    ),
    "a pad's slot is 0": (metadata, "PAD_SLOT", 0),
    "a pad belongs to request 0": (metadata, "PAD_REQUEST", 0),
}


def test_without_a_fault_the_history_is_right() -> None:
    """All of S, L, G, D, B2."""
    tally = (system := served()).tally
    serve(system, HISTORY)
    assert tally.steps == len(HISTORY) and tally.counts["interrupted"] == 1
    assert {path[2] for path in tally.paths} >= {"GRAPH", "FULL_GRAPH", "NOT_CAPTURED"}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """All of S, L, G, D, B2."""
    where, name, value = PLANTED[fault]
    monkeypatch.setattr(where, name, value)
    with pytest.raises((AssertionError, ValueError)):
        serve(served(), HISTORY)


def test_sharing_the_pool_with_live_early_aux_states_is_seen() -> None:
    """O3."""
    with pytest.raises(AssertionError, match="bits differ|not finite"):
        serve(served(attrs.evolve(WORLD, sharing=PoolSharing.SHARED)), HISTORY)
