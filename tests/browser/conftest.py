"""Fixtures for browser tests: one server and one browser per module, skipped with the reason if Chromium is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import FLAGS, Server, chromium


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
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    server = Server(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="module", params=["lab", "notebook"])
def front_end(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a JupyterLab server, and then one of Notebook 7."""
    package = {"lab": "jupyterlab", "notebook": "notebook"}[request.param]
    pytest.importorskip(package, reason=f"{package} is not installed")
    server = Server(tmp_path_factory.mktemp(request.param), request.param)
    yield server
    server.close()
