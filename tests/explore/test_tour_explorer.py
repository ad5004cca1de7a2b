"""The explorer of one step: controls from Python and by hand, what it shows, and what it refuses in place."""

import pytest

from replay_sim.explore.tour import TOUR_CONFIG
from replay_sim.explore.tour_explorer import CONTROLS, TourExplorer, record_sentence

STARTS = {name: control.start for name, control in CONTROLS.items()}


@pytest.fixture
def explorer() -> TourExplorer:
    return TourExplorer()


def shown(explorer: TourExplorer) -> str:
    return explorer.figure.layout.title.text


def test_it_starts_with_the_batch_of_the_tour(explorer) -> None:
    assert explorer.state == STARTS
    assert (explorer.record.num_tokens, explorer.record.replay_rows) == (43, 22)
    assert shown(explorer).startswith("<b>22 of the step's 43 rows are kept")
    assert record_sentence(explorer.record) in explorer._sentence.value


def test_a_slider_moved_by_hand_changes_figure_sentence_and_record(explorer) -> None:
    explorer.controls["window"].value = 4
    assert explorer.record.replay_rows == 4 + 4 + 4 + 1
    assert shown(explorer).startswith("<b>13 of the step's 43 rows are kept")
    assert "13 rows" in explorer._sentence.value
    assert explorer.figure.data[2].x == (4, 4, 4, 1)


def test_state_set_from_python_reads_back_and_can_be_replayed(explorer) -> None:
    explorer.set(query_len_a=9, num_decodes=3, window=5)
    again = TourExplorer()
    again.set(**explorer.state)
    assert again.state == explorer.state != STARTS
    assert again.record == explorer.record
    assert shown(again) == shown(explorer)


def test_reset_puts_everything_back(explorer) -> None:
    explorer.set(query_len_a=9, window=5)
    explorer.reset()
    assert explorer.state == STARTS and explorer.record.replay_rows == 22


def test_a_threshold_not_above_the_window_is_refused_with_a_sentence_and_the_picture_stays(explorer) -> None:
    """P5."""
    before, record = shown(explorer), explorer.record
    explorer.controls["decoder_replay_trim_threshold"].value = 8
    assert explorer.message == "decoder_replay_trim_threshold: 8 is not allowed; it must exceed window 8"
    assert explorer.message in explorer._refusal.value
    assert (shown(explorer), explorer.record) == (before, record)
    explorer.controls["window"].value = 7
    assert explorer.message == "" and explorer._refusal.value == ""
    assert explorer.record.replay_rows == 20


def test_more_tokens_than_the_budget_are_refused(explorer) -> None:
    explorer.set(query_len_a=40, query_len_b=40)
    assert explorer.message.endswith("a step takes at most max_num_batched_tokens 64")
    assert explorer.run() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window: 0 is not allowed; it must be an integer from 1 to 24"),
        ({"window": 99}, "window: 99 is not allowed"),
        ({"window": 2.5}, "window: 2.5 is not allowed"),
        ({"window": True}, "window: True is not allowed"),
        ({"query_len_a": "<b>"}, "query_len_a: '<b>' is not allowed"),
        ({"colour": 1}, "colour is no control; the controls are query_len_a"),
    ],
)
def test_values_that_no_control_has_change_nothing(explorer, values, message) -> None:
    explorer.set(query_len_c=7)
    explorer.set(**{"query_len_c": 9, **values})
    assert explorer.message.startswith(message)
    assert explorer.state["query_len_c"] == 7
    assert "<b>'" not in explorer._refusal.value


def test_the_empty_batch_is_shown_and_not_run(explorer) -> None:
    """S6."""
    explorer.set(query_len_a=0, query_len_b=0, query_len_c=0, num_decodes=0)
    assert explorer.message == "" and explorer.record.num_tokens == 0
    assert explorer.run() is None
    assert explorer.message == "the batch has no tokens: there is nothing to run"


def test_running_the_step_shows_what_was_compared(explorer) -> None:
    """G5."""
    explorer.set(window=5, query_len_b=0)
    tour = explorer.run()
    assert tour is not None and tour.rows.num_rows == 11
    assert "0 of " in explorer._result.value
    explorer.set(window=6)
    assert explorer._result.value == ""


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(explorer) -> None:
    explorer.set(window=4)
    bundle = explorer._repr_mimebundle_()
    still = bundle["application/vnd.plotly.v1+json"]
    assert still["layout"]["title"]["text"] == shown(explorer)
    assert all("uid" not in trace for trace in still["data"])
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "13 rows" in bundle["text/plain"]


def test_a_config_that_cannot_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        TourExplorer(config=TOUR_CONFIG.__class__(max_num_batched_tokens=8, max_num_seqs=8, cudagraph_mode="NONE"))
