"""The extension's panel, marks and picker. Notebook 7 places them differently, so it is tested always; JupyterLab, where
`test_front_end.py` uses the panel, in soak."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server, chart, steps_of
from tests.browser.test_front_end import SETUP, data_of, panel_and_badge, replayed, sees, sees_it_run, text_of

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]

SOURCE = "index => window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.getSource()"
WRITE = """([index, source]) =>
    window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.setSource(source)"""


@pytest.mark.parametrize("front_end", [pytest.param("lab", marks=pytest.mark.soak), "notebook"], indirect=True)
def test_the_extensions_panel_follows_and_ends_a_cell_and_survives_a_reload(chrome: Any, front_end: Server) -> None:
    front_end.write("extension.ipynb", [SETUP, replayed("train 60"), "6 * 7", replayed("train 3")])
    with OpenNotebook(chrome, front_end, "extension.ipynb") as notebook:
        errors: list[str] = []
        notebook.page.on("pageerror", lambda error: errors.append(str(error.stack)))
        notebook.page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        urls: list[str] = []
        notebook.page.on("request", lambda request: urls.append(request.url))
        panel, badge = panel_and_badge(notebook, 1)

        notebook.command("distnb:show-replicas")
        notebook.see(lambda: "has not loaded distnb" in panel.inner_text())
        panel.get_by_role("button", name="Insert as a cell").click()
        assert notebook.page.evaluate(SOURCE, 0) == "%load_ext distnb\n%distnb start"
        notebook.command("notebook:delete-cell")

        notebook.run(0)
        notebook.see(lambda: "2 engines are ready." in panel.inner_text())
        assert badge.inner_text() == "mirrored · not run"
        notebook.start(1)
        sees_it_run(notebook, 1)
        notebook.saved()
        notebook.reload()
        notebook.command("distnb:show-replicas")
        sees_it_run(notebook, 1)

        assert panel.locator(".distnb-title").inner_text().split() == ["mirrored", "●", "running"]
        facts = panel.locator(".distnb-facts > span")
        assert facts.evaluate_all("all => all.every(each => each.getClientRects().length === 1)"), "none is broken"
        button = panel.get_by_role("button", name="Interrupt")
        button.focus()
        notebook.page.keyboard.press("Enter")
        notebook.see(lambda: "mirrored · 2 replicas · " in badge.inner_text() and "running" not in badge.inner_text())
        notebook._wait_for_kernel()
        notebook.run(2)
        sees(notebook, 2, "42")

        notebook.page.locator(".jp-Notebook .jp-Cell").nth(2).locator(".cm-line").click()
        picker = notebook.page.get_by_label("Strategy of this cell")
        picker.select_option("central_storage")
        assert notebook.page.evaluate(SOURCE, 2) == "%%distribute central_storage\n6 * 7"
        picker.select_option("")
        assert notebook.page.evaluate(SOURCE, 2) == "6 * 7"
        notebook.page.evaluate(WRITE, [2, "%%time\n6 * 7"])
        picker.select_option("mirrored")
        assert notebook.page.evaluate(SOURCE, 2) == "%%time\n%%distribute mirrored\n6 * 7"
        third = notebook.page.locator(".jp-Notebook .jp-Cell").nth(2).locator(".distnb-mark")
        notebook.see(lambda: third.inner_text().startswith("mirrored · "))
        notebook.page.evaluate(WRITE, [2, "%%bash\nls"])
        notebook.see(lambda: picker.count() == 0 or not picker.is_visible())

        notebook.page.evaluate(WRITE, [2, "%autodistribute mirrored"])
        notebook.run(2)
        notebook.page.evaluate(WRITE, [2, "# replay: lines\nx"])
        notebook.run(2)
        notebook.see(lambda: third.count() == 1 and third.inner_text() == "mirrored · 2 replicas · ended")
        assert not [error for error in errors if "distnb" in error], errors

        leaves_a_picture(notebook, 3)
        others = [url for url in urls if not url.startswith((front_end.url, "blob:", "data:"))]
        assert others == [], "the page needs no network"


def leaves_a_picture(notebook: OpenNotebook, index: int) -> None:
    view = notebook.output(index).locator(".distnb-live")
    with notebook.held():
        notebook.start(index)
        chart(view, "loss").wait_for(timeout=60_000)
        count = steps_of(chart(view, "loss"))
        notebook.see(lambda: steps_of(chart(view, "loss")) > count)
        notebook.see(lambda: view.locator("table").last.locator("tr").count() == 3)
    notebook.wait(index)
    notebook.see(lambda: view.locator("canvas").count() == 0)
    assert notebook.picture(index) > 100
    saved = notebook.saved()
    assert "[0-1] epoch 1" in text_of(saved, index)
    (data,) = data_of(saved, index)
    assert "widget-view" not in str(data)
