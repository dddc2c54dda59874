"""The front end in a page: its display while a cell runs, when the page or the kernel goes away, and the saved output.

Events are replayed in one kernel, whose notebook has a cell for each scene. JupyterLab is tested always, Notebook 7 in
soak: in both, the same packages handle a reload, an interrupt and a restart in the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server, chart, label_rows, lines_of, steps_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.parametrize("front_end", ["lab", pytest.param("notebook", marks=pytest.mark.soak)], indirect=True),
]

SETUP = "%load_ext distnb\nfrom tests.browser import replay\nsession = replay.install(2)"
VALUES = """import torch, distnb
tree = [{"weights": [torch.randn(100) + i, "text"], "image": torch.rand(3, 30, 40)} for i in range(2)]
distnb.PerReplica(tree)"""


def replayed(what: str) -> str:
    return f"%%distribute mirrored\n# replay: {what}"


CELLS = {
    "setup": SETUP,
    "curves": replayed("train 4"),
    "progress": replayed("progress 2"),
    "figures": replayed("figures"),
    "fails": replayed("train 0.5 1"),
    "floods": replayed("flood 2"),
    "values": VALUES,
    "drift": "distnb.Mirrored([torch.zeros(2), torch.ones(2)])",
    "reloaded": replayed("train 3"),
    "restarted": replayed("train 60"),
    "after": "6 * 7",
    "missed": replayed("train 0.5"),
    "waits": "import time, pathlib\nwhile not pathlib.Path('.gone').exists():\n    time.sleep(0.01)",
    **{f"later {number}": f"{number} * 7" for number in range(5)},
    "done": "pathlib.Path('.done').touch()",
    "open": "len(get_ipython()._distnb._front._open), 'views'",
}
AT = {name: index for index, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(chrome: Any, front_end: Server) -> Iterator[OpenNotebook]:
    front_end.write("replayed.ipynb", list(CELLS.values()))
    with OpenNotebook(chrome, front_end, "replayed.ipynb") as opened:
        opened.run(AT["setup"])
        yield opened


def data_of(notebook: dict[str, Any], index: int) -> list[dict[str, Any]]:
    return [output["data"] for output in notebook["cells"][index]["outputs"] if "data" in output]


def text_of(notebook: dict[str, Any], index: int, stream: str = "stdout") -> str:
    return "".join(
        "".join(output["text"])
        for output in notebook["cells"][index]["outputs"]
        if output["output_type"] == "stream" and output["name"] == stream
    )


def sees(notebook: OpenNotebook, index: int, *texts: str) -> None:
    """Wait until a cell shows all of these."""
    for text in texts:
        notebook.see(lambda text=text: text in notebook.output(index).inner_text().replace("\xa0", " "))  # type: ignore[misc]


def test_curves_grow_and_remain_after_the_cell(notebook: OpenNotebook) -> None:
    at = AT["curves"]
    view = notebook.output(at).locator(".distnb-live")
    loss, local_loss = chart(view, "loss"), chart(view, "local loss")
    with notebook.held():
        notebook.start(at)
        loss.wait_for(timeout=60_000)
        for _ in range(3):
            count = steps_of(loss)
            notebook.see(lambda count=count: steps_of(loss) > count)  # type: ignore[misc]
        # Reduced values give one thick line, differing ones a thin line each.
        notebook.see(lambda: lines_of(local_loss) == 2)
        assert lines_of(loss) == 1
        assert "running" in view.locator(".head").inner_text()
        notebook.see(lambda: view.locator("table").last.locator("tr").count() == 3)
        notebook.see(lambda: "examples/s" in view.locator("table").last.inner_text())
        sees(notebook, at, "epoch 1")
        notebook.see(lambda: len(label_rows(loss)[1]) >= 6)  # the second of the epochs' labels
        assert all(row == sorted(row) for row in label_rows(loss)), "labels are apart, and inside"
        values_are_read(notebook, local_loss)
        controls_work(notebook, view, local_loss)
        assert not is_light(colour_of(view))
        notebook.command("apputils:change-theme", {"theme": "JupyterLab Dark"})
        notebook.see(lambda: is_light(colour_of(view)))

    notebook.wait(at)
    notebook.see(lambda: view.locator("canvas").count() == 0)
    assert notebook.picture(at) > 100
    saved = notebook.saved()
    assert "[0-1] epoch 1" in text_of(saved, at)
    (data,) = data_of(saved, at)
    assert "widget-view" not in str(data)
    assert "loss: " in "".join(data["text/plain"])
    assert "data:image/svg+xml;base64," in "".join(data["text/html"])


def values_are_read(notebook: OpenNotebook, shown: Any) -> None:
    plot, tip = shown.locator(".plot"), shown.locator(".tip")
    assert "local loss: last" in plot.get_attribute("aria-label")
    shown.locator(".u-over").hover(position={"x": 100, "y": 60})
    notebook.see(lambda: all(text in tip.inner_text() for text in ("step", "[0]", "[1]")))
    plot.focus()
    notebook.page.keyboard.press("Home")
    notebook.see(lambda: "step 1 · epoch 1" in tip.inner_text())
    # Notebook 7 handles the arrow keys itself.
    key, step = ("ArrowRight", 2) if notebook.server.app == "lab" else ("PageDown", 11)
    notebook.page.keyboard.press(key)
    notebook.see(lambda: f"step {step} · epoch 1" in tip.inner_text())
    notebook.page.keyboard.press("Escape")
    notebook.see(lambda: not tip.is_visible())


def controls_work(notebook: OpenNotebook, view: Any, shown: Any) -> None:
    """Smooth, zoom, and choose the log scale, while the kernel is busy."""
    view.get_by_label("smoothing").fill("0.9")
    notebook.see(lambda: lines_of(shown, "raw") == 2)
    assert lines_of(shown) == 2
    view.get_by_label("smoothing").fill("0")
    view.get_by_label("log scale").check()
    notebook.see(lambda: "0.1" in shown.evaluate("figure => figure.plot.axes[1]._values"))
    view.get_by_label("log scale").uncheck()

    def shown_steps() -> list[float]:
        return list(shown.evaluate("({ plot }) => [plot.scales.x.min, plot.scales.x.max]"))

    area = shown.locator(".u-over")
    area.hover(position={"x": 60, "y": 60})
    notebook.page.mouse.down()
    area.hover(position={"x": 120, "y": 60})
    notebook.page.mouse.up()
    notebook.see(lambda: shown_steps()[0] > 1)
    zoomed, count = shown_steps(), steps_of(shown)
    notebook.see(lambda: steps_of(shown) > count)
    assert shown_steps() == zoomed, "new steps do not move it"
    area.dblclick()
    notebook.see(lambda: shown_steps() == [1, steps_of(shown)])


def colour_of(view: Any) -> str:
    return str(view.evaluate("view => getComputedStyle(view).color"))


def is_light(color: str) -> bool:
    return int(color.removeprefix("rgb(").removeprefix("rgba(").split(",")[0]) > 128


def test_progress_bars_figures_errors_and_floods_are_displayed(notebook: OpenNotebook) -> None:
    at = AT["progress"]
    notebook.start(at)
    notebook.page.wait_for_function("() => document.body.innerText.includes('[1it/s]')", timeout=60_000)
    notebook.see(lambda: one_line_per_replica(notebook.output(at).inner_text()))
    notebook.see(lambda: notebook.output(at).locator(".distnb-live .head").is_visible())
    assert not notebook.output(at).locator(".controls").is_visible(), "there is no chart to control"
    notebook.wait(at)
    sees(notebook, at, "100/100")
    notebook.run(AT["figures"])
    notebook.see(lambda: notebook.output(AT["figures"]).locator(".distnb-replicas img").count() == 2)
    notebook.run(AT["fails"])
    sees(notebook, AT["fails"], "ValueError: wrong shape", "failed")
    assert "distnb/magics" not in notebook.output(AT["fails"]).inner_text()
    notebook.run(AT["floods"])
    sees(notebook, AT["floods"], "the end", "left out")
    assert notebook.output(AT["floods"]).inner_text().count("\n") < 3_000


def one_line_per_replica(shown: str) -> bool:
    return "[0]" in shown and "[1]" in shown and shown.count("|") == 4


def test_values_are_drawn_as_trees_that_open_without_a_script(notebook: OpenNotebook) -> None:
    notebook.run(AT["values"])
    notebook.run(AT["drift"])
    values_are_drawn(notebook)


def values_are_drawn(notebook: OpenNotebook) -> None:
    output = notebook.output(AT["values"])
    notebook.see(lambda: output.locator("details").count() == 2)
    assert output.locator("details[open]").count() == 1
    inner = output.locator("details details")
    inner.locator("summary").click()
    notebook.see(lambda: inner.get_attribute("open") is not None)
    assert inner.locator("img[alt^='histogram from']").count() == 2
    assert output.locator("img[alt^='Tensor (3, 30, 40) of']").count() == 2
    output.evaluate("area => Promise.all([...area.querySelectorAll('img')].map(image => image.decode()))")
    red = notebook.output(AT["drift"]).get_by_text("DRIFT: replica 1 differs from replica 0").first
    red.wait_for(timeout=60_000)
    assert str(red.evaluate("text => getComputedStyle(text).color")) == "rgb(239, 68, 68)"


RUN_FROM = """index => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
    window.jupyterapp.commands.execute("notebook:run-all-below");
}"""


def test_a_page_reloaded_during_a_cell_shows_the_rest_of_its_output(notebook: OpenNotebook) -> None:
    at = AT["reloaded"]
    view = notebook.output(at).locator(".distnb-live")
    with notebook.held():
        notebook.start(at)
        chart(view, "loss").wait_for(timeout=60_000)
        notebook.saved()
        notebook.reload()
    # Front ends request widgets from the kernel like anything else, and it answers after the cell's end.
    chart(view, "loss").wait_for(timeout=60_000)
    notebook.see(lambda: "· ended ·" in view.locator(".head").inner_text())
    notebook.see(lambda: lines_of(chart(view, "local loss")) == 2)
    view.locator("details summary").click()
    # The output that the page missed is there.
    notebook.see(lambda: "epoch 3" in view.locator("details pre").inner_text())
    notebook._wait_for_kernel()
    for number in range(3):
        notebook.run(AT[f"later {number}"])
        sees(notebook, AT[f"later {number}"], str(number * 7))
    assert chart(view, "loss").count() == 1, "nothing else is left of it: it stays"


def test_a_page_that_missed_a_cells_end_shows_the_view_later(notebook: OpenNotebook, front_end: Server) -> None:
    at = AT["missed"]
    with notebook.held():
        notebook.page.evaluate(RUN_FROM, at)
        chart(notebook.output(at), "loss").wait_for(timeout=60_000)
        notebook.saved()
        notebook.page.goto("about:blank")
    (front_end.notebooks / ".gone").touch()
    notebook.see((front_end.notebooks / ".done").exists)
    where = "lab/tree" if front_end.app == "lab" else "notebooks"
    notebook.page.goto(f"{front_end.url}/{where}/{notebook.path.name}")
    chart(notebook.output(at), "loss").wait_for(timeout=60_000)
    notebook.see(lambda: "· ended ·" in notebook.output(at).locator(".head").inner_text())
    assert "not found" not in notebook.shown()
    notebook._wait_for_kernel()
    notebook.run(AT["open"])
    # Those that pages have replaced by pictures are closed.
    sees(notebook, AT["open"], f"({notebook.page.locator('.distnb-live .controls').count()}, 'views')")


def test_a_restarted_kernel_leaves_no_view_that_claims_to_run(notebook: OpenNotebook) -> None:
    at = AT["restarted"]
    notebook._wait_for_kernel()
    notebook.run(AT["setup"])
    notebook.start(at)
    view = notebook.output(at).locator(".distnb-live")
    chart(view, "loss").wait_for(timeout=60_000)
    assert "· running ·" in view.locator(".head").inner_text()
    panel, badge = panel_and_badge(notebook, at)
    notebook.command("distnb:show-replicas")
    sees_it_run(notebook, at)
    context = "window.jupyterapp.shell.currentWidget.sessionContext"
    notebook.page.evaluate(f"() => {context}.restartKernel()")
    view.locator(".dot.died").wait_for(timeout=60_000)
    notebook.see(lambda: "· the kernel ended ·" in view.locator(".head").inner_text())
    assert chart(view, "loss").count() == 1
    notebook.see(lambda: badge.inner_text() == "mirrored · 2 replicas · the kernel ended")
    notebook.see(lambda: "has not loaded distnb" in panel.inner_text())
    notebook.run(AT["after"])
    sees(notebook, AT["after"], "42")
    assert badge.inner_text() == "mirrored · 2 replicas · the kernel ended"

    notebook.page.evaluate(f"() => {context}.shutdown()")
    notebook.see(lambda: "and its engines have ended" in panel.inner_text())
    panel.get_by_text("Start a kernel").click()
    notebook.see(lambda: "has not loaded distnb" in panel.inner_text())


def test_saved_pictures_and_values_are_shown_by_a_new_page(notebook: OpenNotebook) -> None:
    notebook.saved()
    notebook.page.set_viewport_size({"width": 1600, "height": 950})  # room for two, next to the panel
    notebook.reload()
    assert notebook.picture(AT["curves"]) > 100
    _, badge = panel_and_badge(notebook, AT["curves"])
    notebook.see(lambda: badge.inner_text() == "mirrored · ended")
    pictures = notebook.output(AT["curves"]).locator("img[alt^='loss'], img[alt^='local loss']")
    tops = pictures.evaluate_all("all => all.map(each => each.offsetTop)")
    assert len(tops) == 2
    assert len(set(tops)) == 1, "side by side"
    values_are_drawn(notebook)


def panel_and_badge(notebook: OpenNotebook, index: int) -> tuple[Any, Any]:
    """Return the extension's panel, and the badge of a cell."""
    cell = notebook.page.locator(".jp-Notebook .jp-Cell").nth(index)
    return notebook.page.locator(".distnb-panel"), cell.locator(".distnb-mark")


def sees_it_run(notebook: OpenNotebook, index: int) -> None:
    panel, badge = panel_and_badge(notebook, index)
    notebook.see(lambda: panel.locator(".distnb-engine .distnb-mod-running").count() == 2)
    notebook.see(lambda: panel.get_by_role("img", name="local loss: [0]").count() == 1)
    notebook.see(lambda: "GB memory" in panel.inner_text())
    assert notebook.page.locator(".jp-Notebook .jp-Cell[data-distnb=running]").count() == 1
    assert badge.inner_text() == "mirrored · 2 replicas · running"
    assert badge.get_attribute("title").startswith("replica 0 on cpu:0: running\nreplica 1")
