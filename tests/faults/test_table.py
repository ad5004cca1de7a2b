"""Every known fault has a test that is named after it and an entry in the printed table."""

import importlib
import re
from pathlib import Path

import pytest
from faults.table import FAULTS, fault, in_order, markdown

IDS = """
A1 A2 A3 A5 A6 A7 A9 A10 A11 A12 A14 B1 B2 B3 B5 B6 B8 B10 B11 B13 B15 C1 C2 C5 C6 C7 C9
D1 D2 D3 D5 D7 D8 D9 D11 E1 E2 E3 E5 E8 F1 F3 F4 F5 F7 F9 G1 G2 G3 G5 G8 G10 H1 H3 H4 H5 H6
U1 U2 U4 U5 U6 U7 U9 U11 U13 U14
""".split()
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def every_test_is_imported() -> None:
    for path in sorted(FOLDER.glob("test_faults_*.py")):
        importlib.import_module(f"faults.{path.stem}")


def test_every_fault_has_an_entry_in_the_table_and_a_test_named_after_it() -> None:
    assert len(IDS) == 67
    assert sorted(FAULTS, key=in_order) == IDS
    assert all(entry.how and entry.tests for entry in FAULTS.values())


def test_no_fault_is_open() -> None:
    assert not [name for name in IDS if "open" in FAULTS[name].tests.values()]


def test_the_published_list_names_the_same_faults(shared: Path) -> None:
    listed = re.findall(r"^\| ([A-Z]\d+) \|", (shared / "cases/faults.md").read_text(), re.MULTILINE)
    assert listed == IDS


def test_the_table_has_a_line_for_every_fault() -> None:
    lines = markdown().splitlines()
    assert len(lines) == len(IDS) + 2
    assert [line.split("|")[1].strip() for line in lines[2:]] == IDS


def test_a_test_that_is_not_named_after_its_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="must start with test_A1_"):
        fault("A1", "it is not")(test_the_table_has_a_line_for_every_fault)
