"""Where a measurement was made: the provenance that every record carries."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

DRIVER_FILE = "/proc/driver/nvidia/version"


def package_version() -> str:
    """The version of replay_sim, also when it runs from a checkout that is not installed."""
    try:
        return version("replay-sim")
    except PackageNotFoundError:
        from replay_sim import __version__

        return __version__


def describe_environment(device: torch.device) -> dict[str, str | int | None]:
    """gpu, driver, torch, triton, date and package version; `gpu` is None and `cpu` is named on a CPU."""
    environment: dict[str, str | int | None] = {
        "gpu": None,
        "driver": None,
        "torch": torch.__version__,
        "triton": _version_or_none("triton"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "replay_sim": package_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        environment |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "driver": _driver_version(),
        }
    else:
        environment["cpu"] = platform.processor() or platform.machine()
    return environment


def _version_or_none(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """The driver's version as the kernel module states it; None where it does not."""
    try:
        with open(DRIVER_FILE, encoding="ascii", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), None)
