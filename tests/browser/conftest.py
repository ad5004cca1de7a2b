"""One browser for all tests that look at pages as a reader does; without one they are skipped, with the reason."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_MS = 60_000
FLAGS = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A chromium without a window; what it makes are pages, which share a cache.

    Only for as long as a module needs it: until its driver stops, no other test can run an event loop.
    """
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs the package playwright")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"needs a browser, one of {', '.join(NAMES)}")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=LIMIT_MS)
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=flags)
        yield chromium.new_context(viewport={"width": 1280, "height": 900})
        chromium.close()
