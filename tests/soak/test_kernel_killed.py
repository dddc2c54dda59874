"""A kernel killed at many moments, of a training and of a resize: the next notebook finds everything, and goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.trained_model import FOUND, MODEL, STEP

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200), pytest.mark.soak]

_MOMENTS = 20
_STEPS = 150

PREPARE = """
import torch, distnb
strategy = distnb.MirroredStrategy()
def step(x):
    optimizer.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss
"""
TRAIN = f"""
torch.manual_seed(7)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range({_STEPS}):
    loss = strategy.run(step, (torch.rand(2, 4),))
print("trained", flush=True)
"""
DONE = """%%distribute mirrored
states = [optimizer.state[each] for group in optimizer.param_groups for each in group["params"]]
done = int(states[0]["step"]) if states[0] else 0
del states
"""
CONTINUE = f"""
for _ in range({_STEPS} - done):
    loss = strategy.run(step, (torch.rand(2, 4),))
"""
WEIGHTS = "[each.numpy().tolist() for each in model.state_dict().values()]"


def test_a_kernel_may_be_killed_at_any_moment() -> None:
    with Notebook() as notebook:
        notebook.run("%distnb start -n 2 --detach --name soak", timeout_s=120)
        notebook.run(PREPARE)
        began = time.monotonic()
        notebook.run(TRAIN)
        duration_s = time.monotonic() - began
        expected = notebook.value(WEIGHTS)
    found = []
    for moment in range(_MOMENTS):
        with Notebook() as notebook:
            notebook.run("%distnb connect soak")
            notebook.run("%reset -f\n%load_ext distnb")
            notebook.run(PREPARE)
            notebook.start(TRAIN)
            time.sleep(duration_s * moment / (_MOMENTS - 1))
            os.kill(notebook.pid, signal.SIGKILL)
        with Notebook() as notebook:
            notebook.run("%distnb connect soak")
            if not notebook.value("'model' in dir() and 'optimizer' in dir()"):
                found.append(0)  # killed before the end of the scope
                continue
            notebook.run("import distnb\nstrategy = distnb.MirroredStrategy()")
            notebook.run(DONE)
            notebook.run("%distnb check")
            found.append(notebook.value("done"))
            notebook.run(CONTINUE)
            assert notebook.value(WEIGHTS) == expected, f"after a kill at step {found[-1]}"
    assert len(set(found)) > _MOMENTS // 3, found
    with Notebook() as notebook:
        notebook.run("%distnb connect soak\n%distnb stop")
    processes.wait_until(lambda: not processes.children_of_this_run(), 15.0, "processes are left")


@pytest.mark.parametrize("change", ["%distnb resize 3", "%distnb restart --missing"])
def test_a_kernel_may_be_killed_while_engines_start(change: str) -> None:
    def prepare() -> None:
        notebook.run("import distnb.notebook.compose\nrows = distnb.notebook.compose.require().status()")
        if notebook.value("len(rows)") == 3:
            notebook.run("%distnb resize 2")
        steps.append(notebook.value(FOUND))
        if "restart" in change:
            os.kill(notebook.value("rows[1].pid"), signal.SIGKILL)

    steps: list[object] = []
    sizes = []
    with Notebook() as notebook:
        notebook.run("%distnb start -n 2 --detach --name soak", timeout_s=120)
        notebook.run(MODEL)
        notebook.run(STEP)
        prepare()
        began = time.monotonic()
        notebook.run(change, timeout_s=120)
        duration_s = time.monotonic() - began
    for moment in range(_MOMENTS):
        with Notebook() as notebook:
            notebook.run("%distnb connect soak", timeout_s=120)
            prepare()
            notebook.start(change)
            time.sleep(1.5 * duration_s * moment / (_MOMENTS - 1))  # on a loaded machine it may take longer than before
            os.kill(notebook.pid, signal.SIGKILL)
        with Notebook() as notebook:
            notebook.run("%distnb connect soak", timeout_s=120)
            assert notebook.value(FOUND) == steps[-1]
            if "restart" in change:
                notebook.run(change, timeout_s=120)
            notebook.run(STEP)
            sizes.append(notebook.value("history[-1]"))
    assert set(sizes) == ({2, 3} if "resize" in change else {2}), sizes
    with Notebook() as notebook:
        notebook.run("%distnb connect soak\n%distnb stop")
    processes.wait_until(lambda: not processes.children_of_this_run(), 15.0, "processes are left")
