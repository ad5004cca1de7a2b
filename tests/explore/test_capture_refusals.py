"""What a capture refuses, and what an exception leaves behind, on both backends."""

import gc
import re

from replay_sim.explore import capture_refusals
from replay_sim.explore.capture_refusals import (
    RAISED,
    REFUSED,
    aftermath_table,
    aftermaths,
    refusals,
    refusals_table,
)

WORDS = {
    "read a value on the host": "host, which no graph",
    "branch on a value": "host, which no graph",
    "find where something holds": "nonzero.* depends on data|nonzero",
    "index with a mask": "depends on data",
    "make a tensor of host data": "make the tensor before the capture",
    "return a new tensor from a break": "returns_new returned a new tensor",
    "capture inside a capture": "one after the other",
    "capture from a second thread": "while another thread captures",
    "capture nothing": "captured no operation",
}


def test_every_case_is_refused_by_name_and_the_next_capture_works(backend) -> None:
    """C4, C6, C10, C11."""
    found = refusals(backend)
    assert [case.tried for case in found] == list(REFUSED) == list(WORDS)
    for case in found:
        assert re.search(WORDS[case.tried], case.message), case
        assert case.next_capture_works, case
    assert refusals_table(found)["clause"].tolist() == [clause for clause, _ in REFUSED.values()]


def test_a_case_that_is_not_refused_shows_an_empty_message(monkeypatch) -> None:
    monkeypatch.setattr(capture_refusals, "REFUSED", {"add one": ("C1", lambda place: place.x + 1)})
    (case,) = refusals()
    assert case.message == "" and case.next_capture_works


def test_an_exception_leaves_no_trace_and_is_the_one_that_was_raised(backend) -> None:
    """C7, C9."""
    found = aftermaths(backend)
    assert [case.where for case in found] == list(RAISED)
    for case in found:
        assert case.is_original and not case.is_capturing and case.bytes_in_use == 0, case
        assert not case.collector_inside and case.collector_after and case.next_capture_works, case
    assert "KeyboardInterrupt: stopped by hand" in aftermath_table(found).loc["the caller sees"].tolist()
    assert gc.isenabled()
