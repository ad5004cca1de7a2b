"""Where requests come from, in words that can be shown anywhere."""

import os

import pytest

from replay_sim.workload.source import open_workload

NAMES = {
    b"mine.csv": "mine.csv",
    "Anfragen-M\u00e4rz-\u8bf7.csv".encode(): "Anfragen-M\u00e4rz-\u8bf7.csv",
    b"\xff.csv": r"\udcff.csv",
    b"a\nb\x1b[2J.csv": r"a\nb\x1b[2J.csv",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_named_without_its_folder_and_with_escapes_for_what_cannot_be_shown(tmp_path, name) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb") as file:
        file.write(b"prompt_tokens,output_tokens\n9,1\n8,0\n")
    _, words = open_workload(os.fsdecode(path))
    assert words == f"2 requests of {NAMES[name]}"
