"""What planning costs a laptop is measured in a process of its own a job."""

import pytest

from replay_sim.measure import laptop
from replay_sim.measure.laptop import measure_laptop

FAST = "optimal plans of 8192 row counts, flat"


def test_a_job_says_what_it_did_and_what_it_took() -> None:
    (point,), table = measure_laptop([FAST])
    assert point["job"] == FAST and point["did"] == "64 plans"
    assert 0 < point["cpu_seconds"] < 60 and 10 << 20 < point["peak_bytes"] < 1 << 30
    assert FAST in table and "64 plans" in table


def test_all_requests_of_a_job_are_scheduled() -> None:
    assert laptop._schedule(300).startswith("300 requests in ")


def test_a_job_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="job 'nothing' failed: KeyError: 'nothing'"):
        measure_laptop(["nothing"])
