"""The speedup explorer: controls from Python and by hand, what its cells say they are, and what it refuses in place."""

import json

import pytest
import torch
from explore.measured_cases import GPU, model, record, step_point

from replay_sim.explore.figures_heat import OUTSIDE, heat_figure, hover
from replay_sim.explore.live_measure import NO_GPU
from replay_sim.explore.speedup_cells import CellKind, SpeedupCells
from replay_sim.explore.speedup_explorer import AXES, CHOICES, PRESETS, USUAL, VALUES, SpeedupExplorer

GRAPHS, OFF = "piecewise_replay_graphs", "eager_off"
LAW = {2048: (60.0, 100.0), 8192: (50.0, 200.0)}
POINTS = [
    step_point(arm, tokens, us) for tokens, times in LAW.items() for arm, us in zip((GRAPHS, OFF), times, strict=True)
]


def make(*, with_model: bool = True, **values) -> SpeedupExplorer:
    cells = SpeedupCells([("steps-law.json", record("steps", POINTS))], model() if with_model else None, GPU)
    return SpeedupExplorer(cells, **values)


@pytest.fixture(scope="module")
def explorer() -> SpeedupExplorer:
    return make()


@pytest.fixture(autouse=True)
def back_to_start(explorer) -> None:
    explorer.reset()


def title(explorer) -> str:
    return explorer.figure.layout.title.text.replace("<br>", " ")


def drawn(explorer, name: str) -> list[tuple[float, float]]:
    """Column and row, rounded, of the marks of one kind."""
    (trace,) = [trace for trace in explorer.figure.data if trace.name == name]
    return [(round(x), round(y)) for x, y in zip(trace.x, trace.y, strict=True)]


def test_measured_cells_carry_a_dot_and_their_ratio_in_percent(explorer) -> None:
    columns, row = VALUES["prompt_tokens"], VALUES["window"].index(128)
    assert drawn(explorer, "measured") == [(columns.index(2048), row), (columns.index(8192), row)]
    values = explorer.figure.data[0].z
    assert [values[row][columns.index(tokens)] for tokens in LAW] == [60.0, 25.0]
    assert "“graphs, replay graphs”" in title(explorer) and "(2 cells measured, " in title(explorer)


def test_no_cell_is_drawn_as_two_kinds_and_none_is_lost(explorer) -> None:
    for preset in PRESETS:
        explorer.use_preset(preset)
        known, outside = (sum(z is not None for row in trace.z for z in row) for trace in explorer.figure.data[:2])
        none = len(drawn(explorer, "no number"))
        state = explorer.state
        assert known + outside + none == len(VALUES[state["x_axis"]]) * len(VALUES[state["y_axis"]])


def test_cells_outside_of_what_the_model_saw_are_grey_and_say_so(explorer) -> None:
    explorer.use_preset("window × token budget")
    column = VALUES["max_num_batched_tokens"].index(16384)
    grey = explorer.figure.data[1]
    assert all(row[column] is not None for row in grey.z) and grey.colorscale[0][1] == OUTSIDE
    assert "modelled outside of what was measured" in grey.customdata[0][column]
    assert all(row[column] is None for row in explorer.figure.data[0].z)


def test_without_a_model_only_measured_cells_have_a_number() -> None:
    explorer = make(with_model=False)
    kinds = [cell.kind for row in explorer.shown for cell in row]
    assert kinds.count(CellKind.MEASURED) == 2 and set(kinds) == {CellKind.MEASURED, CellKind.NONE}
    assert "0 modelled" in title(explorer)


def test_a_control_moved_by_hand_changes_figure_and_sentence(explorer) -> None:
    before = title(explorer)
    explorer.controls["y_axis"].value = "num_local_experts"
    assert explorer.figure.layout.yaxis.title.text == "experts of the rank"
    assert title(explorer) != before
    explorer.controls["prompt_tokens"].value = 2048
    assert "At 2,048 tokens of 1 request, window 128" in explorer._sentence.value
    assert "60.0% of the time (measured, steps-law.json)" in explorer._sentence.value


def test_a_setting_that_is_an_axis_cannot_be_moved_and_any_other_can(explorer) -> None:
    explorer.set(x_axis="num_reqs", y_axis="window")
    assert [name for name in AXES if explorer.controls[name].disabled] == ["window", "num_reqs"]


def test_state_set_from_python_reads_back_and_survives_json(explorer) -> None:
    explorer.use_preset("requests a step")
    explorer.set(arm="eager_replay", window=256)
    again = make(**json.loads(json.dumps(explorer.state)))
    assert again.state == explorer.state != USUAL
    assert again.shown == explorer.shown and title(again) == title(explorer)
    again.reset()
    assert again.state == explorer.state, "back to where it started"


def test_presets_fill_all_controls(explorer) -> None:
    for name, values in PRESETS.items():
        assert values.keys() == CHOICES.keys()
        explorer.use_preset(name)
        assert (explorer.state, explorer.message) == (values, "")
    explorer.use_preset("mine")
    assert explorer.message.startswith("preset: 'mine' is not allowed; it must be one of window × prompt")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 100}, "window: 100 is not allowed; it must be one of 64, 128, 256, 512, 1024"),
        ({"num_reqs": True}, "num_reqs: True is not allowed; it must be one of 1, 2, 4, 8, 16, 32, 64"),
        ({"arm": "full"}, "arm: 'full' is not allowed; it must be one of eager_off, "),
        ({"colour": 1}, "colour is no control; the controls are x_axis, y_axis, arm, against, "),
        ({"x_axis": "window"}, "y_axis: window is the x axis already; choose two different settings"),
        ({"arm": "eager_off"}, "against: eager_off is the arm itself; choose two different arms"),
    ],
)
def test_nonsense_is_refused_in_place_and_leaves_the_picture(explorer, values, message) -> None:
    before = title(explorer)
    explorer.set(**values)
    assert explorer.message.startswith(message) and title(explorer) == before
    assert explorer._refusal.value.startswith("<b>Refused.</b>")
    explorer.reset()
    assert explorer.message == "" == explorer._refusal.value


def test_a_value_that_it_cannot_start_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="window: 1 is not allowed"):
        make(window=1)
    with pytest.raises(ValueError, match="choose two different arms"):
        make(arm=OFF)


def test_the_name_of_a_measurement_is_text_in_the_figure_and_no_tag() -> None:
    """Issue 8: what comes from files is escaped."""
    explorer = make()
    explorer.add_points([step_point(GRAPHS, 512, 30.0), step_point(OFF, 512, 40.0)], "run <img src=x onerror=alert(1)>")
    shown = explorer.figure.to_json() + explorer._sentence.value
    assert "<img" not in shown and "\\u003cimg" not in shown and "img src=x" in shown


def test_points_that_were_just_measured_join_the_map() -> None:
    explorer = make()
    live = [step_point(GRAPHS, 512, 30.0), step_point(OFF, 512, 40.0)]
    explorer.add_points(live, "run 1 just now on Mine")
    column, row = VALUES["prompt_tokens"].index(512), VALUES["window"].index(128)
    assert (column, row) in drawn(explorer, "measured") and explorer.figure.data[0].z[row][column] == 75.0
    (caption,) = [note.text for note in explorer.figure.layout.annotations if note.name == "caption"]
    assert "run 1 just now on Mine" in caption.replace("<br>", " ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU shows the button")
def test_without_a_gpu_it_says_that_all_is_recorded(explorer) -> None:
    assert NO_GPU in [getattr(child, "value", None) for child in explorer.widget.children]


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(explorer) -> None:
    still = explorer._repr_mimebundle_()["application/vnd.plotly.v1+json"]
    assert [trace["type"] for trace in still["data"]][:2] == ["heatmap", "heatmap"]
    assert all("uid" not in trace for trace in still["data"])


def test_every_hover_names_every_knob_and_the_source(explorer) -> None:
    for row in explorer.shown:
        for cell in row:
            text = hover(cell)
            for word in ("prompt tokens", "window", "max_num_batched_tokens", "experts"):
                assert word in text
            assert cell.kind is CellKind.NONE or "modelled" in text or "measured" in text


def test_a_map_of_nothing_says_so() -> None:
    cells = SpeedupCells([], None, GPU)
    explorer = SpeedupExplorer(cells)
    assert "nothing here was measured" in title(explorer)
    figure = heat_figure(explorer.shown, ("prompt_tokens", "window"), GRAPHS, OFF, "nowhere")
    assert [len(trace.x) for trace in figure.data if trace.name == "measured"] == [0]
