"""A replica's debugger in the page, with real engines: its prompt, its frames, a figure, and the stop button."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]

STOPS = """%%distribute mirrored
%matplotlib inline
import matplotlib.pyplot as plt, torch.distributed as dist
loss = [3.0, 2.0, 1.5]
if distnb.replica_id() == 1:
    breakpoint()
dist.barrier()
"""


def ask(notebook: OpenNotebook, index: int, line: str) -> None:
    """Wait for the prompt of a cell, and type a line."""
    box = notebook.output(index).locator("input.jp-Stdin-input").element_handle(timeout=60_000)
    box.fill(line)
    box.press("Enter")
    notebook.page.wait_for_function("box => !box.isConnected", arg=box, timeout=60_000)


@pytest.mark.parametrize("front_end", ["lab"], indirect=True)  # Notebook 7 has the same code
def test_a_page_shows_and_answers_a_replicas_prompt(chrome: Any, front_end: Server) -> None:
    cells = ["%load_ext distnb\nimport distnb\n%distnb start -n 2", STOPS, STOPS, "%distnb debug", "%distnb stop"]
    front_end.write("debug.ipynb", cells)
    with OpenNotebook(chrome, front_end, "debug.ipynb") as notebook:

        def shown(index: int, text: str) -> None:
            notebook.see(lambda: text in notebook.output(index).inner_text().replace("\xa0", " "))

        notebook.run(0, 90)
        notebook.start(1)
        shown(1, "replica 1 (cpu:1)>")
        ask(notebook, 1, "sum(loss)")
        shown(1, "6.5")
        ask(notebook, 1, "plt.plot(loss); plt.show()")
        notebook.output(1).locator("img[src*='image/png']").wait_for(timeout=60_000)
        table = notebook.output(1).locator(".distnb-live table")
        notebook.see(lambda: "asks" in table.inner_text())
        ask(notebook, 1, "c")
        notebook.wait(1)
        notebook.start(2)
        shown(2, "replica 1 (cpu:1)>")
        notebook.press_stop()
        notebook.wait(2)
        shown(2, "KeyboardInterrupt")
        notebook.start(3)
        ask(notebook, 3, "p loss[-1]")
        shown(3, "1.5")
        ask(notebook, 3, "q")
        notebook.wait(3)
        notebook.run(4)
