"""The provenance that every record carries."""

import datetime
import importlib.metadata

import pytest
import torch

import replay_sim
from replay_sim.measure import environment
from replay_sim.measure.environment import describe_environment, package_version
from replay_sim.measure.records import ENVIRONMENT_KEYS

CPU = torch.device("cpu")
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Oct 1 00:00:00 UTC 2024\nGCC version: 12.3\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs@build)\n"


def test_a_cpu_has_no_gpu_and_no_driver_and_is_named() -> None:
    at = describe_environment(CPU)
    assert at.keys() >= ENVIRONMENT_KEYS
    assert at["gpu"] is None and at["driver"] is None
    assert at["cpu"] and "gpu_memory_bytes" not in at
    assert at["torch"] == torch.__version__


def test_the_date_is_that_of_the_run() -> None:
    before = datetime.date.today()
    stated = datetime.date.fromisoformat(str(describe_environment(CPU)["date"]))
    assert before <= stated <= datetime.date.today()


def test_the_version_is_known_also_without_an_installation(monkeypatch) -> None:
    assert package_version() == replay_sim.__version__

    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", not_installed)
    at = describe_environment(CPU)
    assert at["replay_sim"] == replay_sim.__version__ and at["triton"] is None


@pytest.mark.parametrize(
    ("content", "driver"), [(CLOSED, "580.159.04"), (OPEN, "570.86.15"), ("", None), ("no numbers here\n", None)]
)
def test_the_driver_is_read_from_what_its_module_states(content, driver, tmp_path, monkeypatch) -> None:
    file = tmp_path / "version"
    file.write_text(content)
    monkeypatch.setattr(environment, "DRIVER_FILE", str(file))
    assert environment._driver_version() == driver


def test_a_driver_that_states_nothing_is_unknown(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(environment, "DRIVER_FILE", str(tmp_path / "absent"))
    assert environment._driver_version() is None


@pytest.mark.gpu
def test_a_gpu_is_named_with_its_driver_and_memory() -> None:
    at = describe_environment(torch.device("cuda"))
    assert at["gpu"] == torch.cuda.get_device_name() and at["driver"]
    assert at["gpu_memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert "cpu" not in at
