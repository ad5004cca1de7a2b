"""The capture explorer: controls from Python and by hand, what it captures, and what it refuses in place."""

import json

import pytest

from replay_sim.explore import capture_explorer
from replay_sim.explore.capture_explorer import PRESETS, USUAL, CaptureExplorer
from replay_sim.explore.layer_stack import capture_stack


@pytest.fixture
def explorer() -> CaptureExplorer:
    return CaptureExplorer()


def shown(explorer: CaptureExplorer) -> str:
    return explorer.figure.layout.title.text.replace("<br>", " ")


def test_it_starts_with_a_capture_whose_attention_breaks(explorer) -> None:
    assert explorer.state == USUAL
    assert (explorer.made.num_segments, explorer.made.num_breaks) == (5, 4)
    assert shown(explorer).startswith("<b>5 segments and 4 breaks: 17 launches a step instead of 88; replay equals")
    assert explorer.sentence in explorer._sentence.value
    assert "A step of 11 tokens equals eager in all 352 elements." in explorer.sentence


def test_a_control_moved_by_hand_captures_anew(explorer) -> None:
    """C1, C5."""
    explorer.controls["num_layers"].value = 2
    assert explorer.made == capture_stack(2, "attention", "PIECEWISE", 16, 11)
    assert shown(explorer).startswith("<b>3 segments and 2 breaks: 9 launches a step instead of 44")
    explorer.controls["cudagraph_mode"].value = "FULL"
    assert shown(explorer).startswith("<b>1 segment and no breaks: 1 launch a step instead of 44; WRONG")
    assert "differs from eager in" in explorer._sentence.value
    explorer.controls["num_tokens"].value = 16
    assert "WRONG" not in shown(explorer)


def test_state_set_from_python_reads_back_and_survives_json(explorer) -> None:
    explorer.set(num_layers=3, breaks="attention, KV write", size=32, num_tokens=20)
    again = CaptureExplorer(**json.loads(json.dumps(explorer.state)))
    assert again.state == explorer.state != USUAL
    assert again.made == explorer.made and shown(again) == shown(explorer)
    explorer.reset()
    assert explorer.state == USUAL


def test_presets_fill_all_controls(explorer) -> None:
    for name, values in PRESETS.items():
        explorer.use_preset(name)
        assert (explorer.state, explorer.message) == (values, "")
    explorer.use_preset("mine")
    assert explorer.message.startswith("preset: 'mine' is not allowed; it must be one of attention breaks")


def test_presets_are_right_and_wrong_as_they_should_be(explorer) -> None:
    """C5."""
    right = {}
    for name in PRESETS:
        explorer.use_preset(name)
        right[name] = not explorer.made.differing
    assert [name for name, is_right in right.items() if not is_right] == ["FULL, a smaller step", "no break"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers: 0 is not allowed; it must be an integer from 1 to 8"),
        ({"num_layers": True}, "num_layers: True is not allowed"),
        ({"num_tokens": 65}, "num_tokens: 65 is not allowed; it must be an integer from 1 to 64"),
        ({"size": 12}, "size: 12 is not allowed; it must be one of 8; 16; 32; 64"),
        ({"breaks": "<b>"}, "breaks: '<b>' is not allowed; it must be one of none; attention; attention, KV write"),
        ({"cudagraph_mode": "NONE"}, "cudagraph_mode: 'NONE' is not allowed; it must be one of PIECEWISE; FULL"),
        ({"colour": 1}, "colour is no control; the controls are num_layers, breaks"),
    ],
)
def test_values_that_no_control_has_change_nothing(explorer, values, message: str) -> None:
    before = shown(explorer)
    explorer.set(**{"num_tokens": 3, **values})
    assert explorer.message.startswith(message)
    assert explorer.state == USUAL and shown(explorer) == before
    assert "<b>'" not in explorer._refusal.value


def test_more_tokens_than_the_graph_holds_are_refused_and_the_picture_stays(explorer) -> None:
    before = shown(explorer)
    explorer.controls["num_tokens"].value = 17
    assert explorer.message == "num_tokens: 17 is not allowed; a graph of size 16 holds no more"
    assert explorer.message in explorer._refusal.value and shown(explorer) == before
    explorer.controls["size"].value = 32
    assert explorer.message == "" and explorer._refusal.value == ""


def test_a_change_draws_no_figure_anew(explorer, monkeypatch) -> None:
    """What keeps a change well below 200 ms."""
    monkeypatch.setattr(capture_explorer, "stack_figure", None)
    explorer.controls["num_layers"].value = 1
    assert explorer.made.num_segments == 2


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(explorer) -> None:
    explorer.set(num_layers=2)
    bundle = explorer._repr_mimebundle_()
    still = bundle["application/vnd.plotly.v1+json"]
    assert still["layout"]["title"]["text"].replace("<br>", " ") == shown(explorer)
    assert all("uid" not in trace for trace in still["data"])
    assert "3 segments" in bundle["text/plain"]


def test_what_it_cannot_start_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_layers: 99 is not allowed"):
        CaptureExplorer(num_layers=99)
    with pytest.raises(ValueError, match="num_tokens: 20 is not allowed; a graph of size 16"):
        CaptureExplorer(num_tokens=20)
