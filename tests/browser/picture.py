"""The documentation's pictures, taken of real cells in JupyterLab: `python -m tests.browser.picture [NAME.png …]`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.lab import FLAGS, ROOT, OpenNotebook, Server, chromium

TRAINS = """%%distribute mirrored
with strategy.scope():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

def train_step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

train_batches = strategy.distribute_dataset(train_loader)
for epoch in range(100):
    for batch in train_batches:
        losses = strategy.run(train_step, args=(batch,))
        loss = strategy.reduce("sum", losses, axis=None)
        distnb.live(loss=loss, own_part=losses)
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
"""
SERVERS = """%%distribute parameter_server
import torch
with strategy.scope():
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step():
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    distnb.live(loss=loss)

for _ in range(20_000):
    coordinator.schedule(train_step)
coordinator.join()
"""
FAILS = """%%distribute mirrored
def train_step(learning_rate):
    if distnb.replica_id() == 1:
        raise ValueError(f"{learning_rate=} is too large")
    return distnb.get_replica_context().all_reduce("sum", torch.ones(3))

strategy.run(train_step, args=(10.0,))
"""
DIFFERS = """%%distribute mirrored
def step():
    context = distnb.get_replica_context()
    if distnb.replica_id() == 0:
        return context.all_reduce("sum", torch.ones(3))
    return context.all_gather(torch.ones(3), axis=0)

strategy.run(step)
"""
WAITS = """%%distribute mirrored
import time

def step():
    if distnb.replica_id() == 0:
        time.sleep(60)
    return distnb.get_replica_context().all_reduce("sum", torch.ones(3))

strategy.run(step)
"""
VALUES = """%%distribute mirrored
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
                                torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10)))
strategy.run(lambda: model(torch.randn(4, 3, 6, 6)).square().sum().backward())
if distnb.replica_id() == 2:
    with torch.no_grad():
        model[0].weight.mul_(3)
sharded = distribute_tensor(torch.zeros(7, 10), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
"""


def _quickstart() -> list[str]:
    """Return the quick start's cells before the training cell."""
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return cells[: next(i for i, cell in enumerate(cells) if cell.startswith("%%distribute"))]


@dataclass(frozen=True)
class Scene:
    """The content of a picture.

    Attributes:
        cells: The cells, run one after another. The picture shows the last one.
        shown: A pattern. The picture is taken when the cell's output contains it.
        height: The least height of the picture, in pixels.
        seconds: The duration of a moving picture.
        opened: The text of a line in a tree that is to be opened.
        panel: True if the picture shows the side panel.
    """

    cells: list[str]
    shown: str
    height: float = 1050.0
    seconds: float = 0.0
    opened: str = ""
    panel: bool = False


_TWO = ["%load_ext distnb\nimport torch, distnb\n%distnb start -n 2"]
_FOUR = ["%load_ext distnb\nimport torch, distnb\n%distnb start -n 4", VALUES]
_SERVERS = ["%load_ext distnb\nimport distnb\n%distnb start --workers 2 --ps 2"]
SCENES = {
    "running.png": Scene([*_quickstart(), TRAINS], r"(?s)A step takes.*epoch 4:"),
    "running.gif": Scene([*_quickstart(), TRAINS], "", 900.0, seconds=7.0),
    "panel.png": Scene([*_quickstart(), TRAINS], r"epoch 4:", 560.0, panel=True),
    "servers.png": Scene([*_SERVERS, SERVERS], r"\d{3} done"),
    "waits.png": Scene([*_TWO, WAITS], "has not arrived"),
    "debugger.png": Scene([*_TWO, FAILS, "%distnb debug"], "replica 1 .*>"),
    "values.png": Scene([*_FOUR, "distnb.visualize(sharded)\nmodel"], r"(?s)Shard\(0\).*DRIFT", opened="Conv2d"),
    "failure.png": Scene([*_TWO, FAILS], "too large"),
    "mismatch.png": Scene([*_TWO, DIFFERS], "all_gather"),
}


def take(path: Path, scene: Scene) -> None:
    """Run the cells, and save a picture of the last one."""
    last = len(scene.cells) - 1
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        server = Server(Path(home))
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            server.write("picture.ipynb", [cell.strip() for cell in scene.cells])
            with OpenNotebook(browser, server, "picture.ipynb") as notebook:
                notebook.page.set_viewport_size({"width": 900, "height": 1900})
                notebook.command("distnb:show-replicas" if scene.panel else "application:toggle-left-area")
                for index in range(last):
                    notebook.run(index, 120)
                notebook.start(last)
                if scene.seconds:
                    _record(notebook, path, scene)
                else:
                    notebook.see(lambda: re.search(scene.shown, notebook.output(last).inner_text()) is not None)
                    if scene.opened:
                        part = notebook.output(last).locator("details details", has_text=scene.opened).first
                        part.evaluate("part => { part.open = true; }")
                    shown = notebook.page.locator(".distnb-panel") if scene.panel else _cell(notebook, last)
                    notebook.page.screenshot(path=path, clip=_around(shown, scene.height))
                    Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)
                notebook.press_stop()
                notebook.wait(last)
        finally:
            browser.close()
            server.close()


def _cell(notebook: OpenNotebook, index: int) -> Any:
    return notebook.page.locator(".jp-Notebook .jp-Cell").nth(index)


def _around(shown: Any, height: float) -> dict[str, float]:
    shown.scroll_into_view_if_needed()
    box = shown.bounding_box()
    assert box is not None
    return {"x": box["x"], "y": max(0.0, box["y"]), "width": box["width"], "height": min(box["height"], height)}


def _record(notebook: OpenNotebook, path: Path, scene: Scene) -> None:
    """Write a moving picture at its original speed, with a pause of two seconds before it repeats."""
    around = {**_around(_cell(notebook, len(scene.cells) - 1), scene.height), "height": scene.height}
    frames, times, began = [], [], time.monotonic()
    while (now := time.monotonic()) < began + scene.seconds:
        frames.append(Image.open(BytesIO(notebook.page.screenshot(clip=around))).convert("RGB"))
        times.append(now)
        notebook.page.wait_for_timeout(100)
    colours = frames[-1].quantize(128)
    pictures = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    lasts = [round(1000 * (after - before)) for before, after in pairwise(times)] + [2000]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=lasts, loop=0, optimize=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or SCENES:
        take(ROOT / "docs" / name, SCENES[name])
