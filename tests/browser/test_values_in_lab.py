"""Values in a real browser: trees that open without a script, and pictures that remain in an untrusted notebook."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(150)]

VALUES = """import torch, distnb
tree = [{"weights": [torch.randn(100) + i, "text"], "image": torch.rand(3, 30, 40)} for i in range(2)]
distnb.PerReplica(tree)"""
DRIFT = """distnb.Mirrored([torch.zeros(2), torch.ones(2)])"""


def all_decode(output: Any) -> bool:
    script = "area => Promise.all([...area.querySelectorAll('img')].map(image => image.decode())).then(() => true)"
    return bool(output.evaluate(script))


def test_values_are_drawn_and_survive_a_reload(chrome: Any, lab: Server) -> None:
    lab.write("values.ipynb", [VALUES, DRIFT])
    with OpenNotebook(chrome, lab, "values.ipynb") as notebook:
        notebook.run(0)
        notebook.run(1)
        check(notebook)
        notebook.page.set_viewport_size({"width": 480, "height": 900})
        notebook.command("application:toggle-left-area")
        area = notebook.output(0).locator(".jp-OutputArea-output").first
        notebook.see(lambda: bool(area.evaluate("area => area.clientWidth <= 480")))
        notebook.saved()
    with OpenNotebook(chrome, lab, "values.ipynb") as again:  # reopened: not run, and untrusted
        check(again)


def check(notebook: OpenNotebook) -> None:
    output = notebook.output(0)
    notebook.see(lambda: output.locator("details").count() == 2)
    assert output.locator("details[open]").count() == 1
    inner = output.locator("details details")
    inner.locator("summary").click()
    notebook.see(lambda: inner.get_attribute("open") is not None)
    assert inner.locator("img[alt^='histogram from']").count() == 2
    assert output.locator("img[alt^='Tensor (3, 30, 40) of']").count() == 2
    assert all_decode(output)
    red = notebook.output(1).get_by_text("DRIFT: replica 1 differs from replica 0").first
    red.wait_for(timeout=60_000)
    assert str(red.evaluate("text => getComputedStyle(text).color")) == "rgb(239, 68, 68)"
