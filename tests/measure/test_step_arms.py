"""Arms: each yields the record that its name says, or none where it does not apply; outputs agree where rows do."""

import attrs
import numpy as np
import pytest
import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.capture.host import HostBackend
from replay_sim.config import TINY
from replay_sim.measure import step_runs
from replay_sim.measure.step_arms import ARMS, Rig, Rigs, RigSpec
from replay_sim.measure.step_runs import Runs, block_tables, num_rounds
from replay_sim.measure.step_sweeps import TimedBatch
from replay_sim.progress import no_progress

WINDOW, SIZES, SMALL, FULL, REPLAY = 8, (16, 32), (4,), (4,), (8, 16)
SPEC = RigSpec(
    window=WINDOW,
    num_local_experts=8,
    model_sizes=(*SMALL, *SIZES),
    full_sizes=FULL,
    replay_sizes=REPLAY,
    max_num_seqs=4,
    max_num_batched_tokens=40,
    num_blocks=12,
    max_blocks=2,
)
PREFILL = Batch([Request(30, 0, Phase.PREFILL)])
"""30 tokens of which 8 are kept: padded to 32, a size that breaks."""
THREE = Batch([Request(9, 0, Phase.PREFILL)] * 3)
"""27 tokens of which 24 are kept: more than any replay graph holds."""
LARGE = Batch([Request(40, 0, Phase.PREFILL)])
"""More tokens than any model graph holds."""
SHORT = Batch([Request(3, 0, Phase.PREFILL)])
DECODES = Batch([Request(1, 20, Phase.DECODE)] * 3)
NONE, PIECEWISE, FULL_MODE = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(SPEC, TINY, HostBackend(), 0, ARMS)


EAGER_OFF, EAGER_REPLAY = (NONE, 30, 0, 0, None), (NONE, 30, 8, 8, NONE)
OFF, BROKEN, IN_GRAPH = (PIECEWISE, 32, 0, 0, None), (PIECEWISE, 32, 8, 8, NONE), (PIECEWISE, 32, 8, 8, PIECEWISE)
EXPECTED = {
    "a trimming prefill": (PREFILL, [EAGER_OFF, EAGER_REPLAY, OFF, BROKEN, IN_GRAPH, IN_GRAPH, None]),
    "more rows than a replay graph holds": (
        THREE,
        [(NONE, 27, 0, 0, None), (NONE, 27, 24, 24, NONE), OFF, (PIECEWISE, 32, 24, 24, NONE), None, None, None],
    ),
    "more tokens than a model graph holds": (
        LARGE,
        [(NONE, 40, 0, 0, None), (NONE, 40, 8, 8, NONE), None, None, None, None, None],
    ),
    "a prefill below the window": (
        SHORT,
        [(NONE, 3, 0, 0, None), None, (PIECEWISE, 4, 0, 0, None), None, None, None, None],
    ),
    "decodes": (
        DECODES,
        [(NONE, 3, 0, 0, None), None, (PIECEWISE, 4, 0, 0, None), None, None, None, (FULL_MODE, 4, 0, 0, None)],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_arm_yields_what_its_name_says_or_is_left_out(rig: Rig, name: str) -> None:
    batch, expected = EXPECTED[name]
    found = [arm.record(rig, batch) for arm in ARMS]
    assert [
        record and (record.mode, record.padded_tokens, record.replay_rows, record.padded_rows, record.replay_mode)
        for record in found
    ] == expected


def test_arms_without_replay_compute_the_same_and_so_do_those_with_it(rig: Rig) -> None:
    """Both runners have the same weights and caches; replay itself changes what the last layers see (S4)."""
    ids = np.arange(30, dtype=np.int32)
    kept: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for arm in ARMS[:-1]:
        record = arm.record(rig, PREFILL)
        runner = arm.runner(rig)
        tables = block_tables(PREFILL, runner.num_blocks, runner.block_size, 0)
        row = runner.run(PREFILL, tables, ids, record).hidden_states[-1].clone()
        kept[arm.replay_mode is not None].append(row)
    assert rig.off.decoder.weights is rig.on.decoder.weights
    assert (len(kept[False]), len(kept[True])) == (2, 4)
    for rows in kept.values():
        assert torch.isfinite(rows[0]).all() and rows[0].any()
        for row in rows[1:]:
            torch.testing.assert_close(row, rows[0], atol=1e-4, rtol=1e-4)


def test_the_caches_hold_no_zeros(rig: Rig) -> None:
    for runner in (rig.off, rig.on):
        assert (runner.decoder.cache.window[0] != 0).float().mean() > 0.9
        assert (runner.decoder.cache.shared != 0).float().mean() > 0.9


def test_a_batch_is_run_as_all_its_arms_with_other_ids_each_time(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(step_runs, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(step_runs, "LEAST_LONG_ROUNDS", 2)
    monkeypatch.setattr(step_runs, "MOST_ROUNDS", 2)
    drawn: list[bytes] = []
    runs = Runs(rig, 3)
    draw = runs.ids

    def ids(batch):
        made = draw(batch)
        drawn.append(made.tobytes())
        return made

    monkeypatch.setattr(runs, "ids", ids)
    (steps,) = runs.measure([TimedBatch(batch=PREFILL, max_num_batched_tokens=40)])
    assert [step.arm for step in steps] == [arm.name for arm in ARMS[:-1]]
    assert all(len(step.samples) == 2 and step.launches is None for step in steps)
    assert all(0 < one.returned_us <= one.done_us and one.launch_us > 0 for step in steps for one in step.samples)
    assert len(set(drawn)) == len(drawn) == len(steps) * (1 + 2 + 1)


def test_rounds_fit_the_time_of_a_batch_and_are_never_too_few() -> None:
    assert num_rounds([100.0, 100.0]) == 15
    assert num_rounds([40_000.0, 60_000.0]) == 8
    assert num_rounds([90_000.0] * 5) == 5
    assert num_rounds([90_000.0, 310_000.0]) == 3


def test_requests_share_no_block_and_a_prompts_chunks_find_their_own_again() -> None:
    tables = block_tables(THREE, 12, 8, 5)
    ids = np.concatenate(tables)
    assert [len(table) for table in tables] == [2, 2, 2] and len(set(ids.tolist())) == 6 and ids.max() < 12
    whole, first = (block_tables(Batch([Request(n, 0, Phase.PREFILL)]), 12, 8, 5)[0] for n in (40, 16))
    assert first.tolist() == whole[:2].tolist()
    with pytest.raises(ValueError, match="needs 6 KV blocks: the cache has 5"):
        block_tables(THREE, 5, 8, 0)


def test_runners_are_kept_while_they_cover_what_is_asked_and_weights_while_they_fit() -> None:
    rigs = Rigs(TINY, HostBackend(), 0, ARMS[:3], no_progress)
    spec = attrs.evolve(SPEC, model_sizes=(16,), full_sizes=(), replay_sizes=(8,))
    first = rigs.rig(spec)
    assert rigs.rig(attrs.evolve(spec, replay_sizes=())) is first
    assert not first.on.replay_graphs.sizes, "no arm of these runs replay graphs"
    wider = rigs.rig(attrs.evolve(spec, window=4, model_sizes=(8,)))
    assert wider is not first and wider.off.decoder.weights is first.off.decoder.weights
    fewer = rigs.rig(attrs.evolve(spec, num_local_experts=4, model_sizes=(8,)))
    assert fewer.off.decoder.weights.layers[0].w13.shape[0] == 4
