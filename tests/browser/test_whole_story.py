"""An afternoon with distnb in a page: the quickstart is run and watched, a replica fails and is debugged, a cell is
stopped, and the notebook is saved and opened again without a kernel, in a narrow page, too; with real engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.lab import ROOT, OpenNotebook, Server
from tests.browser.test_debugging_in_a_page import ask

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]

BREAKS = """%%distribute mirrored
def train_step(learning_rate):
    if distnb.replica_id() == 1:
        raise ValueError(f"{learning_rate=} is too large")
    return distnb.get_replica_context().all_reduce("sum", torch.ones(3))

strategy.run(train_step, args=(10.0,))"""
NARROW = 480
NO_KERNEL = "() => !window.jupyterapp.shell.currentWidget.sessionContext.session"
OUTSIDE = """area => {
    const right = area.getBoundingClientRect().right + 1;
    const scrolled = element => !element.matches(".distnb-live, .jp-RenderedText") &&
        (getComputedStyle(element).overflowX === "auto" || scrolled(element.parentElement));
    const page = document.documentElement;
    const outside = [...area.querySelectorAll(".distnb-live *, .jp-RenderedText > pre")].filter(element =>
        element.getBoundingClientRect().right > right && !scrolled(element.parentElement));
    return [...outside.map(element => element.outerHTML.slice(0, 200)),
        ...[page, area.closest(".jp-WindowedPanel-outer, .jp-Notebook")]
            .filter(each => each.scrollWidth > each.clientWidth)
            .map(each => `${each.className}: ${each.scrollWidth} of ${each.clientWidth}`)];
}"""


def quickstart() -> list[str]:
    """Return the quick start's cells up to the training cell, which runs until it is stopped."""
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    trains = next(place for place, cell in enumerate(cells) if cell.startswith("%%distribute mirrored"))
    endless = cells[trains].replace("range(EPOCHS)", "range(10**6)")
    assert endless != cells[trains]
    return [*cells[:trains], endless]


def test_the_quickstart_can_be_watched_debugged_stopped_and_reopened(chrome: Any, lab: Server) -> None:
    cells = quickstart()
    train, breaks, debug, again = range(len(cells) - 1, len(cells) + 3)
    lab.write("story.ipynb", [*cells, BREAKS, "%distnb debug", cells[-1]])
    with OpenNotebook(chrome, lab, "story.ipynb") as notebook:
        for index in range(train):
            notebook.run(index, 120)

        # The curve grows while the cell runs, and the stop button ends the cell on every replica.
        trains_and_is_stopped(notebook, train)

        notebook.run(breaks)
        see(notebook, breaks, "Replica 1 of 2 (cpu:1) raised", "ValueError: learning_rate=10.0 is too large")

        notebook.start(debug)
        ask(notebook, debug, "learning_rate * 2")
        see(notebook, debug, "20.0")
        ask(notebook, debug, "up")
        see(notebook, debug, "strategy.run(train_step, args=(10.0,))")
        ask(notebook, debug, "q")
        notebook.wait(debug)

        notebook.command("application:toggle-left-area")
        notebook.page.set_viewport_size({"width": NARROW, "height": 900})
        trains_and_is_stopped(notebook, again, narrow=True)
        assert "widget-view" not in json.dumps(notebook.saved())

    with OpenNotebook(chrome, lab, "story.ipynb") as story:
        story.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        story.see(lambda: story.page.evaluate(NO_KERNEL))
        story.command("application:toggle-left-area")
        story.page.set_viewport_size({"width": NARROW, "height": 900})
        for index in (train, again):
            assert story.picture(index) > 100
            see(story, index, "· interrupted ·", "A step takes", "KeyboardInterrupt")
        see(story, breaks, "ValueError: learning_rate=10.0 is too large")
        see(story, debug, "learning_rate * 2", "20.0")
        for index in (train, breaks, debug, again):
            fits(story, index)
        assert "Loading widget" not in story.shown()
        assert "Error displaying widget" not in story.shown()


def trains_and_is_stopped(notebook: OpenNotebook, index: int, *, narrow: bool = False) -> None:
    """Watch a training cell, and press stop."""
    notebook.start(index)
    view = notebook.output(index).locator(".distnb-live")
    curve = view.locator("svg[data-name='loss'] path.line")
    curve.wait_for(timeout=60_000)
    length = len(curve.get_attribute("d"))
    notebook.see(lambda: len(curve.get_attribute("d")) > length)
    notebook.see(lambda: "· running ·" in view.locator(".head").inner_text())
    notebook.see(lambda: view.locator("table tr").count() == 3)
    notebook.see(lambda: "A step takes" in view.inner_text())
    if narrow:
        fits(notebook, index)
        notebook.command("notebook:interrupt-kernel")  # the button is in the toolbar's menu there
    else:
        notebook.press_stop()
    notebook.wait(index)
    see(notebook, index, "· interrupted ·", "KeyboardInterrupt")
    assert notebook.picture(index) > 100


def see(notebook: OpenNotebook, index: int, *texts: str) -> None:
    """Wait until a cell shows all of these."""
    for text in texts:
        notebook.see(lambda text=text: text in notebook.output(index).inner_text().replace("\xa0", " "))  # type: ignore[misc]


def fits(notebook: OpenNotebook, index: int) -> None:
    """Check that a cell's output fits into a narrow page without scrolling sideways. Tables scroll by themselves."""
    notebook.see(lambda: notebook.page.evaluate("() => innerWidth") == NARROW)
    notebook.see(lambda: notebook.output(index).evaluate(OUTSIDE) == [])
