"""Afternoons with distnb in a page, with real engines and one kernel: cells are watched, stopped and debugged, replicas
create widgets, a coordinator's queue is shown, and the notebook is opened again without a kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import ROOT, OpenNotebook, Server, chart, lines_of, steps_of
from tests.browser.test_front_end import data_of, panel_and_badge, sees
from tests.support.kernel import lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]

BREAKS = """%%distribute mirrored
def train_step(learning_rate):
    if distnb.replica_id() == 1:
        raise ValueError(f"{learning_rate=} is too large")
    return distnb.get_replica_context().all_reduce("sum", torch.ones(3))

strategy.run(train_step, args=(10.0,))"""
STUCK = """%%distribute mirrored
print("begun")
if distnb.replica_id() == 0:
    torch.distributed.all_reduce(torch.ones(1))
import time
time.sleep(1000)
"""
ASKS = """%%distribute mirrored
%matplotlib inline
import matplotlib.pyplot as plt, torch.distributed as dist
loss = [3.0, 2.0, 1.5]
if distnb.replica_id() == 1:
    breakpoint()
dist.barrier()
"""
WIDGETS = """%%distribute mirrored
import ipywidgets
from tqdm.notebook import tqdm
me, out = distnb.replica_id(), ipywidgets.Output()
display(ipywidgets.HBox([ipywidgets.HTML(f"<b>bold {me}</b>"), ipywidgets.Button(description="press"), out]))
with out:
    print("captured", me)
for _ in tqdm(range(3), desc=f"bar {me}"):
    pass
"""
DEFINE = """%%distribute parameter_server
import torch, time
from pathlib import Path
with strategy.scope():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step(number):
    while number >= 30 and Path(HELD).exists():
        time.sleep(0.02)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    distnb.live(loss=loss)
HELD = ".held"
"""
SCHEDULES = """for number in range(60):
    coordinator.schedule(train_step, args=(number,))
coordinator.join()"""
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


PREPARES = quickstart()[:-1]
CELLS = {
    **{f"prepares {number}": cell for number, cell in enumerate(PREPARES)},
    "trains": quickstart()[-1],
    "losses": "losses",
    "breaks": BREAKS,
    "debugs": "%distnb debug",
    "trains again": quickstart()[-1],
    "stuck": STUCK,
    "fine": "%%distribute mirrored\nprint('fine')",
    "asks": ASKS,
    "asks again": ASKS,
    "debugs again": "%distnb debug",
    "widgets": WIDGETS,
    "servers": "%distnb stop\n%distnb start --workers 2 --ps 2",
    "defines": DEFINE,
    "schedules": SCHEDULES,
}
AT = {name: index for index, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(chrome: Any, lab: Server) -> Iterator[OpenNotebook]:
    """Return an open notebook whose preparing cells have run, so that its cluster has started."""
    lab.write("engines.ipynb", list(CELLS.values()))
    with OpenNotebook(chrome, lab, "engines.ipynb") as opened:
        for index in range(len(PREPARES)):
            opened.run(index, 120)
        yield opened


def ask(notebook: OpenNotebook, index: int, line: str) -> None:
    """Wait for the prompt of a cell, and type a line."""
    box = notebook.output(index).locator("input.jp-Stdin-input").element_handle(timeout=60_000)
    box.fill(line)
    box.press("Enter")
    notebook.page.wait_for_function("box => !box.isConnected", arg=box, timeout=60_000)


def test_a_training_is_watched_and_stopped(notebook: OpenNotebook) -> None:
    trains_and_is_stopped(notebook, AT["trains"])
    notebook.run(AT["losses"])
    sees(notebook, AT["losses"], "replica")


def trains_and_is_stopped(notebook: OpenNotebook, index: int, *, narrow: bool = False) -> None:
    """Watch a training cell, and press stop, which ends it on every replica."""
    notebook.start(index)
    view = notebook.output(index).locator(".distnb-live")
    loss = chart(view, "loss")
    loss.wait_for(timeout=60_000)
    count = steps_of(loss)
    notebook.see(lambda: steps_of(loss) > count)
    notebook.see(lambda: "· running ·" in view.locator(".head").inner_text())
    table = view.locator(".below table")
    words = ("replica", "device", "step", "examples/s", "memory", "cpu:0", "cpu:1")
    notebook.see(lambda: all(word in table.inner_text() for word in words))
    assert table.locator("tr").count() == 3
    notebook.see(lambda: "A step takes" in view.inner_text())
    if narrow:
        fits(notebook, index)
        notebook.command("notebook:interrupt-kernel")  # the button is in the toolbar's menu there
    else:
        notebook.press_stop()
    notebook.wait(index)
    sees(notebook, index, "· interrupted ·", "KeyboardInterrupt")
    assert notebook.picture(index) > 100


def fits(notebook: OpenNotebook, index: int) -> None:
    """Check that a cell's output fits into a narrow page without scrolling sideways. Tables scroll by themselves."""
    notebook.see(lambda: notebook.page.evaluate("() => innerWidth") == NARROW)
    notebook.see(lambda: notebook.output(index).evaluate(OUTSIDE) == [])


def test_a_failed_replica_is_debugged(notebook: OpenNotebook) -> None:
    notebook.run(AT["breaks"])
    sees(notebook, AT["breaks"], "Replica 1 of 2 (cpu:1) raised", "ValueError: learning_rate=10.0 is too large")
    at = AT["debugs"]
    notebook.start(at)
    ask(notebook, at, "learning_rate * 2")
    sees(notebook, at, "20.0")
    ask(notebook, at, "up")
    sees(notebook, at, "strategy.run(train_step, args=(10.0,))")
    ask(notebook, at, "q")
    notebook.wait(at)


def test_a_training_fits_into_a_narrow_page(notebook: OpenNotebook) -> None:
    notebook.command("application:toggle-left-area")
    notebook.page.set_viewport_size({"width": NARROW, "height": 900})
    trains_and_is_stopped(notebook, AT["trains again"], narrow=True)
    notebook.page.set_viewport_size({"width": 1250, "height": 950})


def test_the_stop_button_ends_a_stuck_cell_and_the_next_cell_works(notebook: OpenNotebook) -> None:
    at = AT["stuck"]
    notebook.command("distnb:show-replicas")
    panel, _ = panel_and_badge(notebook, at)
    notebook.start(at)
    output = notebook.output(at)
    for replica in (0, 1):  # in one message or in two
        output.get_by_text(re.compile(rf"\[({replica}|0-1)\] begun")).first.wait_for(timeout=60_000)
    output.locator(".distnb-live").wait_for(timeout=60_000)
    panel.get_by_role("button", name="Stacks").click()
    where = r"stacks at [0-9].*engine 0.*cell \d+, line"
    notebook.see(lambda: re.search(where, panel.inner_text(), re.I | re.S) is not None)
    notebook.press_stop()
    notebook.wait(at)
    sees(notebook, at, "KeyboardInterrupt", "· interrupted ·")
    assert "Traceback" not in output.inner_text()
    assert "line" in output.locator("table").inner_text(), "where each replica was"
    notebook.run(AT["fine"])
    notebook.see(lambda: lines_of_each(notebook.output(AT["fine"]).inner_text()) == [["fine"], ["fine"]])


def test_a_page_shows_and_answers_a_replicas_prompt(notebook: OpenNotebook) -> None:
    at = AT["asks"]
    notebook.start(at)
    sees(notebook, at, "replica 1 (cpu:1)>")
    ask(notebook, at, "sum(loss)")
    sees(notebook, at, "6.5")
    ask(notebook, at, "plt.plot(loss); plt.show()")
    notebook.output(at).locator("img[src*='image/png']").wait_for(timeout=60_000)
    notebook.see(lambda: "asks" in notebook.output(at).locator(".distnb-live table").inner_text())
    ask(notebook, at, "c")
    notebook.wait(at)
    at = AT["asks again"]
    notebook.start(at)
    sees(notebook, at, "replica 1 (cpu:1)>")
    notebook.press_stop()
    notebook.wait(at)
    sees(notebook, at, "KeyboardInterrupt")
    at = AT["debugs again"]
    notebook.start(at)
    ask(notebook, at, "p loss[-1]")
    sees(notebook, at, "1.5")
    ask(notebook, at, "q")
    notebook.wait(at)


def test_replicas_widgets_are_shown_before_and_after_a_reload(notebook: OpenNotebook) -> None:
    output = notebook.output(AT["widgets"])
    notebook.run(AT["widgets"])
    notebook.see(lambda: shows_widgets(output))
    notebook.saved()
    notebook.reload()
    notebook.see(lambda: shows_widgets(output))  # the kernel provides their states
    notebook._wait_for_kernel()


def shows_widgets(output: Any) -> bool:
    shown = output.inner_text().replace("\u2007", " ")
    texts = [f"{what} {replica}" for what in ("bold", "captured", "bar") for replica in (0, 1)]
    return (
        all(text in shown for text in texts)
        and output.locator("button[disabled]", has_text="press").count() == 2
        and output.locator(".progress-bar-success").count() == 2
    )


def test_the_view_shows_a_coordinators_queue_its_workers_and_the_servers(notebook: OpenNotebook) -> None:
    notebook.run(AT["servers"], 120)
    notebook.run(AT["defines"])
    at = AT["schedules"]
    view = notebook.output(at).locator(".distnb-live")
    with notebook.held():
        notebook.start(at)
        queue = view.locator("svg.queue").first
        queue.wait_for(timeout=60_000)
        notebook.see(lambda: "30 done" in queue.inner_html())  # the others wait for the file, or for a worker
        notebook.see(lambda: "waiting" in queue.inner_html())
        assert "staleness" in queue.inner_html()
        assert queue.locator("rect.running").count() == 1
        assert "parameter_server · 2 workers · running" in view.locator(".head").inner_text()
        workers, shards = view.locator(".below table").nth(0), view.locator(".below table").nth(1)
        notebook.see(lambda: workers.inner_text().count("train_step") == 2)
        notebook.see(lambda: "weight" in shards.inner_text())
        assert [text in shards.inner_text() for text in ("ps 0", "ps 1", "[2, 4]")] == [True] * 3
        notebook.see(lambda: lines_of(chart(view, "loss")) == 2)
    notebook.wait(at)
    notebook.see(lambda: view.locator("canvas").count() == 0)
    assert notebook.picture(at) > 100
    (data,) = data_of(notebook.saved(), at)
    assert "closures: 60 done" in "".join(data["text/plain"])
    assert "widget-view" not in str(data)


def test_a_saved_notebook_fits_into_a_narrow_page_without_a_kernel(
    notebook: OpenNotebook, chrome: Any, lab: Server
) -> None:
    saved = notebook.saved()
    names = ("trains", "breaks", "debugs", "trains again")
    saved["cells"] = [saved["cells"][AT[name]] for name in names]
    assert "widget-view" not in json.dumps(saved)
    (lab.notebooks / "story.ipynb").write_text(json.dumps(saved))
    with OpenNotebook(chrome, lab, "story.ipynb") as story:
        story.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        story.see(lambda: story.page.evaluate(NO_KERNEL))
        story.command("application:toggle-left-area")
        story.page.set_viewport_size({"width": NARROW, "height": 900})
        for index in (0, 3):
            assert story.picture(index) > 100
            sees(story, index, "· interrupted ·", "A step takes", "KeyboardInterrupt")
        sees(story, 1, "ValueError: learning_rate=10.0 is too large")
        sees(story, 2, "learning_rate * 2", "20.0")
        for index in range(len(names)):
            fits(story, index)
        assert "Loading widget" not in story.shown()
        assert "Error displaying widget" not in story.shown()
