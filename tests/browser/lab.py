"""JupyterLab and Notebook 7 in a headless Chromium, driven as a user drives them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ipykernel.kernelspec import write_kernel_spec

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PYTHON = Path(os.environ.get("FRONT_ENDS", sys.prefix)) / "bin" / "python"
"""The interpreter of the servers: this one, or that of the next front ends (`make front-ends`)."""
_PAGE = {
    "buildCheck": False,  # each page would start Node
    "disabledExtensions": {"@jupyterlab/extensionmanager-extension": True},  # it asks PyPI
}
_SETTINGS = {
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
}


def chromium() -> str | None:
    """Return the path of the system's Chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Server:
    """A Jupyter server with a private home, so its notebooks are untrusted and its settings are known.

    Args:
        home: An empty folder.
        app: "lab" or "notebook".

    Attributes:
        held: A file. While it exists, cells that train do not end.
    """

    def __init__(self, home: Path, app: str = "lab") -> None:
        self.app = app
        self.notebooks = home / "notebooks"
        self.notebooks.mkdir(parents=True)
        self.held = self.notebooks / ".held"
        for name, values in _SETTINGS.items():
            path = home / ".jupyter/lab/user-settings" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        (home / ".jupyter/labconfig").mkdir()
        (home / ".jupyter/labconfig/page_config.json").write_text(json.dumps(_PAGE))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        expose = "LabApp" if app == "lab" else "JupyterNotebookApp"
        command = [
            *(PYTHON, "-m", "jupyter", app, "--no-browser", f"--port={self.port}", "--ip=127.0.0.1"),
            *("--IdentityProvider.token=", "--ServerApp.password=", "--allow-root", f"--notebook-dir={self.notebooks}"),
            f"--{expose}.expose_app_in_browser=True",
        ]
        env = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(home / ".jupyter")}
        env["JUPYTER_RUNTIME_DIR"] = str(home / "run")
        # The extension from this folder: an installed one may be an older build.
        (home / "share/labextensions").mkdir(parents=True)
        (home / "share/labextensions/distnb").symlink_to(ROOT / "extension/labextension")
        write_kernel_spec(home / "share/kernels/python3")  # of this interpreter
        env["JUPYTER_PATH"] = str(home / "share")
        self._log = (home / "server.log").open("w")
        self._process = subprocess.Popen(command, cwd=self.notebooks, env=env, stdout=self._log, stderr=self._log)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/api", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        self.close()
        raise AssertionError(f"no Jupyter server on {self.url}; see {self._log.name}")

    def write(self, name: str, cells: Sequence[str]) -> Path:
        """Write a notebook file."""
        path = self.notebooks / name
        notebook = {
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"cell{i}",
                    "metadata": {},
                    "source": source,
                    "outputs": [],
                    "execution_count": None,
                }
                for i, source in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        path.write_text(json.dumps(notebook))
        return path

    def close(self) -> None:
        """Stop the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(60)  # if it were killed, its kernels would remain
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class OpenNotebook:
    """A notebook in a browser page.

    Args:
        browser: Playwright's browser.
        server: The server of the notebook.
        name: The notebook's file.
    """

    def __init__(self, browser: Any, server: Server, name: str) -> None:
        self.server = server
        self.path = server.notebooks / name
        self.page = browser.new_page(viewport={"width": 1250, "height": 950})
        where = "lab/tree" if server.app == "lab" else "notebooks"
        self.page.goto(f"{server.url}/{where}/{name}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self._wait_for_kernel()

    def __enter__(self) -> OpenNotebook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    def _wait_for_kernel(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp", timeout=60_000)
        self.page.wait_for_function(
            """() => {
                const panel = window.jupyterapp.shell.currentWidget;
                return panel?.sessionContext?.session?.kernel?.status === "idle";
            }""",
            timeout=60_000,
        )

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Run one of the front end's commands, and wait until it has finished."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments or {}])

    def start(self, index: int) -> None:
        """Start running a cell without waiting for it."""
        count = self.page.evaluate(
            """index => {
                const panel = window.jupyterapp.shell.currentWidget;
                panel.content.activeCellIndex = index;
                panel.content.deselectAll();
                return panel.content.widgets[index].model.executionCount;
            }""",
            index,
        )
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")
        # Before it has begun, a cell looks the same as after its end.
        self.page.wait_for_function(
            """([index, count]) => {
                const model = window.jupyterapp.shell.currentWidget.content.widgets[index].model;
                return model.executionState === "running" || model.executionCount !== count;
            }""",
            arg=[index, count],
            timeout=60_000,
        )

    def wait(self, index: int, timeout_s: float = 60.0) -> None:
        """Wait until a cell has finished. Its output may not be drawn yet."""
        self.page.wait_for_function(
            """index => {
                const model = window.jupyterapp.shell.currentWidget.content.widgets[index].model;
                return model.executionState ? model.executionState === "idle" : model.executionCount !== null;
            }""",
            arg=index,
            timeout=timeout_s * 1000,
        )

    def run(self, index: int, timeout_s: float = 60.0) -> None:
        """Run a cell and wait until it has finished."""
        self.start(index)
        self.wait(index, timeout_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a training cell running until the block ends, because the page may be slower than the cell."""
        path = self.server.held
        path.touch()
        try:
            yield
        finally:
            path.unlink()

    def see(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until a condition holds in the page, which draws asynchronously."""
        deadline = time.monotonic() + timeout_s
        while True:
            late = time.monotonic() > deadline
            if condition():
                return
            if late:
                raise AssertionError(f"not seen within {timeout_s:.0f} s; the page shows {self.shown()}")
            self.page.wait_for_timeout(50)

    def shown(self) -> str:
        """Return the text of the page."""
        return str(self.page.locator("body").inner_text())

    def picture(self, index: int) -> int:
        """Wait for the first picture in a cell's output, and return its width."""
        picture = self.output(index).locator("img[src^='data:image/svg+xml']").first
        picture.wait_for(timeout=60_000)
        return int(picture.evaluate("image => image.decode().then(() => image.naturalWidth)"))

    def press_stop(self) -> None:
        """Press the stop button of the toolbar."""
        self.page.locator("[data-command='notebook:interrupt-kernel']").first.click()

    def reload(self) -> None:
        """Reload the page, even while a cell runs."""
        self.page.reload()
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.content", timeout=60_000)

    def output(self, index: int) -> Any:
        """Return the output area of a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")

    def saved(self) -> dict[str, Any]:
        """Save the notebook, and return the content of its file."""
        self.command("docmanager:save")
        return dict(json.loads(self.path.read_text()))


# -- charts of the live view, which uPlot draws on a canvas -----------------------------------------------------------


def chart(view: Any, name: str) -> Any:
    """Return a chart of a live view."""
    return view.locator(f"figure[data-name='{name}']:has(canvas)")


def steps_of(shown: Any) -> int:
    """Return the number of steps that a chart shows."""
    return int(shown.evaluate("figure => figure.plot.data[0].length"))


def lines_of(shown: Any, kind: str = "line") -> int:
    """Return the number of a chart's lines: kind "raw" for those before smoothing."""
    return int(shown.locator(f".u-legend .{kind}").count())


def label_rows(shown: Any) -> list[list[float]]:
    """Return the edges of labels from left to right, between the edges of their place: steps, epochs, widest value."""
    return list(
        shown.evaluate(
            """figure => {
                const { plot } = figure, { ctx, over } = plot;
                ctx.font = "11px system-ui,sans-serif";
                const wide = label => ctx.measureText(label).width;
                const rows = [plot.axes[0], plot.axes[2]].map(({ _splits, _values }) => [0, ..._splits.flatMap((split, i) => {
                    const middle = over.offsetLeft + plot.valToPos(split, "x");
                    return [middle - wide(_values[i]) / 2, middle + wide(_values[i]) / 2];
                }), plot.width]);
                return [...rows, [0, Math.max(...plot.axes[1]._values.map(wide)), over.offsetLeft]];
            }"""
        )
    )
