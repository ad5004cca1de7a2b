"""Whole steps of random worlds are right: against plain clauses, an eager twin bit for bit, and float64."""

import pytest
import torch
from long_run import runs
from long_run.__main__ import summary
from long_run.runs import Report, possible_paths, run_seed, run_worlds
from long_run.served import Served

STEPS, FIRST_SEED = 2000, 1
LEAST_PATHS = 80


@pytest.fixture(scope="module")
def report() -> Report:
    return run_worlds(FIRST_SEED, STEPS)


def test_every_step_of_random_histories_is_right(report: Report) -> None:
    """S1-S8, L2-L7, G1-G5, D1-D4, X1, X2, B2: `make long-run` runs as many as it is asked for."""
    assert not report.failures, "\n".join(report.failures.values())
    assert report.tally.steps >= STEPS


def test_the_steps_take_the_paths_that_there_are(report: Report) -> None:
    """D1-D3: every reason of the model, every one of the replay layers, and both forms of graphs with each sharing."""
    paths, possible = set(report.tally.paths), possible_paths()
    assert paths <= possible and len(paths) >= LEAST_PATHS
    for part in (slice(0, 1), slice(1, 3), slice(3, 5)):
        assert {path[part] for path in paths} == {path[part] for path in possible}


def test_the_steps_meet_what_goes_wrong(report: Report) -> None:
    """Poison, interrupts, refusals, other ranks, and the decoder in float64 beside them."""
    counts = report.tally.counts
    for what in ("with poison", "beside another rank", "interrupted", "refused", "compared with float64"):
        assert counts[what] >= 20, what


def test_a_world_that_fails_is_reported_with_its_history_and_the_next_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure stops no other world, so that one run finds all of them."""
    check = Served.finish

    def finish(self: Served) -> None:
        check(self)
        assert self.world.seed != FIRST_SEED, "planted"

    monkeypatch.setattr(Served, "finish", finish)
    told: list[Report] = []
    report = run_worlds(FIRST_SEED, 20, told.append)
    assert [of_world.worlds for of_world in told] == [1] * report.worlds and report.worlds > 1
    assert list(report.failures) == [FIRST_SEED] and told[0].failures == report.failures
    assert all(part in report.failures[FIRST_SEED] for part in ("planted", "history=[Step(asks="))
    assert told[0].tally.steps == 0 and report.tally.steps >= 20


def test_a_run_in_which_every_world_fails_ends_and_says_that_it_stopped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds that fail add no steps."""

    def finish(self: Served) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(Served, "finish", finish)
    monkeypatch.setattr(runs, "MOST_FAILURES", 3)
    report = run_worlds(FIRST_SEED, 20)
    assert sorted(report.failures) == [FIRST_SEED, FIRST_SEED + 1, FIRST_SEED + 2] and report.tally.steps == 0
    assert "Stopped early, after 3 failures." in summary(report, 20, FIRST_SEED, "cpu")


def test_a_run_that_took_its_steps_does_not_say_that_it_stopped_early(report: Report) -> None:
    assert "early" not in summary(report, STEPS, FIRST_SEED, "cpu")


def test_a_world_multiplies_without_onednn_and_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no command has set the process up."""
    found: list[bool] = []
    monkeypatch.setattr(runs, "run_world", lambda *_: found.append(torch.backends.mkldnn.enabled))
    before = torch.backends.mkldnn.enabled
    run_seed(FIRST_SEED)
    assert found == [False] and torch.backends.mkldnn.enabled == before
