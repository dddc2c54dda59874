"""Trainers that end with their own error when interrupted, and that draw progress bars of several lines."""

from __future__ import annotations

import pytest

from tests.compat.bound_classes import names_missing
from tests.support.kernel import Notebook, lines_of_each

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

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


def fit(model, devices, bar=True):
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": bar}
    trainer = pl.Trainer(devices=devices, max_epochs=2, **options)
    trainer.fit(model, DataLoader(torch.ones(160, 1), batch_size=8))
    return trainer.global_step
"""
FIT = "%%distribute mirrored\nsteps = fit(Line({}), strategy.num_replicas_in_sync)"


@pytest.fixture
def lightning(notebook: Notebook) -> Notebook:
    notebook.run(SETUP)
    return notebook


def test_an_interrupted_fit_ends_on_every_replica_and_the_next_one_works(lightning: Notebook) -> None:
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


def test_a_sharded_cell_says_that_a_trainer_shards_nothing(lightning: Notebook) -> None:
    cell = "%%distribute {}\nfit(Line(), strategy.num_replicas_in_sync, bar=False)"
    ran = lightning.run(cell.format("sharded"))
    assert ran.stderr.count("this cell trains parameters that its ShardedStrategy has not sharded (SGD, ") == 1
    assert "has not sharded" not in lightning.run(cell.format("mirrored")).stderr


def test_trainers_made_for_the_notebooks_one_process_are_refused(lightning: Notebook) -> None:
    lightning.run(
        "from lightning_fabric import Fabric\nfabric = Fabric(accelerator='cpu')\nset_up = fabric.setup(torch.nn.Linear(1, 1))\n"
        "trainer = pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)"
    )
    for name, kind in (
        ("trainer", "pytorch_lightning.trainer.trainer.Trainer"),
        ("fabric", "lightning_fabric.fabric.Fabric"),
        ("set_up", "lightning_fabric.wrappers._FabricModule"),
    ):
        used = lightning.try_run(f"%%distribute mirrored\n{name}.world_size")
        assert used.error_name == "CannotTravelError"
        assert f"`{name}` cannot be sent: it is a {kind} (it stores the processes" in used.error_text
    assert lightning.value(names_missing("lightning_internals", without="lightning")) == []


def test_lightning_logs_on_the_first_replica_of_each_program(lightning: Notebook) -> None:
    lightning.run("import distnb\nboth, second = distnb.MirroredStrategy(), distnb.MirroredStrategy(['cpu:1'])")
    lightning.run("from pytorch_lightning.utilities.rank_zero import rank_zero_only")
    lightning.run(FIT.format(0.0))
    lightning.run("%%distribute second\nrank = rank_zero_only.rank")
    assert lightning.value("rank") == 0, "a replica alone is the first one, whichever it was before"
    lightning.run("%%distribute both\nrank = rank_zero_only.rank")
    assert lightning.value("list(both.local_results(rank))") == [0, 1]
