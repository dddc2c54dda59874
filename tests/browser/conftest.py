"""Fixtures for browser tests: one server and one browser per module, skipped with the reason if Chromium is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import FLAGS, PYTHON, Server, chromium


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    """Return a running Chromium. (pytest-playwright uses the name `browser`.)"""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (Debian and Ubuntu: apt install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a JupyterLab server."""
    server = _started(tmp_path_factory.mktemp("lab"), "lab")
    yield server
    server.close()


@pytest.fixture(scope="module", params=["lab", "notebook"])
def front_end(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a JupyterLab server, and then one of Notebook 7."""
    server = _started(tmp_path_factory.mktemp(request.param), request.param)
    yield server
    server.close()


def _started(home: Path, app: str) -> Server:
    if not PYTHON.with_name(f"jupyter-{app}").exists():
        pytest.skip(f"jupyter {app} is not installed in {PYTHON.parents[1]}")
    return Server(home, app)
