"""The batch composer: requests added, changed and removed from Python and by hand, and what it refuses in place."""

import json

import pytest

from replay_sim.batch.dispatch import CudagraphMode
from replay_sim.batch.request import Phase
from replay_sim.explore import batch_composer
from replay_sim.explore.batch_composer import PRESETS, BatchComposer, decode, prefill
from replay_sim.explore.request_list import RequestList
from replay_sim.explore.tour import TOUR_BATCH, TOUR_CONFIG

START = PRESETS["one of each"]


@pytest.fixture
def composer() -> BatchComposer:
    return BatchComposer()


def shown(composer: BatchComposer) -> str:
    return composer.figure.layout.title.text.replace("<br>", " ")


def field(composer: BatchComposer, index: int, name: str):
    return composer.controls["requests"]._rows[index].controls[name]


def test_it_starts_with_one_request_of_each_kind(composer) -> None:
    assert composer.state == START
    assert composer.batch == TOUR_BATCH
    assert (composer.kept.record.replay_rows, composer.kept.record.padded_rows) == (22, 24)
    assert composer.sentence in composer._sentence.value
    assert shown(composer).startswith("<b>22 of the step's 43 rows are needed")


def test_requests_are_added_and_removed_from_python(composer) -> None:
    """S1."""
    composer.add(decode(3, 20))
    assert composer.batch.num_reqs == 5 and composer.batch.requests[4].phase is Phase.DECODE
    assert composer.kept.rows.num_rows == 25
    composer.remove(0)
    assert [request.request_id for request in composer.batch.requests] == ["A", "B", "C", "D"]
    assert composer.kept.rows.num_rows == 17
    composer.remove(7)
    assert composer.message == "request 7 cannot be removed: the batch has requests 0 to 3"


def test_fields_changed_by_hand_change_batch_figure_and_tables(composer) -> None:
    """S1: phase decides."""
    field(composer, 0, "phase").value = "decode"
    assert composer.state["requests"][0]["phase"] == "decode"
    assert composer.kept.rows.num_rows == 22 + 15
    assert "37 of the step's 43" in shown(composer)
    assert "<th>A</th>" in composer._requests_table.value and "decode" in composer._requests_table.value
    field(composer, 1, "all_rows_read").value = True
    assert composer.kept.rows.num_rows == 22 + 15 + 6
    assert composer._rows_table.value.count("<tr") == 1 + 1 + composer.kept.padded_rows


def test_the_buttons_add_and_remove(composer) -> None:
    requests = composer.controls["requests"]
    requests._add.click()
    assert len(composer.state["requests"]) == 5 and composer.kept.batch.num_tokens == 43 + 12
    requests._rows[0].box.children[-1].click()
    assert composer.kept.batch.num_tokens == 43 + 12 - 23
    assert len(requests.children) == 1 + 4 + 1


def test_the_list_is_full_at_max_num_seqs() -> None:
    requests = RequestList((), 2)
    for _ in range(3):
        requests.add()
    assert len(requests.value) == 2 and requests._add.disabled
    requests.remove(1)
    assert not requests._add.disabled


def test_state_set_from_python_reads_back_and_survives_json(composer) -> None:
    composer.set(requests=[prefill(20, 4, window_start=2), decode(2, 30)], window=5, cudagraph_mode="NONE")
    again = BatchComposer()
    again.set(**json.loads(json.dumps(composer.state)))
    assert again.state == composer.state
    assert again.kept.record == composer.kept.record and shown(again) == shown(composer)
    assert again.kept.record.mode is CudagraphMode.NONE


def test_presets_fill_all_controls_and_reset_brings_back_the_start(composer) -> None:
    for name, values in PRESETS.items():
        composer.use_preset(name)
        assert (composer.state, composer.message) == (values, "")
    composer.reset()
    assert composer.state == START
    composer.use_preset("mine")
    assert composer.message.startswith("preset: 'mine' is not allowed; it must be one of one of each")


def test_presets_show_what_their_names_say(composer) -> None:
    """S1, S5, S6."""
    composer.use_preset("phase, not length")
    assert composer.kept.by_request()["rows kept"].tolist() == [8, 12]
    composer.use_preset("nothing trims")
    assert not composer.kept.rows.trims and composer.kept.record.has_replay_batch
    composer.use_preset("eager")
    assert composer.kept.record.mode is CudagraphMode.NONE and composer.kept.record.has_replay_batch
    composer.use_preset("no request")
    assert composer.kept.batch.num_reqs == 0 and not composer.kept.record.has_replay_batch
    composer.use_preset("decodes")
    assert composer.kept.record.mode is CudagraphMode.FULL


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window: 0 is not allowed; it must be an integer from 1 to 24"),
        ({"window": True}, "window: True is not allowed"),
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode: 'SOME' is not allowed; it must be one of NONE, PIECEWISE"),
        ({"colour": 1}, "colour is no control; the controls are requests, window"),
        ({"requests": "<b>"}, "requests: '<b>' is not allowed; it must be a list of dicts"),
        ({"requests": [prefill(1)] * 9}, "requests: 9 are not allowed; at most max_num_seqs 8 are"),
        ({"requests": [{"phase": "decode"}]}, "request A: the keys must be phase, query_len"),
        ({"requests": [prefill(1), {**prefill(1), "phase": "x"}]}, "request B: phase 'x' is not allowed"),
        ({"requests": [prefill(-1)]}, "request A: query_len is -1: it must be an integer of at least 0"),
        ({"requests": [prefill(1, 3, window_start=4)]}, "request A: window_start is 4: it must be at most computed"),
        ({"requests": [prefill(1, 999)]}, "request A: seq_len 1000 is not allowed; at most 999 is"),
        ({"requests": [{**prefill(1), "all_rows_read": 1}]}, "request A: all_rows_read must be True or False"),
    ],
)
def test_values_that_no_control_has_change_nothing(composer, values, message: str) -> None:
    before = shown(composer)
    composer.set(**{"window": 7, **values})
    assert composer.message.startswith(message)
    assert composer.state == START and shown(composer) == before
    assert "<b>'" not in composer._refusal.value


def test_nonsense_by_hand_is_refused_and_the_picture_stays(composer) -> None:
    before = shown(composer)
    field(composer, 0, "window_start").value = 5
    assert composer.message == "request A: window_start is 5: it must be at most computed, which is 0"
    assert composer.message in composer._refusal.value and shown(composer) == before
    field(composer, 0, "computed").value = 5
    assert composer.message == "" and composer._refusal.value == ""
    field(composer, 0, "query_len").value = 60
    assert composer.message.endswith("a step takes at most max_num_batched_tokens 64")


def test_a_change_draws_no_figure_anew(composer, monkeypatch) -> None:
    """What keeps a change well below 200 ms."""
    monkeypatch.setattr(batch_composer, "composer_figure", None)
    for window in (5, 6, 7, 9, 10):
        composer.controls["window"].value = window
        assert composer.kept.rows.num_rows == 2 * window + 5 + 1


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(composer) -> None:
    composer.use_preset("chunks")
    bundle = composer._repr_mimebundle_()
    still = bundle["application/vnd.plotly.v1+json"]
    assert still["layout"]["title"]["text"].replace("<br>", " ") == shown(composer)
    assert all("uid" not in trace for trace in still["data"])
    assert "46 tokens of 3 requests" in bundle["text/plain"]


def test_what_it_cannot_start_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="'mine' is not allowed"):
        BatchComposer(preset="mine")
    with pytest.raises(ValueError, match="num_tokens: 43 is not allowed"):
        BatchComposer(TOUR_CONFIG.__class__(max_num_batched_tokens=16, max_num_seqs=8, cudagraph_capture_sizes=(16,)))
