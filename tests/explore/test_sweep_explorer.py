"""The explorer of a sweep: what its menus say is what is drawn, and nonsense is refused in place."""

import pytest
from explore.test_sweep_table import by_hand

from replay_sim.explore.sweep_explorer import SweepExplorer

AXES = ("max_num_seqs", "window")


@pytest.fixture
def explorer() -> SweepExplorer:
    return SweepExplorer(by_hand(), "written by hand", AXES)


def test_it_starts_at_the_best_design(explorer) -> None:
    start = {"across": "max_num_seqs", "up": "window", "window": 64, "max_num_seqs": 16, "plan": "default"}
    assert explorer.state == start and len(explorer.shown) == 6
    assert explorer.sentence.startswith("Best here: max_num_seqs 16, window 64: 8.0 s for the workload, +0.0% against")


def test_a_menu_changes_what_is_drawn_and_reset_brings_it_back(explorer) -> None:
    before = explorer.figure.data[0].text
    explorer.set(plan="eager")
    assert explorer.figure.data[0].text != before and explorer.figure.data[0].text[0][1] == "×"
    assert "window 128: 8.1 s" in explorer.sentence and "+1.0% against" in explorer.sentence
    explorer.set(up="plan", window=256)
    assert list(explorer.figure.layout.yaxis.ticktext) == ["default", "eager"]
    assert [list(row) for row in explorer.figure.data[0].text] == [["0.67", "1.11"], ["0.62", "1.05"]]
    explorer.reset()
    assert explorer.figure.data[0].text == before and explorer.axes == AXES


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"window": 65}, "window: 65 is not allowed; it must be one of 64, 128, 256"),
        ({"depth": 1}, "depth is no menu; the menus are across, up, window, max_num_seqs, plan"),
        ({"across": "window"}, "up: window is across already; another knob must be up"),
    ],
)
def test_nonsense_is_refused_in_place(explorer, values, told: str) -> None:
    before = explorer.figure.data[0].text
    explorer.set(**values)
    assert explorer.message == told and explorer.figure.data[0].text == before


def test_a_slice_of_failures_alone_is_refused() -> None:
    table = by_hand()
    table.loc[table["plan"] == "eager", "error"] = "refused"
    table.loc[[6, 8], "error"] = ""
    explorer = SweepExplorer(table, "written by hand", ("window", "plan"))
    assert not explorer.message
    explorer.set(across="window", up="max_num_seqs", plan="eager")
    assert not explorer.message
    table.loc[[6, 8], "error"] = "refused"
    explorer.set(window=128)
    assert explorer.message.startswith("every design of these values failed")


@pytest.mark.parametrize("axes", [("window", "window"), ("window", "workload")])
def test_axes_must_be_two_knobs_that_were_varied(axes: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="they must be two of window, max_num_seqs, plan"):
        SweepExplorer(by_hand(), "written by hand", axes)
