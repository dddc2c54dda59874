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
import time
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

for epoch in range(6):
    for batch in strategy.distribute_dataset(loader):
        losses = strategy.run(train_step, args=(batch,))
        distnb.live(loss=strategy.reduce("sum", losses, axis=None), own=losses)
    print("epoch", epoch)
"""


def test_a_mirrored_cell_trains_live(chrome: Any, lab: Server) -> None:
    lab.write("train.ipynb", ["%load_ext distnb\n%distnb start -n 2", DEFINE, TRAIN, "losses", "%distnb stop"])
    with OpenNotebook(chrome, lab, "train.ipynb") as notebook:
        notebook.run(0, 90)
        assert "2 engines ready" in notebook.output(0).inner_text()
        notebook.run(1, 60)
        notebook.start(2)
        view = notebook.output(2).locator(".distnb-live")
        view.locator("svg[data-name='loss'] path.line").wait_for(timeout=40_000)
        view.locator("svg[data-name='own'] path.line").nth(1).wait_for(timeout=10_000)
        assert view.locator("svg[data-name='own'] path.line").count() == 2
        table = view.locator("table").inner_text()
        for word in ("replica", "device", "step", "examples/s", "memory", "cpu:0", "cpu:1"):
            assert word in table
        notebook.wait(2, 90)
        text = notebook.output(2).inner_text()
        assert [lines[-1] for lines in lines_of_each(text)] == ["epoch 5", "epoch 5"]
        assert "ended" in text
        assert notebook.output(2).locator("img[src^='data:image/svg+xml']").count() == 2
        assert "variables on the replicas" in text
        notebook.run(3)
        assert "replica" in notebook.output(3).inner_text().lower()
        notebook.run(4)
