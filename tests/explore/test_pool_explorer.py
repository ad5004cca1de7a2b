"""The explorer of pool reuse: menus from Python and by hand, what it shows, and what it refuses in place."""

import pytest

from replay_sim.config import preset_names
from replay_sim.explore.pool_explorer import START, PoolExplorer
from replay_sim.replay.sharing import PoolSharing

QUICK = "h100-tp8-log"


@pytest.fixture(scope="module")
def explorer() -> PoolExplorer:
    return PoolExplorer(preset=QUICK)


@pytest.fixture(autouse=True)
def back_to_start(explorer) -> None:
    explorer.reset()


def shown(explorer: PoolExplorer) -> str:
    return explorer.figure.layout.title.text.replace("<br>", " ")


def test_it_starts_shared_where_replay_graphs_add_nothing(explorer) -> None:
    """O1."""
    assert explorer.state == START | {"preset": QUICK}
    assert shown(explorer).startswith("<b>With shared pool and stream") and "add 0 MiB" in shown(explorer)
    assert "replay graphs +0 MiB" in explorer._sentence.value


def test_a_menu_changed_by_hand_changes_figure_map_and_sentence(explorer) -> None:
    """O2."""
    explorer.controls["arrangement"].value = "own_stream"
    assert explorer.pool_map.arrangement is PoolSharing.OWN_STREAM
    assert "reuse no byte of the model graphs" in shown(explorer)
    assert "replay graphs +44 MiB" in explorer._sentence.value
    drawn = {trace.name: len(trace.x) for trace in explorer.figure.data if trace.name}
    assert drawn["replay graph, first use"] > 0 == drawn["replay graph in a model's bytes"]


def test_state_set_from_python_reads_back_and_can_be_replayed(explorer) -> None:
    explorer.set(arrangement="own_pool", order="smallest_first", outputs="held")
    again = PoolExplorer(**explorer.state)
    assert again.state == explorer.state
    assert again.pool_map == explorer.pool_map
    assert shown(again) == shown(explorer)
    again.set(order="largest_first")
    again.reset()
    assert again.state == explorer.state


def test_order_and_outputs_are_those_of_the_map(explorer) -> None:
    explorer.set(order="smallest_first", outputs="held")
    assert not explorer.pool_map.largest_first and explorer.pool_map.outputs_held


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "<b>"}, f"preset: '<b>' is not allowed; it must be one of {', '.join(preset_names())}"),
        ({"arrangement": "none"}, "arrangement: 'none' is not allowed; it must be one of shared, own_stream, own_pool"),
        ({"order": 1}, "order: 1 is not allowed; it must be one of largest_first, smallest_first"),
        ({"outputs": ["held"]}, "outputs: ['held'] is not allowed; it must be one of dropped, held"),
        ({"colour": "red"}, "colour is no menu; the menus are preset, arrangement, order, outputs"),
    ],
)
def test_values_that_no_menu_has_change_nothing_and_are_refused_in_a_sentence(explorer, values, message) -> None:
    before = shown(explorer)
    explorer.set(**{"order": "smallest_first", **values})
    assert explorer.message == message
    assert explorer.state["order"] == "largest_first" and shown(explorer) == before
    assert explorer._refusal.value.startswith("<b>Refused.</b>") and "<b>'" not in explorer._refusal.value
    explorer.set(order="smallest_first")
    assert explorer.message == "" and explorer._refusal.value == ""


def test_a_value_that_it_cannot_start_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="'mine' is not allowed"):
        PoolExplorer(preset="mine")


def test_a_saved_notebook_keeps_the_figure_without_a_kernel(explorer) -> None:
    explorer.set(arrangement="own_stream")
    bundle = explorer._repr_mimebundle_()
    still = bundle["application/vnd.plotly.v1+json"]
    assert still["layout"]["title"]["text"].replace("<br>", " ") == shown(explorer)
    assert all("uid" not in trace for trace in still["data"])
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "replay graphs +44 MiB" in bundle["text/plain"]
