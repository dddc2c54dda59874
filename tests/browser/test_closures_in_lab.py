"""A coordinator's cell in JupyterLab, shown while its closures run and saved in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server
from tests.browser.test_front_end import data_of

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.timeout(240)]

START = "%load_ext distnb\nimport distnb\n%distnb start --workers 2 --ps 2"
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
HELD = {held!r}"""
TRAIN = """for number in range(60):
    coordinator.schedule(train_step, args=(number,))
coordinator.join()"""


def test_the_view_shows_the_queue_the_workers_and_the_servers(chrome: Any, lab: Server, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    lab.write("closures.ipynb", [START, DEFINE.replace("{held!r}", repr(str(held))), TRAIN])
    with OpenNotebook(chrome, lab, "closures.ipynb") as notebook:
        notebook.run(0, 120)
        notebook.run(1)
        notebook.start(2)
        view = notebook.output(2).locator(".distnb-live")
        queue = view.locator("svg.queue").first
        queue.wait_for(timeout=60_000)
        notebook.see(lambda: "30 done" in queue.inner_html())  # the others wait for the file, or for a worker
        notebook.see(lambda: "waiting" in queue.inner_html())
        assert "staleness" in queue.inner_html()
        assert queue.locator("rect.running").count() == 1
        assert "parameter_server · 2 workers · running" in view.locator(".head").inner_text()
        workers, shards = view.locator("table").nth(0), view.locator("table").nth(1)
        notebook.see(lambda: workers.inner_text().count("train_step") == 2)
        notebook.see(lambda: "weight" in shards.inner_text())
        assert [text in shards.inner_text() for text in ("ps 0", "ps 1", "[2, 4]")] == [True] * 3
        notebook.see(lambda: view.locator("svg[data-name='loss'] path.line").count() == 2)
        held.unlink()
        notebook.wait(2)
        notebook.see(lambda: view.locator("svg").count() == 0)
        assert notebook.picture(2) > 100
        (data,) = data_of(notebook.saved(), 2)
        assert "closures: 60 done" in "".join(data["text/plain"])
        assert "widget-view" not in str(data)
