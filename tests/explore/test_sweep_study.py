"""A sweep for a notebook: what it keeps is what the steps are, one by one."""

import pytest
from explore.sweep_cases import AXES, CONFIG, FAILED, PLANS, POINTS, WORKLOAD

from replay_sim.explore.sweep_best import TIME
from replay_sim.explore.sweep_rows import run_group
from replay_sim.explore.sweep_study import COUNTED, SweepStudy
from replay_sim.explore.sweep_table import table_of


def test_the_table_is_that_of_its_points_and_agrees_with_every_step() -> None:
    """Issue 9, Sweeps: times to rounding, counts exactly."""
    study = SweepStudy("small", CONFIG, WORKLOAD, AXES, PLANS)
    assert study.points == POINTS
    assert study.table.equals(table_of(run_group(POINTS, WORKLOAD)))
    ran = [point.index for point in POINTS if point.index not in FAILED][::4]
    proof = study.step_by_step(ran)
    assert proof.shape == (2 * len(ran), 6)
    for index in ran:
        swept, stepped = proof.loc[(index, "in the table")], proof.loc[(index, "step by step")]
        assert swept[list(COUNTED)].tolist() == stepped[list(COUNTED)].tolist()
        assert swept[TIME] == pytest.approx(stepped[TIME], rel=1e-12)
