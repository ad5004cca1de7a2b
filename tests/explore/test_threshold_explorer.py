"""The threshold tuner and its figures: controls from Python and by hand, what is drawn, what is refused in place."""

import json

import pytest
from explore.measured_cases import GPU, model, record, step_point

from replay_sim.explore.figures_threshold import GainPanel, gains_figure
from replay_sim.explore.speedup_cells import CellKind
from replay_sim.explore.threshold_curves import ThresholdCurves, curve_key
from replay_sim.explore.threshold_explorer import CHOICES, NO_BREAK, PRESETS, THRESHOLD, USUAL, ThresholdExplorer

GRAPHS, OFF = "piecewise_replay_graphs", "piecewise_off"
COUNTS = (256, 512, 1024, 2048, 8192)
LAW = {OFF: lambda tokens: 1000.0 + tokens, GRAPHS: lambda tokens: 1400.0 + tokens / 2}
POINTS = [step_point(arm, count, law(count)) for arm, law in LAW.items() for count in COUNTS]


def make(**values) -> ThresholdExplorer:
    return ThresholdExplorer(ThresholdCurves([("steps-law.json", record("steps", POINTS))], model(), GPU), **values)


@pytest.fixture(scope="module")
def explorer() -> ThresholdExplorer:
    return make()


@pytest.fixture(autouse=True)
def back_to_start(explorer) -> None:
    explorer.reset()


def title(explorer) -> str:
    return explorer.figure.layout.title.text.replace("<br>", " ")


def shaded(explorer) -> list[tuple[float, float]]:
    """Where steps break, of the upper panel; the first rectangle is the crossing's band."""
    found = [shape for shape in explorer.figure.layout.shapes if shape.type == "rect" and shape.xref == "x"]
    return [(shape.x0, shape.x1) for shape in found[1:]]


def test_it_draws_both_curves_the_gain_and_the_cost_of_each_threshold(explorer) -> None:
    without, _, broken, _, gain, costs = explorer.figure.data
    assert without.x == broken.x == COUNTS
    assert without.y == tuple(LAW[OFF](count) / 1e3 for count in COUNTS)
    assert broken.y == tuple(LAW[GRAPHS](count) / 1e3 for count in COUNTS)
    assert gain.y[0] == round(100 * (1 - LAW[GRAPHS](256) / LAW[OFF](256)), 2)
    assert costs.x == ("256", "512", "1,024", "2,048", "8,192", "none")
    assert costs.text[2] == "best" and costs.y[2] == 0 < costs.y[1] < costs.y[0]
    assert "costs 0.0% more than the best, 1,024" in title(explorer)


def test_a_threshold_moved_by_hand_shades_the_steps_that_break(explorer) -> None:
    """D2: 768 breaks graphs of at least 768 tokens, of those measured 1,024 and more."""
    assert shaded(explorer) == [(1024, 8192)]
    explorer.controls[THRESHOLD].value = 256
    assert shaded(explorer) == [(256, 8192)]
    assert "On these steps threshold 256 costs" in explorer._sentence.value
    explorer.controls[THRESHOLD].value = NO_BREAK
    assert shaded(explorer) == []


def test_what_was_not_measured_is_drawn_as_modelled(explorer) -> None:
    explorer.set(num_reqs=4)
    assert explorer.shown.kind is not CellKind.MEASURED
    assert [trace.name for trace in explorer.figure.data[:3:2]] == [
        "graphs, replay off, modelled",
        "graphs, replay graphs, modelled",
    ]
    assert explorer.figure.data[0].marker.size == 1
    explorer.reset()
    assert explorer.figure.data[0].name == "graphs, replay off" and explorer.figure.data[0].marker.size == 6


def test_an_eager_step_has_no_threshold_and_it_says_so(explorer) -> None:
    explorer.set(arm="eager_replay")
    assert shaded(explorer) == [] and title(explorer).startswith("<b>Eager steps trim whatever the threshold")
    assert "No threshold concerns an eager step" in explorer.sentence


def test_lengths_of_a_profile_change_the_costs_and_the_caption(explorer) -> None:
    before = explorer.figure.data[-1].y
    explorer.set(lengths="conversation")
    assert explorer.figure.data[-1].y != before
    (caption,) = [note.text for note in explorer.figure.layout.annotations if note.name == "caption"]
    assert "the prompt lengths of profile conversation" in caption.replace("<br>", " ")


def test_state_set_from_python_reads_back_and_survives_json(explorer) -> None:
    explorer.set(num_reqs=2, window=256, lengths="code", **{THRESHOLD: 512})
    again = make(**json.loads(json.dumps(explorer.state)))
    assert again.state == explorer.state != USUAL
    assert again.sentence == explorer.sentence and title(again) == title(explorer)


def test_presets_fill_all_controls(explorer) -> None:
    for name, values in PRESETS.items():
        assert values.keys() == CHOICES.keys()
        explorer.use_preset(name)
        assert (explorer.state, explorer.message) == (values, "")
    explorer.use_preset("mine")
    assert explorer.message.startswith("preset: 'mine' is not allowed; it must be one of one prompt a step")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 1024}, f"{THRESHOLD}: 768 is not allowed; it must exceed the window, 1024"),
        ({THRESHOLD: 700}, f"{THRESHOLD}: 700 is not allowed; it must be one of 256, 384"),
        ({"num_reqs": True}, "num_reqs: True is not allowed; it must be one of 1, 2, 4, 8, 16, 32"),
        ({"arm": "eager_off"}, "arm: 'eager_off' is not allowed; it must be one of eager_replay"),
        ({"colour": 1}, "colour is no control; the controls are arm, window, "),
        (
            {"arm": "eager_replay", "window": 1024, "num_reqs": 32, THRESHOLD: 2048},
            "no curve: with 32 requests of window 1024 no step here breaks for replay",
        ),
    ],
)
def test_nonsense_is_refused_in_place_and_leaves_the_picture(explorer, values, message) -> None:
    """P5 among them."""
    before = title(explorer)
    explorer.set(**values)
    assert explorer.message.startswith(message) and title(explorer) == before
    assert explorer._refusal.value.startswith("<b>Refused.</b>")
    explorer.reset()
    assert explorer.message == "" == explorer._refusal.value


def test_a_value_that_it_cannot_start_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="window: 1 is not allowed"):
        make(window=1)
    with pytest.raises(ValueError, match="must exceed the window"):
        make(window=1024)


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(explorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert all("uid" not in trace for trace in bundle["application/vnd.plotly.v1+json"]["data"])
    assert bundle["text/plain"].startswith("piecewise_replay_graphs, measured: the break pays from")


def test_gains_say_in_the_title_where_each_curve_begins_to_pay(explorer) -> None:
    shown = explorer.curves.shown(curve_key(GRAPHS))
    tokens = shown.crossing.tokens
    figure = gains_figure([GainPanel("left", [("law", shown)]), GainPanel("right", [("law", shown)])], "by hand")
    text = figure.layout.title.text.replace("<br>", " ")
    assert f"(law): left {tokens:,.0f}; right {tokens:,.0f}" in text
    assert figure.data[0].x == COUNTS and figure.data[1].xaxis == "x2" and not figure.data[1].showlegend
    over_rows = gains_figure([GainPanel("one", [("law", shown)])], "by hand", over_rows=True)
    assert over_rows.data[0].x == tuple(count / 128 for count in COUNTS)
    assert f"(law): {tokens / 128:.2f}" in over_rows.layout.title.text.replace("<br>", " ")
