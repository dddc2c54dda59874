"""Trainers that end by an error of their own when they are interrupted, and that draw bars of several lines."""

from __future__ import annotations

import pytest

from tests.kernel import Notebook, lines_of_each

pytestmark = pytest.mark.timeout(120)

SETUP = """
import time, warnings
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", module="pytorch_lightning")


class Line(pl.LightningModule):
    def __init__(self, rest_s=0.0):
        super().__init__()
        self.layer, self.rest_s = torch.nn.Linear(1, 1), rest_s

    def training_step(self, batch, index):
        if self.rest_s:
            print("a long step")
        time.sleep(self.rest_s)
        loss = self.layer(batch).square().mean()
        self.log_dict({f"a_long_name_{i}": loss for i in range(3)}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model, devices):
    trainer = pl.Trainer(devices=devices, max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(torch.ones(160, 1), batch_size=8))
    return trainer.global_step
"""
FIT = "%%distribute mirrored\nsteps = fit(Line({}), strategy.num_replicas_in_sync)"


@pytest.fixture
def lightning(notebook: Notebook) -> Notebook:
    notebook.run(SETUP)
    return notebook


def test_an_interrupted_fit_ends_on_every_replica_and_the_next_works(lightning: Notebook) -> None:
    running = lightning.start(FIT.format(60.0))
    lightning.wait_for_output(running, "a long step")
    lightning.interrupt()
    ended = lightning.finish(running)
    assert (ended.error_name, ended.error_text) == ("KeyboardInterrupt", "replicas 0-1 ended")
    assert "attempting graceful shutdown" in ended.stderr
    ran = lightning.run(FIT.format(0.0))
    assert lightning.value("steps") == 20, "10 of each epoch: two replicas share the rows"
    bars = [line for line in lines_of_each(ran.stdout)[0] if "Epoch" in line]
    assert len(bars) == 1, "a bar is drawn over itself, however many lines it has"
    assert "Epoch 1/1" in bars[0]
    assert "Epoch" not in str(lines_of_each(ran.stdout)[1])
