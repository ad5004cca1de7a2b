"""The figures: what they draw is what they were given, counted by hand."""

from replay_sim.batch.dispatch import CudagraphMode, DispatchTable, ModelReason, ReplayReason, StepRecord
from replay_sim.batch.request import Batch, Phase, Request
from replay_sim.config import ServingConfig
from replay_sim.explore.figures_batch import batch_figure, gather_figure, scatter_figure
from replay_sim.explore.figures_graphs import BREAK_WIDTH, timeline_figure
from replay_sim.explore.figures_plan import staircase_figure, staircase_points
from replay_sim.explore.figures_workload import dispatch_figure, replay_rows_figure
from replay_sim.explore.timeline import TimelineEntry
from replay_sim.plan import make_plan

WINDOW = 4
BATCH = Batch(
    (
        Request(10, 0, Phase.PREFILL, request_id="a<b>"),
        Request(3, 7, Phase.PREFILL, request_id="b"),
        Request(6, 20, Phase.DECODE, request_id="c"),
    )
)
GATHER = [6, 7, 8, 9, None, None]
CONFIG = ServingConfig(
    window=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    cudagraph_capture_sizes=(16, 32),
    decoder_replay_cudagraph_capture_sizes=(4, 8, 12, 24),
    decoder_replay_trim_threshold=32,
)
SOURCE = "counted by hand"


def trace(figure, name):
    (found,) = [trace for trace in figure.data if trace.name == name and trace.showlegend is not False]
    return found


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def record(tokens, padded, mode, rows=0, padded_rows=0, replay_mode=None) -> StepRecord:
    return StepRecord(
        tokens, padded, mode, rows, padded_rows, replay_mode, ReplayReason.GRAPH, 1, ModelReason.PIECEWISE
    )


def test_the_batch_shows_computed_trimmed_and_kept_tokens_where_they_lie() -> None:
    """S1."""
    figure = batch_figure(BATCH, WINDOW, SOURCE)
    assert trace(figure, "computed before").x == (0, 7, 20)
    assert trace(figure, "trimmed row").x == (6, 0, 0)
    assert trace(figure, "trimmed row").base == (0, 7, 20)
    assert trace(figure, "kept row").x == (4, 3, 6)
    assert trace(figure, "kept row").base == (6, 7, 20)
    assert title(figure).startswith("<b>13 of the step's 19 rows are kept")
    assert trace(figure, "kept row").y[0] == "a&lt;b&gt; · prefill"


def test_an_empty_batch_is_a_figure_of_nothing() -> None:
    """S6."""
    assert title(batch_figure(Batch(), WINDOW, SOURCE)).startswith("<b>0 of the step's 0 rows")


def test_the_gather_links_every_kept_row_and_no_pad() -> None:
    """B2."""
    figure = gather_figure(GATHER, 10, 16, SOURCE)
    assert trace(figure, "kept row").x == (6, 7, 8, 9)
    assert trace(figure, "trimmed row, not gathered").x == (0, 1, 2, 3, 4, 5)
    (links,) = [trace for trace in figure.data if trace.type == "scatter"]
    assert links.x == (0, 6, None, 1, 7, None, 2, 8, None, 3, 9, None)
    pads = [trace.x for trace in figure.data if trace.name == "pad"]
    assert pads == [tuple(range(10, 16)), (4, 5)]
    assert "2 pad rows are cleared" in title(figure)


def test_the_scatter_shows_the_rows_that_were_found_written() -> None:
    """L6."""
    figure = scatter_figure(GATHER, [7, 8, 9], 10, 16, SOURCE)
    assert trace(figure, "kept row").x == (7, 8, 9)
    assert trace(figure, "trimmed row, zero in the output").x == (0, 1, 2, 3, 4, 5, 6)


def test_the_timeline_draws_segments_by_their_operations_and_breaks_by_a_fixed_width() -> None:
    """C1."""
    model = (TimelineEntry(False, "segment 1", 11), TimelineEntry(True, "replay layers", 0))
    replay = (TimelineEntry(False, "segment 1", 7),)
    figure = timeline_figure(model, 64, replay, 24, SOURCE)
    assert [round(width, 1) for width in trace(figure, "segment of the model graph").x] == [10.6]
    assert [round(width, 1) for width in trace(figure, "eager break").x] == [BREAK_WIDTH - 0.4]
    assert "replay layers" in [annotation.text for annotation in figure.layout.annotations]
    assert "1 segments and 1 breaks; in its last break runs a replay graph of 1 segments" in title(figure)
    assert "replay" not in title(timeline_figure(model[:1], 64, (), 0, SOURCE))


def test_the_staircase_is_sampled_at_every_size_and_one_above() -> None:
    """P7."""
    points = staircase_points(make_plan(CONFIG))
    assert points == [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12), (12, 12), (13, 24), (24, 24)]
    figure = staircase_figure(make_plan(CONFIG), SOURCE)
    assert list(figure.layout.xaxis2.tickvals) == [4, 8, 12, 24]
    assert "1 sizes are unreachable" in title(figure)
    assert figure.layout.shapes[0].x1 == 7


def test_a_plan_without_replay_graphs_is_said_to_run_eagerly() -> None:
    plan = make_plan(ServingConfig(cudagraph_decoder_replay=False))
    assert "every replay batch runs eagerly" in title(staircase_figure(plan, SOURCE))


def test_the_dispatch_figure_counts_every_step_once() -> None:
    """G3."""
    table = DispatchTable()
    table.extend([record(10, 16, CudagraphMode.PIECEWISE, 5, 8, CudagraphMode.PIECEWISE)] * 3)
    table.extend([record(4, 4, CudagraphMode.FULL), record(99, 99, CudagraphMode.NONE, 30, 30, CudagraphMode.NONE)])
    figure = dispatch_figure(table, SOURCE)
    counts = {trace.name: sum(trace.y) for trace in figure.data if trace.yaxis == "y"}
    assert counts == {"model graph, FULL": 1, "model graph, PIECEWISE": 3, "eager": 1}
    assert {trace.name: sum(trace.y) for trace in figure.data if trace.yaxis == "y2"} == {"replay graph": 3, "eager": 1}
    assert title(figure) == "<b>4 of 5 steps run in model graphs; 3 of 4 replay batches run in replay graphs</b>"


def test_the_histogram_counts_every_replay_batch_in_the_bin_that_holds_its_rows() -> None:
    table = DispatchTable()
    table.extend(
        [record(200, 256, CudagraphMode.PIECEWISE, rows, 256, CudagraphMode.PIECEWISE) for rows in (1, 61, 120)]
    )
    figure = replay_rows_figure(table, make_plan(CONFIG), SOURCE)
    graph = trace(figure, "replay graph holds them")
    assert graph.y == (1, 1, 1)
    assert [tuple(ends) for ends in graph.customdata] == [(1, 2), (61, 62), (119, 120)]


def test_a_workload_without_replay_batches_says_so() -> None:
    assert "No step" in title(replay_rows_figure(DispatchTable(), make_plan(CONFIG), SOURCE))
