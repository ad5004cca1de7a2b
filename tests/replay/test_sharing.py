"""Pool sharing: which arrangement a model gets, what memory each adds, and that outputs do not depend on it."""

import attrs
import pytest
import torch
from decoder.serving import Serving, make_plan, make_runner, prefill

from replay_sim.capture import CaptureBackend
from replay_sim.config.shapes import TINY, DecoderShape
from replay_sim.decoder.step import StepRunner
from replay_sim.replay.sharing import PoolSharing, choose_sharing

# Of sizes whose tensors pass a mebibyte, so that whole segments are at stake.
LARGE = make_plan(
    model_sizes=(128, 2048), replay_sizes=(64, 1024), full_sizes=(), max_num_batched_tokens=2048, max_num_seqs=16
)
SMALL = make_plan()
EARLY_AUX = attrs.evolve(TINY, early_aux_layers=(0, 2), late_aux_layers=(4,))
# Three prompts whose 56 tokens run in a graph of 64 that breaks, their 24 kept rows in a replay graph of 32.
PROMPTS = [prefill("a", 30), prefill("b", 17), prefill("c", 9)]
every_arrangement = pytest.mark.parametrize("sharing", PoolSharing)


@pytest.mark.parametrize(
    ("has_early_aux", "expected", "reason"),
    [(False, PoolSharing.SHARED, "no model-graph tensor"), (True, PoolSharing.OWN_STREAM, "early aux states")],
)
def test_the_arrangement_is_chosen_from_the_model_and_gives_its_reason(has_early_aux, expected, reason: str) -> None:
    """O1, O3, O4."""
    choice = choose_sharing(has_early_aux=has_early_aux)
    assert choice.sharing is expected and reason in choice.reason


@pytest.mark.parametrize("has_early_aux", [False, True])
@every_arrangement
def test_the_arrangement_can_be_set_by_hand(has_early_aux: bool, sharing: PoolSharing) -> None:
    """O4: for study, also where it is wrong."""
    choice = choose_sharing(has_early_aux=has_early_aux, override=sharing)
    assert choice.sharing is sharing and choice.reason == "set by hand"


@pytest.mark.parametrize(("shape", "expected"), [(TINY, PoolSharing.SHARED), (EARLY_AUX, PoolSharing.OWN_STREAM)])
def test_a_runner_takes_the_arrangement_of_its_model(backend, shape: DecoderShape, expected: PoolSharing) -> None:
    """O4."""
    assert make_runner(backend, SMALL, shape, captured=False).sharing.sharing is expected


def growth_of_capture(backend: CaptureBackend, plan, sharing: PoolSharing) -> tuple[int, int]:
    """Reserved bytes that the model graphs and the replay graphs add, each measured over its whole capture (O5)."""
    runner = make_runner(backend, plan, captured=False, sharing=sharing, num_blocks=400)
    readings = [backend.reserved_bytes()]
    for capture in (runner.capture_model_graphs, runner.capture_replay_graphs):
        capture()
        backend.synchronize()
        readings.append(backend.reserved_bytes())
    return readings[1] - readings[0], readings[2] - readings[1]


@pytest.mark.parametrize("plan", [SMALL, LARGE], ids=["small", "large"])
def test_replay_graphs_in_the_model_graphs_pool_and_stream_add_nothing(backend, plan) -> None:
    """O1, O5: D3 and U1 of the faults, the arrangement that is right."""
    model, replay = growth_of_capture(backend, plan, PoolSharing.SHARED)
    assert model > 0 and replay == 0


@pytest.mark.parametrize("plan", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("sharing", [PoolSharing.OWN_STREAM, PoolSharing.OWN_POOL])
def test_a_stream_or_a_pool_of_their_own_adds_segments(backend, plan, sharing: PoolSharing) -> None:
    """O2: the same pool on another stream is no better than another pool; D3, U1."""
    model, replay = growth_of_capture(backend, plan, sharing)
    assert model >= replay > 0


def test_own_stream_and_own_pool_differ_only_in_the_pool_that_grows(backend) -> None:
    """O2, O4: reserved bytes by pool."""
    pools = {}
    for sharing in PoolSharing:
        runner = make_runner(backend, LARGE, captured=False, sharing=sharing, num_blocks=400)
        runner.capture_model_graphs()
        before = backend.reserved_bytes(runner.pool)
        runner.capture_replay_graphs()
        pools[sharing] = backend.reserved_bytes(runner.pool) - before
    assert pools[PoolSharing.OWN_POOL] == pools[PoolSharing.SHARED] == 0 < pools[PoolSharing.OWN_STREAM]


def all_outputs(runner: StepRunner) -> list[torch.Tensor]:
    output = Serving(runner).step(PROMPTS)
    return [output.hidden_states, output.pre_mix, *output.late_aux, *output.early_aux]


@every_arrangement
def test_the_replay_layers_outputs_do_not_depend_on_the_arrangement(backend, sharing: PoolSharing) -> None:
    """O1 to O3: without early aux states sharing is safe."""
    shape = attrs.evolve(EARLY_AUX, early_aux_layers=())
    one = all_outputs(make_runner(backend, SMALL, shape, sharing=sharing))
    other = all_outputs(make_runner(backend, SMALL, shape, sharing=PoolSharing.OWN_POOL))
    assert len(one) == 3
    for actual, expected in zip(one, other, strict=True):
        assert bool(actual.isfinite().all()) and torch.equal(actual, expected)


@pytest.mark.parametrize("sharing", [None, PoolSharing.OWN_STREAM, PoolSharing.OWN_POOL])
def test_early_aux_states_survive_the_replay_graphs(backend, sharing: PoolSharing | None) -> None:
    """O3: read after the replay layers, they equal those of an eager step."""
    replayed = all_outputs(make_runner(backend, SMALL, EARLY_AUX, sharing=sharing))
    eager = all_outputs(make_runner(backend, SMALL, EARLY_AUX, captured=False))
    assert len(replayed) == 5
    for actual, expected in zip(replayed, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_sharing_would_overwrite_early_aux_states(backend) -> None:
    """O3: why they forbid it. The outputs of the replay layers, in buffers of their own, are right all the same."""
    *replayed, first, second = all_outputs(make_runner(backend, SMALL, EARLY_AUX, sharing=PoolSharing.SHARED))
    *eager, first_eager, second_eager = all_outputs(make_runner(backend, SMALL, EARLY_AUX, captured=False))
    intact = [torch.allclose(*pair, 1e-3, 1e-3) for pair in ((first, first_eager), (second, second_eager))]
    assert not all(intact)
    for actual, expected in zip(replayed, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
