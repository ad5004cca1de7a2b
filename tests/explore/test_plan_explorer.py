"""The explorer of plans: controls from Python and by hand, what it shows, and what it refuses in place."""

import attrs
import pytest

from replay_sim.config import ServingConfig, load_config
from replay_sim.explore.plan_explorer import RANGES, SIZES, PlanExplorer
from replay_sim.plan import make_plan

LISTED = "b200-tp4-c32"
CONFIG = ServingConfig(
    window=4,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    cudagraph_capture_sizes=(8, 16, 32),
    decoder_replay_cudagraph_capture_sizes=(2, 8, 20),
    decoder_replay_trim_threshold=16,
)
MOVED = {
    "window": 5,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 72,
    "max_cudagraph_capture_size": 16,
    "num_speculative_tokens": 3,
    "max_graphs": 2,
}


@pytest.fixture(scope="module")
def shared() -> PlanExplorer:
    return PlanExplorer(CONFIG, "mine")


@pytest.fixture
def explorer(shared) -> PlanExplorer:
    shared.reset()
    return shared


def shown(explorer: PlanExplorer) -> str:
    return explorer.figure.layout.title.text.replace("<br>", " ")


def sizes(explorer: PlanExplorer) -> dict[str, tuple[int, ...]]:
    return {name: judgement.plan.replay_sizes for name, judgement in explorer.judgements.items()}


def test_it_starts_with_the_config_that_it_was_given(explorer) -> None:
    """P1, P2."""
    assert explorer.config == attrs.evolve(CONFIG, max_cudagraph_capture_size=32)
    assert sizes(explorer)["default"] == (4, 8, 12, 16, 20, 24) and sizes(explorer)["explicit"] == (2, 8, 20)
    assert explorer.state["preset"] == "mine" and explorer.state["max_graphs"] == 6
    assert shown(explorer).startswith("<b>Default pads") and "6 replay graphs" in explorer._sentence.value


def test_a_slider_moved_by_hand_changes_plans_figure_table_and_sentence(explorer) -> None:
    before = shown(explorer), explorer._table.value
    explorer.controls["max_num_seqs"].value = 3
    assert sizes(explorer)["default"] == (4, 8, 12)
    assert explorer.figure.data[0].x == (1, 4, 5, 8, 9, 12)
    assert shown(explorer) != before[0] and explorer._table.value != before[1]
    assert "default: 3 replay graphs" in explorer._sentence.value


@pytest.mark.parametrize("name", RANGES)
def test_every_slider_changes_the_config_or_the_optimum(explorer, name) -> None:
    start = explorer.config, sizes(explorer)
    explorer.set(**{name: MOVED[name]})
    assert explorer.message == "" and (explorer.config, sizes(explorer)) != start


def test_the_maximum_ends_the_presets_model_sizes_and_bounds_the_rule(explorer) -> None:
    """P2, P4."""
    explorer.set(max_cudagraph_capture_size=18)
    assert explorer.config.cudagraph_capture_sizes == (8, 16, 18)
    assert sizes(explorer)["default"] == (4, 8, 12, 16, 18)
    assert CONFIG.cudagraph_capture_sizes == (8, 16, 32)


def test_a_list_of_sizes_is_taken_as_typed_and_an_empty_one_is_no_plan(explorer) -> None:
    """P1."""
    explorer.controls[SIZES].value = "24 6,12"
    assert sizes(explorer)["explicit"] == (6, 12, 24)
    explorer.controls[SIZES].value = " "
    assert "explicit" not in sizes(explorer) and explorer.figure.data[1].x == ()


def test_sizes_that_no_batch_can_select_are_named(explorer) -> None:
    """P6."""
    assert explorer.notes[0] == "explicit: replay sizes 2 are unreachable: the smallest replay batch has 4 rows"
    assert explorer.notes[0] in explorer._table.value
    explorer.set(**{SIZES: "4 8 20"})
    assert not [note for note in explorer.notes if "unreachable" in note]


def test_rows_judged_on_may_be_those_of_a_workload(explorer) -> None:
    explorer.set(rows="conversation", max_graphs=3)
    assert explorer.figure.layout.margin == explorer._draw().layout.margin, "the longer caption has its room"
    assert "profile conversation" in explorer.figure.layout.annotations[0].text.replace("<br>", " ")
    judgements = explorer.judgements
    assert len(judgements["optimal"].plan.replay_sizes) <= 3
    assert explorer.weights.histogram and judgements["default"].cost.mean_padding > 0


def test_a_preset_fills_all_controls_from_python_and_by_hand(explorer) -> None:
    plan = make_plan(load_config("b200-dep2-c8"))
    explorer.set(preset="b200-dep2-c8")
    assert explorer.state["max_num_batched_tokens"] == plan.max_num_batched_tokens == 4096
    assert sizes(explorer)["default"] == plan.replay_sizes and explorer.state[SIZES] == ""
    explorer.controls["preset"].value = "mine"
    assert explorer.state["window"] == 4 and sizes(explorer)["explicit"] == (2, 8, 20)
    explorer.set(preset="b200-dep2-c8", max_num_seqs=1)
    assert explorer.state["max_num_seqs"] == 1 and sizes(explorer)["default"] == (128,)


def test_state_set_from_python_reads_back_and_can_be_replayed(explorer) -> None:
    explorer.set(window=5, max_graphs=2, rows="summarisation", **{SIZES: "10, 20"})
    again = PlanExplorer(CONFIG, "mine")
    again.set(**explorer.state)
    assert again.state == explorer.state and sizes(again) == sizes(explorer)
    assert shown(again) == shown(explorer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window: 0 is not allowed; it must be an integer from 4 to 1024"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: 2.5 is not allowed"),
        ({"max_num_seqs": True}, "max_num_seqs: True is not allowed"),
        ({"rows": "all"}, "rows: 'all' is not allowed; it must be one of all reachable, "),
        ({"preset": "<b>"}, "preset: '<b>' is not allowed; it must be one of mine, "),
        ({"preset": ["mine"]}, "preset: ['mine'] is not allowed"),
        ({SIZES: "8 <b>"}, f"{SIZES}: '<b>' is not allowed; it must be integers, with commas or spaces between"),
        ({SIZES: "-8"}, f"{SIZES}: '-8' is not allowed"),
        ({SIZES: (8,)}, f"{SIZES}: (8,) is not allowed"),
        ({"colour": 1}, "colour is no control; the controls are preset, window"),
    ],
)
def test_values_that_no_control_has_change_nothing(explorer, values, message) -> None:
    before = explorer.state, shown(explorer)
    explorer.set(**{"max_graphs": 2, **values})
    assert explorer.message.startswith(message)
    assert (explorer.state, shown(explorer)) == before
    assert "<b>'" not in explorer._refusal.value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_cudagraph_capture_size": 66}, "cudagraph_capture_sizes: 66 is not allowed; it must not exceed"),
        ({"window": 16}, "decoder_replay_trim_threshold: 16 is not allowed; it must exceed window 16"),
        ({SIZES: "65"}, f"{SIZES}: 65 is not allowed; it must not exceed max_num_batched_tokens 64"),
        ({SIZES: "0"}, f"{SIZES}: 0 is not allowed; it must be an integer from 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_and_the_picture_stays(explorer, values, message) -> None:
    """P3, P5."""
    before = shown(explorer), sizes(explorer)
    explorer.set(**values)
    assert explorer.message.startswith(message) and "Refused" in explorer._refusal.value
    assert (shown(explorer), sizes(explorer)) == before
    explorer.reset()
    assert explorer.message == "" and explorer._refusal.value == ""


def test_text_typed_by_hand_that_is_no_list_is_refused_in_place(explorer) -> None:
    explorer.controls[SIZES].value = "8; 12"
    assert explorer.message.startswith(f"{SIZES}: '8;' is not allowed")


def test_a_preset_without_replay_graphs_is_shown_as_such(explorer) -> None:
    explorer.set(preset="h200-tp4-c8")
    assert explorer.message == "" and explorer.sentence == "default: no replay graphs."
    assert shown(explorer).startswith("<b>No replay graphs are planned")
    explorer.set(preset=LISTED)
    assert shown(explorer).startswith("<b>Default pads")


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(explorer) -> None:
    explorer.set(max_num_seqs=3)
    bundle = explorer._repr_mimebundle_()
    still = bundle["application/vnd.plotly.v1+json"]
    assert still["layout"]["title"]["text"].replace("<br>", " ") == shown(explorer)
    assert all("uid" not in trace for trace in still["data"])
    assert "default: 3 replay graphs" in bundle["text/plain"]


def test_what_cannot_be_started_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="preset: 'mine' is not allowed"):
        PlanExplorer(name="mine")
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        PlanExplorer(attrs.evolve(CONFIG, decoder_replay_cudagraph_capture_sizes=(99,)), "mine")
