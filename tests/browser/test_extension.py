"""The extension in JupyterLab and Notebook 7: what its panel and its marks show, and its buttons while a cell runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server
from tests.browser.test_front_end import SETUP

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

SOURCE = "index => window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.getSource()"


def test_the_panel_follows_a_cell_and_a_reload_and_ends_it(chrome: Any, front_end: Server) -> None:
    front_end.write("extension.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 60", "6 * 7"])
    with OpenNotebook(chrome, front_end, "extension.ipynb") as notebook:
        errors: list[str] = []
        notebook.page.on("pageerror", lambda error: errors.append(str(error.stack)))
        notebook.page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        panel = notebook.page.locator(".distnb-panel")
        badge = notebook.page.locator(".jp-Notebook .jp-Cell").nth(1).locator(".distnb-mark")

        notebook.command("distnb:show-replicas")
        notebook.see(lambda: "has not loaded distnb" in panel.inner_text())
        panel.get_by_role("button", name="Insert as a cell").click()
        assert notebook.page.evaluate(SOURCE, 0) == "%load_ext distnb\n%distnb start"
        notebook.command("notebook:delete-cell")

        notebook.run(0)
        notebook.see(lambda: "2 engines are ready." in panel.inner_text())
        assert badge.inner_text() == "mirrored · not run"
        notebook.start(1)
        sees_it_run(notebook)
        notebook.saved()
        notebook.reload()
        notebook.command("distnb:show-replicas")
        sees_it_run(notebook)

        button = panel.get_by_role("button", name="Interrupt")
        button.focus()
        notebook.page.keyboard.press("Enter")
        notebook.see(lambda: "mirrored · 2 replicas · " in badge.inner_text() and "running" not in badge.inner_text())
        notebook._wait_for_kernel()
        notebook.run(2)
        notebook.see(lambda: "42" in notebook.output(2).inner_text())

        notebook.page.locator(".jp-Notebook .jp-Cell").nth(2).locator(".cm-line").click()
        picker = notebook.page.get_by_label("Strategy of this cell")
        picker.select_option("central_storage")
        assert notebook.page.evaluate(SOURCE, 2) == "%%distribute central_storage\n6 * 7"
        picker.select_option("")
        assert notebook.page.evaluate(SOURCE, 2) == "6 * 7"
        assert not [error for error in errors if "distnb" in error], errors


def sees_it_run(notebook: OpenNotebook) -> None:
    panel = notebook.page.locator(".distnb-panel")
    notebook.see(lambda: panel.locator(".distnb-engine .distnb-mod-running").count() == 2)
    notebook.see(lambda: panel.get_by_role("img", name="local loss: [0]").count() == 1)
    notebook.see(lambda: "MB memory" in panel.inner_text())
    cell = notebook.page.locator(".jp-Notebook .jp-Cell[data-distnb=running]")
    assert cell.locator(".distnb-mark").inner_text() == "mirrored · 2 replicas · running"
    assert cell.locator(".distnb-mark").get_attribute("title").startswith("replica 0 on cpu:0: running\nreplica 1")
