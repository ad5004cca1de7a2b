"""The tour of one step: its stages, and that its proof of equality can fail."""

import attrs
import pytest
import torch

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.explore.tour import TOUR_BATCH, TOUR_CONFIG, StepTour

KEPT = [*range(15, 23), *range(29, 37), *range(37, 42), 42]
DECODES = Batch(tuple(Request(1, 5 + i, Phase.DECODE, request_id=str(i)) for i in range(3)))
LONG = Batch((Request(6, 90, Phase.PREFILL, request_id="long"), Request(30, 0, Phase.PREFILL, request_id="new")))


@pytest.fixture(scope="module")
def tour() -> StepTour:
    tour = StepTour()
    tour.capture()
    tour.run()
    return tour


def test_the_rows_kept_are_known_before_anything_is_captured() -> None:
    """S1, S2, D4."""
    tour = StepTour()
    assert tour.rows.rows.tolist() == KEPT
    assert (tour.planned.padded_tokens, tour.planned.replay_rows, tour.planned.padded_rows) == (64, 22, 24)
    with pytest.raises(RuntimeError, match="the step has not run yet"):
        _ = tour.data


def test_graphs_equal_eager_bit_for_bit_in_outputs_and_caches(tour) -> None:
    """G5."""
    layers = {f"window KV, layer {i}" for i in range(tour.shape.num_layers)}
    assert set(tour.differing) == {"hidden_states", "pre_mix", "shared KV"} | layers
    assert not any(tour.differing.values())
    assert tour.data.outputs["hidden_states"].abs().sum() > 0


def test_one_flipped_bit_is_found(tour) -> None:
    with_graphs, _ = tour._both
    hidden = with_graphs.outputs["hidden_states"]
    before = hidden[20, 0, 0].clone()
    hidden.view(torch.int32)[20, 0, 0] ^= 1
    try:
        assert tour.differing["hidden_states"] == 1
    finally:
        hidden[20, 0, 0] = before


def test_the_eager_run_captures_nothing(tour) -> None:
    graphs = [*tour.eager.model_graphs.values(), *tour.eager.full_graphs.values(), *tour.eager.replay_graphs.graphs]
    assert len(graphs) == len(tour.plan.model_sizes) + len(tour.plan.full_sizes) + len(tour.plan.replay_sizes)
    assert all(not graph.segments and graph.num_breaks == 1 for graph in graphs)


def test_the_gather_map_is_what_the_device_was_given(tour) -> None:
    """B2, S8."""
    assert tour.gather_map() == [*KEPT, None, None]
    metadata = tour.replay_metadata()
    assert metadata["rows"].tolist() == [*KEPT, -1, -1]
    assert metadata["slot_mapping"].tolist()[-2:] == [-1, -1]


def test_the_scatter_writes_the_kept_rows_and_no_other(tour) -> None:
    """L6."""
    assert tour.written_rows.tolist() == KEPT


def test_the_timelines_name_segments_and_breaks(tour) -> None:
    """C1, L3, L4."""
    model, replay = tour.model_timeline(), tour.replay_timeline()
    assert [entry.label for entry in model if entry.is_break] == [
        "attention, layer 0",
        "attention, layer 1",
        "attention, layer 2",
        "KV write, layer 3",
        "replay layers",
    ]
    assert [entry.label for entry in replay if entry.is_break] == [f"attention, layer {i}" for i in (3, 4, 5)]
    assert all((entry.operations > 0) is not entry.is_break for entry in (*model, *replay))


def test_the_record_is_a_table_of_plain_values(tour) -> None:
    """D4."""
    table = tour.record_table()["value"]
    assert table["mode"] == "PIECEWISE" and table["replay_rows"] == 22
    assert table["reason"] == "replay graph holds the rows"


def test_times_are_of_both_arms_and_say_where_they_were_taken(tour) -> None:
    times = tour.times_here(rounds=2)
    assert list(times.index) == ["in graphs", "eager, same padded rows"]
    assert (times["n"] == 2).all() and (times["median ms"] > 0).all()
    assert tour.machine.startswith("measured on ") and "torch" in tour.machine


def test_a_uniform_decode_takes_a_full_graph_and_has_no_replay_batch() -> None:
    """D1, D2, L7."""
    tour = StepTour(DECODES)
    tour.capture()
    record = tour.run()
    assert record.mode is CudagraphMode.FULL and not record.has_replay_batch
    assert not any(tour.differing.values())
    assert tour.gather_map() == [] and tour.model_timeline() == () and tour.replay_timeline() == ()


def test_what_requests_have_computed_is_computed_in_chunks_of_the_budget() -> None:
    tour = StepTour(LONG, attrs.evolve(TOUR_CONFIG, window=6))
    tour.capture()
    assert tour.run().replay_rows == 12
    assert not any(tour.differing.values())
    written = tour.data.caches["window KV, layer 0"].ne(0).any(1).sum()
    assert written == 96 + 30


def test_a_batch_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 64"):
        StepTour(Batch((Request(65, 0, Phase.PREFILL),)))
    with pytest.raises(ValueError, match="max_num_seqs 2"):
        StepTour(TOUR_BATCH, attrs.evolve(TOUR_CONFIG, max_num_seqs=2, decoder_replay_cudagraph_capture_sizes=(8,)))


@pytest.mark.gpu
def test_the_tour_runs_on_real_graphs() -> None:
    """C12, G5."""
    tour = StepTour()
    assert tour.backend.name == "cuda"
    tour.capture()
    tour.run()
    assert not any(tour.differing.values()) and tour.written_rows.tolist() == KEPT
