"""environment.yml pins exactly what pyproject.toml asks for."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SED_OF_MAKEFILE = r"s/^      - \([A-Za-z0-9._-]*==[^ ]*\).*$/\1/p"


def _pins() -> dict[str, str]:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip_section,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    pins = {}
    for line in pip_section:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
        assert match, f"{line!r} is not an exact pin"
        name = canonicalize_name(match[1])
        assert name not in pins, f"{name} is pinned twice"
        pins[name] = match[2]
    return pins


def _requirements() -> list[Requirement]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    texts = [*project["dependencies"], *document["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    return [Requirement(text) for text in texts]


def test_every_dependency_is_pinned_inside_its_range() -> None:
    pins = _pins()
    for requirement in _requirements():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} has no pin in environment.yml"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is outside {requirement}"


def test_nothing_is_pinned_that_no_one_asked_for() -> None:
    wanted = {canonicalize_name(requirement.name) for requirement in _requirements()}
    assert set(_pins()) == wanted


def test_conda_python_is_inside_the_supported_range() -> None:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (python,) = [entry for entry in dependencies if isinstance(entry, str) and entry.startswith("python=")]
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert Requirement(f"python{requires}").specifier.contains(python.split("=")[1] + ".0")


def test_the_makefile_extracts_the_very_pins() -> None:
    assert SED_OF_MAKEFILE.replace("$/", "$$/") in (ROOT / "Makefile").read_text()
    command = ["sed", "-n", SED_OF_MAKEFILE, str(ROOT / "environment.yml")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines} == _pins()


def test_no_package_index_is_named() -> None:
    for name in ("environment.yml", "Makefile", "pyproject.toml", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "--index-url" not in text and "--extra-index" not in text and "http" not in text, name
