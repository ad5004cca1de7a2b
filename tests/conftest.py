"""Fixtures that all tests share."""

import gc
import os
import sys
from pathlib import Path

import pytest
from faults.table import FAULTS, markdown

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published data; tests that read it skip where it is absent."""
    folder = Path(os.environ.get("REPLAY_SIM_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"published data not found at {folder}; set REPLAY_SIM_SHARED to its folder")
    return folder


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Both capture backends: what the system promises is tested on each (C12)."""
    if request.param == "host":
        from replay_sim.capture.host import HostBackend

        return HostBackend(1 << 32)
    from replay_sim.capture.cuda import CudaBackend

    return CudaBackend()


@pytest.fixture
def place(backend):
    """Where a capture goes: backend, pool and stream."""
    return {"backend": backend, "pool": backend.make_pool(), "stream": backend.make_stream()}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors are slower on several threads; two test runs side by side much more so."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def imports_are_no_garbage():
    """Every capture collects garbage first (C9); without this each would walk all that the imports made."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


_tables_of_workers: list[str] = []
GPU_HERE = "What is tested on a GPU ran on this machine's, as far as it was selected."
NO_GPU = "No GPU here: what is tested on one was skipped; replay_sim/records/tests-nvidia-h200.md says where it ran."


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands the table of known faults that it collected to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and FAULTS:
        output["faults"] = markdown()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Takes a worker's table; each of them collected all tests."""
    _tables_of_workers.append(node.workeroutput.get("faults", "") if hasattr(node, "workeroutput") else "")


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the table of known faults after a run that collected their tests."""
    table = markdown() if FAULTS else max(_tables_of_workers, default="")
    if table:
        terminalreporter.section("known faults")
        terminalreporter.write_line(table)
        terminalreporter.write_line(GPU_HERE if _has_gpu() else NO_GPU)
