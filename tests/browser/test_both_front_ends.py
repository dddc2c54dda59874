"""A user's actions in JupyterLab and in Notebook 7: watch a cell, reload the page during it, stop it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server
from tests.browser.test_front_end import SETUP, data_of, text_of
from tests.support.kernel import lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]


# In both, the same packages handle a reload, an interrupt and a restart in the page.
IN_LAB = pytest.mark.parametrize("front_end", ["lab", pytest.param("notebook", marks=pytest.mark.soak)], indirect=True)


@pytest.mark.parametrize("front_end", ["notebook"], indirect=True)  # test_front_end.py tests JupyterLab
def test_the_live_view_updates_and_leaves_a_picture(chrome: Any, front_end: Server) -> None:
    front_end.write("live.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 3"])
    with OpenNotebook(chrome, front_end, "live.ipynb") as notebook:
        notebook.run(0)
        view = notebook.output(1).locator(".distnb-live")
        curve = view.locator("svg[data-name='loss'] path.line")
        with notebook.held():
            notebook.start(1)
            curve.wait_for(timeout=60_000)
            first = len(curve.get_attribute("d"))
            notebook.see(lambda: len(curve.get_attribute("d")) > first)
            notebook.see(lambda: view.locator("table tr").count() == 3)
        notebook.wait(1)
        notebook.see(lambda: view.locator("svg").count() == 0)
        assert notebook.picture(1) > 100
        saved = notebook.saved()
        assert "[0-1] epoch 1" in text_of(saved, 1)
        (data,) = data_of(saved, 1)
        assert "widget-view" not in str(data)


@IN_LAB
def test_a_page_reloaded_during_a_cell_shows_the_rest_of_its_output(chrome: Any, front_end: Server) -> None:
    cells = [SETUP, "%%distribute mirrored\n# replay: train 3", "6 * 7", "7 * 7", "8 * 7"]
    front_end.write("reload.ipynb", cells)
    with OpenNotebook(chrome, front_end, "reload.ipynb") as notebook:
        notebook.run(0)
        view = notebook.output(1).locator(".distnb-live")
        with notebook.held():
            notebook.start(1)
            view.locator("svg").first.wait_for(timeout=60_000)
            notebook.saved()
            notebook.reload()
        # Front ends request widgets from the kernel like anything else, and it answers after the cell's end.
        view.locator("svg[data-name='loss']").wait_for(timeout=60_000)
        notebook.see(lambda: "· ended ·" in view.locator(".head").inner_text())
        notebook.see(lambda: view.locator("svg[data-name='local loss'] path.line").count() == 2)
        view.locator("details summary").click()
        # The output that the page missed is there.
        notebook.see(lambda: "epoch 3" in view.locator("details pre").inner_text())
        notebook._wait_for_kernel()
        for index, answer in ((2, "42"), (3, "49"), (4, "56")):
            notebook.run(index)
            notebook.see(lambda index=index, answer=answer: answer in notebook.output(index).inner_text())  # type: ignore[misc]
        assert view.locator("svg[data-name='loss']").count() == 1, "nothing else is left of it: it stays"


@IN_LAB
def test_a_restarted_kernel_leaves_no_view_that_claims_to_run(chrome: Any, front_end: Server) -> None:
    front_end.write("restart.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 60", "6 * 7"])
    with OpenNotebook(chrome, front_end, "restart.ipynb") as notebook:
        notebook.run(0)
        notebook.start(1)
        view = notebook.output(1).locator(".distnb-live")
        view.locator("svg").first.wait_for(timeout=60_000)
        assert "· running ·" in view.locator(".head").inner_text()
        panel, badge = panel_and_badge(notebook)
        notebook.command("distnb:show-replicas")
        sees_it_run(notebook)
        context = "window.jupyterapp.shell.currentWidget.sessionContext"
        notebook.page.evaluate(f"() => {context}.restartKernel()")
        view.locator(".dot.died").wait_for(timeout=60_000)
        notebook.see(lambda: "· the kernel ended ·" in view.locator(".head").inner_text())
        assert view.locator("svg[data-name='loss']").count() == 1
        notebook.see(lambda: badge.inner_text() == "mirrored · 2 replicas · the kernel ended")
        notebook.see(lambda: "has not loaded distnb" in panel.inner_text())
        notebook.run(2)
        notebook.see(lambda: "42" in notebook.output(2).inner_text())
        assert badge.inner_text() == "mirrored · 2 replicas · the kernel ended"

        notebook.page.evaluate(f"() => {context}.shutdown()")
        notebook.see(lambda: "and its engines have ended" in panel.inner_text())
        panel.get_by_text("Start a kernel").click()
        notebook.see(lambda: "has not loaded distnb" in panel.inner_text())


LOOP = """%%distribute mirrored
import time, torch
print("begun")
while True:
    time.sleep(0.01)
"""
STUCK = """%%distribute mirrored
print("begun")
if distnb.replica_id() == 0:
    torch.distributed.all_reduce(torch.ones(1))
time.sleep(1000)
"""


@IN_LAB
def test_the_stop_button_ends_a_cell_and_the_next_cell_works(chrome: Any, front_end: Server) -> None:
    cells = ["%load_ext distnb\nimport distnb\n%distnb start -n 2", LOOP, STUCK, "%%distribute mirrored\nprint('fine')"]
    front_end.write("stop.ipynb", cells)
    with OpenNotebook(chrome, front_end, "stop.ipynb") as notebook:
        notebook.run(0, 90)
        notebook.command("distnb:show-replicas")
        panel, _ = panel_and_badge(notebook)
        for index in (1, 2):
            notebook.start(index)
            output = notebook.output(index)
            for replica in (0, 1):  # in one message or in two
                output.get_by_text(re.compile(rf"\[({replica}|0-1)\] begun")).first.wait_for(timeout=60_000)
            output.locator(".distnb-live").wait_for(timeout=60_000)
            panel.get_by_role("button", name="Stacks").click()
            where = f"stacks at [0-9].*engine 0.*cell {index + 1}, line"
            notebook.see(lambda where=where: re.search(where, panel.inner_text(), re.I | re.S) is not None)  # type: ignore[misc]
            notebook.press_stop()
            notebook.wait(index)
            for text in ("KeyboardInterrupt", "· interrupted ·"):
                output.filter(has_text=text).wait_for(timeout=60_000)
            assert "Traceback" not in output.inner_text()
            assert "line" in output.locator("table").inner_text(), "where each replica was"
        notebook.run(3)
        notebook.see(lambda: lines_of_each(notebook.output(3).inner_text()) == [["fine"], ["fine"]])


RUN_FROM = """index => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
    window.jupyterapp.commands.execute("notebook:run-all-below");
}"""
SOURCE = "index => window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.getSource()"
WRITE = """([index, source]) =>
    window.jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.setSource(source)"""


# Notebook 7 places the panel differently; the tests above use it in JupyterLab.
@pytest.mark.parametrize("front_end", [pytest.param("lab", marks=pytest.mark.soak), "notebook"], indirect=True)
def test_the_extensions_panel_follows_and_ends_a_cell_and_survives_a_reload(chrome: Any, front_end: Server) -> None:
    front_end.write("extension.ipynb", [SETUP, "%%distribute mirrored\n# replay: train 60", "6 * 7"])
    with OpenNotebook(chrome, front_end, "extension.ipynb") as notebook:
        errors: list[str] = []
        notebook.page.on("pageerror", lambda error: errors.append(str(error.stack)))
        notebook.page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        panel, badge = panel_and_badge(notebook)

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

        assert panel.locator(".distnb-title").inner_text().split() == ["mirrored", "●", "running"]
        facts = panel.locator(".distnb-facts > span")
        assert facts.evaluate_all("all => all.every(each => each.getClientRects().length === 1)"), "none is broken"
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


def panel_and_badge(notebook: OpenNotebook) -> tuple[Any, Any]:
    """Return the extension's panel, and the badge of the second cell."""
    return notebook.page.locator(".distnb-panel"), notebook.page.locator(".jp-Notebook .jp-Cell").nth(1).locator(
        ".distnb-mark"
    )


def sees_it_run(notebook: OpenNotebook) -> None:
    panel = notebook.page.locator(".distnb-panel")
    notebook.see(lambda: panel.locator(".distnb-engine .distnb-mod-running").count() == 2)
    notebook.see(lambda: panel.get_by_role("img", name="local loss: [0]").count() == 1)
    notebook.see(lambda: "GB memory" in panel.inner_text())
    cell = notebook.page.locator(".jp-Notebook .jp-Cell[data-distnb=running]")
    assert cell.locator(".distnb-mark").inner_text() == "mirrored · 2 replicas · running"
    assert cell.locator(".distnb-mark").get_attribute("title").startswith("replica 0 on cpu:0: running\nreplica 1")


@IN_LAB
def test_a_page_that_missed_a_cells_end_shows_the_view_later(chrome: Any, front_end: Server) -> None:
    gone = "import time, pathlib\nwhile not pathlib.Path('.gone').exists():\n    time.sleep(0.01)"
    train = "%%distribute mirrored\n# replay: train 0.5"
    front_end.write("missed.ipynb", [SETUP, train, train, gone, *["6 * 7"] * 5, "pathlib.Path('.done').touch()"])
    with OpenNotebook(chrome, front_end, "missed.ipynb") as notebook:
        notebook.run(0)
        notebook.run(1)
        assert notebook.picture(1) > 100
        with notebook.held():
            notebook.page.evaluate(RUN_FROM, 2)
            notebook.output(2).locator(".distnb-live svg").first.wait_for(timeout=60_000)
            notebook.saved()
            notebook.page.goto("about:blank")
        (front_end.notebooks / ".gone").touch()
        notebook.see((front_end.notebooks / ".done").exists)
        where = "lab/tree" if front_end.app == "lab" else "notebooks"
        notebook.page.goto(f"{front_end.url}/{where}/missed.ipynb")
        notebook.output(2).locator("svg[data-name='loss']").wait_for(timeout=60_000)
        notebook.see(lambda: "· ended ·" in notebook.output(2).locator(".head").inner_text())
        assert notebook.picture(1) > 100
        assert "not found" not in notebook.shown()
        source = "len(get_ipython()._distnb._front._open), 'views'"
        notebook.page.evaluate(WRITE, [9, source])
        notebook.run(9)
        notebook.see(lambda: "(1, 'views')" in notebook.output(9).inner_text())
