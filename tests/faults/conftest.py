"""Fixtures that the fault tests share."""

import pytest

from replay_sim.replay.graphs import ReplayForm


@pytest.fixture(params=list(ReplayForm), ids=lambda form: form.value)
def form(request) -> ReplayForm:
    """Both forms of the replay graphs: what is promised of a step holds in each."""
    return request.param
