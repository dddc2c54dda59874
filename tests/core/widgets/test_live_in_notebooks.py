"""Curves of a real kernel and real engines: epochs, steps of ordinary cells, runs, and their history."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

SETUP = """
import distnb, torch
strategy = distnb.MirroredStrategy()
data = torch.utils.data.TensorDataset(torch.randn(48, 4))
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train_step(batch):
    loss = distnb.nn.compute_average_loss(model(batch[0]).square().sum(1), global_batch_size=8)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss

def evaluate(batch):
    return model(batch[0]).sum()
"""
LOOP = """{magic}
batches = strategy.distribute_dataset(data, batch_size=8)
for epoch in range(3):
    for batch in batches:
        loss = strategy.reduce("sum", strategy.run(train_step, args=(batch,)), axis=None)
    distnb.live(run="{run}", loss=loss)
    for batch in batches:
        strategy.run(evaluate, args=(batch,))
"""
SEEN = "seen = get_ipython().find_line_magic('distnb').__self__._front._cells[-2][1].model"


@pytest.fixture(scope="module")
def made(notebook: Notebook) -> Notebook:
    notebook.run(SETUP)
    return notebook


@pytest.mark.parametrize(("run", "magic"), [("ordinary", ""), ("cell", "%%distribute mirrored")])
def test_steps_and_epochs_match_the_training(made: Notebook, run: str, magic: str) -> None:
    made.run(LOOP.format(magic=magic, run=run).strip())
    made.run(SEEN)
    assert made.value("[step for step, *_ in seen.curves['loss'].lines[0].points]") == [6, 12, 18]
    # Every second iteration evaluates, and does not begin an epoch.
    assert made.value("sorted(seen.epochs.items())") == [(0, 0), (6, 2), (12, 4)]
    assert made.value("tuple(seen.reading)") == (4, 6, 6, None)


def test_a_method_that_trains_is_drawn_as_a_call(made: Notebook) -> None:
    made.run(
        """%%distribute mirrored
class Trainer(torch.nn.Module):
    def fit(self, steps):
        for _ in range(steps):
            distnb.live(fitted=strategy.reduce("sum", strategy.run(train_step, args=([torch.ones(4, 4)],)), axis=None))

trainer = Trainer()
"""
    )
    ran = made.run("trainer.fit(7)")
    assert ran.displays[-1]["text/plain"].startswith("mirrored · 2 replicas · ended")
    made.run(SEEN)
    assert made.value("sorted(row.steps for row in seen.rows.values())") == [7, 7]


def test_drawn_values_are_available_after_the_cells(made: Notebook, tmp_path: Path) -> None:
    table = "[(row.step, row.replica, row.name, row.run) for row in distnb.history('cell').itertuples()]"
    assert [tuple(row) for row in made.value(table) if row[1] == 0] == [(6 * i, 0, "loss", "cell") for i in (1, 2, 3)]
    assert {"cell", "ordinary"} <= set(made.value("list(distnb.history()['run'].unique())"))  # other tests drew, too
    output = made.run(
        f"%distnb curves loss --runs cell --save {tmp_path}/loss.csv\n%distnb curves --save {tmp_path}/loss.png"
    )
    assert "values written to" in output.stdout
    assert (tmp_path / "loss.csv").read_text().startswith("step,replica,name,value,run,time\n6,0,loss,")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "image/png" in made.run("%distnb curves --log --smoothing 0.5").displays[-1]


def test_tensorboard_shows_the_drawn_values(made: Notebook, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made.run(f"%distnb live --tensorboard {tmp_path}/logs")
    made.run("for i in range(3):\n    distnb.live(run='named', value=i)")
    made.run("%distnb live --tensorboard off")
    (folder,) = (tmp_path / "logs" / "named").iterdir()
    assert len(list(folder.glob("events.*"))) == 1
