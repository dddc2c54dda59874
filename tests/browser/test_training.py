"""The main job in JupyterLab, with real engines: a `%%distribute mirrored` cell trains, live."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab import OpenNotebook, Server
from tests.kernel import lines_of_each

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

DEFINE = """
import distnb, torch
torch.manual_seed(0)
LR = 0.05
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(0, 3, (256,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
def make_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
"""
TRAIN = """%%distribute mirrored
import itertools, os, time
from torch.nn import functional as F
with strategy.scope():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

def train_step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), global_batch_size=16)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.02)
    return loss

def held():  # the page may be slower than the cell
    seen = strategy.run(lambda: torch.tensor(float(os.path.exists(HELD))))
    return strategy.reduce("sum", seen, axis=None) > 0

for epoch in itertools.count():
    for batch in strategy.distribute_dataset(loader):
        losses = strategy.run(train_step, args=(batch,))
        distnb.live(loss=strategy.reduce("sum", losses, axis=None), own=losses)
    print("epoch", epoch)
    if epoch >= 5 and not held():
        break
"""


def test_a_mirrored_cell_trains_live(chrome: Any, lab: Server) -> None:
    lab.write(
        "train.ipynb",
        ["%load_ext distnb\n%distnb start -n 2", f"HELD = {str(lab.held)!r}" + DEFINE, TRAIN, "losses", "%distnb stop"],
    )
    with OpenNotebook(chrome, lab, "train.ipynb") as notebook:
        notebook.run(0, 90)
        notebook.see(lambda: "2 engines ready" in notebook.output(0).inner_text())
        notebook.run(1, 60)
        output = notebook.output(2)
        view = output.locator(".distnb-live")
        with notebook.held():
            notebook.start(2)
            view.locator("svg[data-name='loss'] path.line").wait_for(timeout=60_000)
            notebook.see(lambda: view.locator("svg[data-name='own'] path.line").count() == 2)
            words = ("replica", "device", "step", "examples/s", "memory", "cpu:0", "cpu:1")
            notebook.see(lambda: all(word in view.locator("table").inner_text() for word in words))
        notebook.wait(2, 90)
        notebook.see(lambda: output.locator("img[src^='data:image/svg+xml']").count() == 2)
        output.filter(has_text="ended").wait_for(timeout=60_000)
        notebook.see(lambda: same_last_epoch(lines_of_each(output.inner_text())))
        notebook.run(3)
        notebook.see(lambda: "replica" in notebook.output(3).inner_text().lower())
        notebook.run(4)


def same_last_epoch(lines: list[list[str]]) -> bool:
    first, second = (each[-1] if each else "" for each in lines)
    return first == second and int(first.removeprefix("epoch ") or 0) >= 5
