"""The front end in JupyterLab, with replayed events: what is seen while a cell runs, and what is left in the file."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

SETUP = "%load_ext distnb\nfrom tests.browser import replay\nsession = replay.install(2)"


def data_of(notebook: dict[str, Any], index: int) -> list[dict[str, Any]]:
    return [output["data"] for output in notebook["cells"][index]["outputs"] if "data" in output]


def text_of(notebook: dict[str, Any], index: int, stream: str = "stdout") -> str:
    return "".join(
        "".join(output["text"])
        for output in notebook["cells"][index]["outputs"]
        if output["output_type"] == "stream" and output["name"] == stream
    )


def test_curves_grow_and_stay(chrome: Any, lab: Server) -> None:
    lab.write("live.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 4"])
    with OpenNotebook(chrome, lab, "live.ipynb") as notebook:
        notebook.run(0)
        view = notebook.output(1).locator(".distnb-live")
        curve = view.locator("svg[data-name='loss'] path.line")
        with notebook.held():
            notebook.start(1)
            curve.wait_for(timeout=60_000)
            for _ in range(3):
                length = len(curve.get_attribute("d"))
                notebook.see(lambda length=length: len(curve.get_attribute("d")) > length)  # type: ignore[misc]
            # Reduced values make one thick line, differing ones a thin line each.
            notebook.see(lambda: view.locator("svg[data-name='local loss'] path.line").count() == 2)
            assert curve.count() == 1
            assert "running" in view.locator(".head").inner_text()
            notebook.see(lambda: view.locator("table tr").count() == 3)
            notebook.see(lambda: "examples/s" in view.locator("table").inner_text())
            notebook.see(lambda: "epoch 1" in notebook.output(1).inner_text())

        notebook.wait(1)
        notebook.see(lambda: view.locator("svg").count() == 0)
        assert notebook.picture(1) > 100
        saved = notebook.saved()
        assert "[0-1] epoch 1" in text_of(saved, 1)
        (data,) = data_of(saved, 1)
        assert "widget-view" not in str(data)
        assert "loss: " in "".join(data["text/plain"])
        html = lab.notebooks / "live.html"
        command = [sys.executable, "-m", "nbconvert", "--to", "html", str(notebook.path), "--output", str(html)]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
        assert "data:image/svg+xml;base64," in html.read_text()

    with OpenNotebook(chrome, lab, "live.ipynb") as again:  # without having run anything, and untrusted
        assert again.picture(1) > 100


def test_progress_bars_figures_and_errors(chrome: Any, lab: Server) -> None:
    cells = [SETUP, *(f"%%distribute mirrored\n# replay: {what}" for what in ("progress 2", "figures", "train 0.5 1"))]
    lab.write("output.ipynb", cells)
    with OpenNotebook(chrome, lab, "output.ipynb") as notebook:
        notebook.run(0)
        notebook.start(1)
        notebook.page.wait_for_function("() => document.body.innerText.includes('[1it/s]')", timeout=60_000)
        notebook.see(lambda: one_line_per_replica(notebook.output(1).inner_text()))
        notebook.wait(1)
        notebook.see(lambda: "100/100" in notebook.output(1).inner_text())
        notebook.run(2)
        notebook.see(lambda: notebook.output(2).locator(".distnb-replicas img").count() == 2)
        notebook.run(3)
        for text in ("ValueError: wrong shape", "failed"):
            notebook.output(3).filter(has_text=text).wait_for(timeout=60_000)
        assert "distnb/magics" not in notebook.output(3).inner_text()


def one_line_per_replica(shown: str) -> bool:
    return "[0]" in shown and "[1]" in shown and shown.count("|") == 4


def test_a_flood_leaves_the_notebook_usable(chrome: Any, lab: Server) -> None:
    lab.write("flood.ipynb", [SETUP, "%%distribute mirrored\n# replay: flood 2", "6 * 7"])
    with OpenNotebook(chrome, lab, "flood.ipynb") as notebook:
        notebook.run(0)
        notebook.run(1)
        notebook.output(1).filter(has_text="the end").wait_for(timeout=60_000)
        text = notebook.output(1).inner_text()
        assert "left out" in text
        assert text.count("\n") < 3_000
        notebook.run(2)
        notebook.see(lambda: "42" in notebook.output(2).inner_text())


def test_dark_theme(chrome: Any, lab: Server) -> None:
    lab.write("dark.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 3"])
    with OpenNotebook(chrome, lab, "dark.ipynb", dark=True) as notebook:
        notebook.run(0)
        view = notebook.output(1).locator(".distnb-live")
        with notebook.held():
            notebook.start(1)
            view.locator("svg").first.wait_for(timeout=60_000)
            notebook.see(lambda: is_light(view.evaluate("view => getComputedStyle(view).color")))
        notebook.wait(1)


def is_light(color: str) -> bool:
    return int(color.removeprefix("rgb(").removeprefix("rgba(").split(",")[0]) > 128
