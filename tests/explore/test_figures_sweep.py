"""Figures of a sweep: what they draw is the table, counted by hand."""

import pytest
from explore.test_sweep_table import by_hand

from replay_sim.explore.figures_sweep import memory_figure, neighbours_figure, speedup_heatmap
from replay_sim.explore.sweep_best import best_row

SOURCE = "written by hand"


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def trace(figure, name):
    (found,) = [trace for trace in figure.data if trace.name == name]
    return found


def test_a_cell_is_the_speedup_of_its_design_and_the_star_is_on_the_best() -> None:
    """A failed cell is crossed and says why."""
    table = by_hand()
    best = best_row(table)
    figure = speedup_heatmap(table, best, ("max_num_seqs", "window"), SOURCE)
    heat, star = figure.data
    assert heat.z[0][1] == pytest.approx(1.25) and heat.z[2][0] == pytest.approx(10 / 15, abs=1e-3)
    assert heat.text[0][1] == "1.25" and heat.zmin + heat.zmax == pytest.approx(2)
    assert (round(star.x[0]), round(star.y[0])) == (1, 0)
    assert list(figure.layout.xaxis.ticktext) == ["8", "16"] and list(figure.layout.yaxis.ticktext) == [
        "64",
        "128",
        "256",
    ]
    assert title(figure).startswith(
        "<b>Replay makes the workload 1.25 times as fast at max_num_seqs 16, window 64, 0.67 at"
    )
    plans = speedup_heatmap(table, best, ("max_num_seqs", "plan"), SOURCE)
    assert plans.data[0].text[1][1] == "×" and "refused" in plans.data[0].customdata[1][1]


def test_time_stands_against_memory_with_the_front_of_each_kind_of_plan() -> None:
    table = by_hand()
    figure = memory_figure(table, best_row(table), SOURCE)
    assert sum(trace(figure, "all 11 designs").customdata) == 11
    assert trace(figure, "eager plans").y == (8.08,)
    assert trace(figure, "default plans").x == (513.0, 1025.0)
    assert trace(figure, "the best design").y == (8.0,) and len(trace(figure, "neighbours").x) == 2
    assert title(figure) == (
        "<b>The best takes 8.0 s with 1,025 MiB of buffers; 1 MiB take at most 1% longer, with "
        "window 128, plan eager</b>"
    )
    assert "window 64" in trace(figure, "the best design").customdata[0]


def test_every_neighbour_is_a_bar_with_what_it_costs() -> None:
    table = by_hand()
    (bars,) = neighbours_figure(table, best_row(table[table["window"] == 128]), SOURCE).data
    assert bars.y == ("plan default → eager", "max_num_seqs 16 → 8", "window 128 → 256", "window 128 → 64")
    assert bars.x[-1] == pytest.approx(8 / 8.05 - 1) and bars.text[0] == "+0.4%, 1 MiB"
    assert "3 of 11 designs take at most 1% longer" in title(neighbours_figure(table, best_row(table), SOURCE))
