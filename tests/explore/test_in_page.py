"""What an explorer's box asks of its page; that a page answers is for the browser tests."""

from replay_sim.explore.explorer import SIDES
from replay_sim.explore.in_page import InPage
from replay_sim.explore.tour_explorer import TourExplorer


def test_the_figure_takes_the_width_that_the_page_gives_its_box() -> None:
    explorer = TourExplorer()
    (page,) = [child for child in explorer.widget.children if isinstance(child, InPage)]
    assert page.layout.display == "none" and explorer.figure.layout.width is None
    page.width = 848
    assert explorer.figure.layout.width == 848 - SIDES
    explorer.set(window=9)
    assert explorer.figure.layout.width == 848 - SIDES
