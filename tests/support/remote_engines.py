"""The checks of engines on other machines, for every launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import Machines

_TRAINING = """
import torch.nn.functional as F
torch.manual_seed(7)
inputs, labels = torch.rand(250, 64).double(), torch.arange(250) % 10
data = torch.utils.data.TensorDataset(inputs, labels)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

def step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

losses = []
for batch in strategy.distribute_dataset(data, batch_size=64):  # the last one has 58
    losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item())
weights = tuple(parameter.sum().item() for parameter in model.state_dict().values())
losses = tuple(losses)
"""


def check_training(notebook: Notebook, *strategies: str) -> None:
    """Check that training under each strategy gives the numbers of one replica in the notebook's own process."""
    found = []
    for name in (*strategies, "default"):
        notebook.run(f"%%distribute {name}\n{_TRAINING}")
        found.append((notebook.value("losses"), notebook.value("weights")))
    for losses, weights in found[:-1]:
        assert losses == pytest.approx(found[-1][0], rel=1e-9)
        assert weights == pytest.approx(found[-1][1], rel=1e-9)


_STATE = "tuple(p.sum().item() for p in model.parameters()), optimizer.state_dict()['state'][0]['step'].item()"
_MAKE = """
import torch.nn.functional as F
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 2)
strategy = distnb.MirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(batch):
    x, y = batch
    loss = distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
_TRAIN = """
dataset = strategy.distribute_dataset(data, batch_size=8)
losses = []
for batch in dataset:
    losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item())
trained = strategy.num_replicas_in_sync, len(losses)
"""


def check_recovery(notebook: Notebook, replicas: int) -> None:
    """Check recovery in ordinary cells: the last engine is killed, the others continue, and a new one gets their state.

    Args:
        notebook: A notebook with its cluster in `cluster`, which has imported `os`, `torch` and `distnb`.
        replicas: The number of its engines.
    """
    notebook.run(_MAKE)
    notebook.run(_TRAIN)
    assert notebook.value("trained") == (replicas, 2)
    os.kill(notebook.value("cluster.status()[-1].pid"), signal.SIGKILL)
    failed = notebook.try_run(_TRAIN)  # the notebook may know already, and continue at once
    assert failed.error_name in ("", "EngineDied", "CollectiveError", "StructureError"), failed.traceback
    notebook.run(_TRAIN)
    assert notebook.value("trained") == (replicas - 1, 2)
    before = notebook.value(f"({_STATE})")
    notebook.run("%distnb restart --missing", timeout_s=120)
    assert notebook.value(f"({_STATE})") == before
    notebook.run("%%distribute mirrored\nstate = " + _STATE)
    assert notebook.value("state") == before  # equal on all replicas, so it is a plain value
    notebook.run(_TRAIN)
    assert notebook.value("trained") == (replicas, 2)


def check_resize(notebook: Notebook, hosts: list[str]) -> None:
    """Check that a cluster of four engines on two machines loses one, and gains it again.

    Args:
        notebook: A notebook with its cluster in `cluster`, which has imported `os`, `torch` and `distnb`.
        hosts: The machine of each engine.
    """
    where = "(strategy.num_replicas_in_sync, strategy.local_results(where))"
    notebook.run(_MAKE)
    notebook.run(_TRAIN)
    before = notebook.value(f"({_STATE})")
    notebook.run("%distnb resize 3", timeout_s=60)
    assert notebook.value(f"({_STATE})") == before
    notebook.run("%%distribute mirrored\nwhere = os.uname().nodename")
    assert notebook.value(where) == (3, tuple(hosts[:3]))
    resized = notebook.run("%distnb resize 4", timeout_s=120)
    assert "1 engine added (3). The cluster has 4 engines now." in resized.stdout
    notebook.run("%%distribute mirrored\nwhere, state = os.uname().nodename, (" + _STATE + ")")
    assert notebook.value(where) == (4, tuple(hosts))
    assert notebook.value("state") == before  # equal on all replicas, so it is a plain value
    notebook.run(_TRAIN)
    assert notebook.value("trained") == (4, 2)


def check_cut_off(notebook: Notebook, network: Machines, lost: str, survivor: str, folder: Path) -> None:
    """Check that cutting off a machine ends its program within seconds, and that the next runs on the other machine.

    Args:
        notebook: A notebook with its cluster of two engines per machine in `cluster`, which has imported `os`.
        lost, survivor: The host names of the machines.
        folder: An empty folder.
    """
    goes = folder / "goes"
    cell = notebook.start(f"""%%distribute mirrored
import torch.distributed as dist
while True:
    dist.all_reduce(torch.ones(1))
    open({str(goes)!r}, "w").close()
""")
    processes.wait_until(goes.exists, 60, "the cell does not begin")
    network.cut(lost)
    ended = notebook.finish(cell, timeout_s=40)
    # Either the connected process on this machine notices first, or the replicas on the other machine.
    assert ended.error_name in ("EngineDied", "CollectiveError"), ended.traceback
    assert any(text in ended.error_text for text in ("cannot be reached", "connection to another replica"))
    # Without waiting here: the cell itself waits until the machine is known to be lost.
    notebook.run(
        "%%distribute mirrored\nleft = distnb.replica_id(), strategy.num_replicas_in_sync, os.uname().nodename",
        timeout_s=40,
    )
    assert notebook.value("sum('cannot be reached' in row.state for row in cluster.status())") == 2
    assert notebook.value("strategy.local_results(left)") == ((0, 2, survivor), (1, 2, survivor))


def check_killed(notebook: Notebook, host: str) -> None:
    """Check that the end of replica 3's engine is reported with its machine."""
    ended = notebook.try_run("""%%distribute mirrored
import os, signal
import torch.distributed as dist
if distnb.replica_id() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""")
    assert ended.error_name == "EngineDied"
    assert f"(on {host}) was killed by SIGKILL" in ended.error_text


def check_roles(notebook: Notebook, start: str, placed: dict[str, str], workers: list[str]) -> None:
    """Check a cluster with parameter servers.

    Args:
        notebook: A notebook. Its cluster is stopped first.
        start: The cell that starts the cluster.
        placed: The machine of each task.
        workers: The machines of the workers.
    """
    notebook.run("%distnb stop", timeout_s=60)
    notebook.run(start, timeout_s=150)
    notebook.run("cluster = distnb.notebook.compose.current()")
    assert notebook.value("{row.task: row.host for row in cluster.status()}") == placed
    notebook.run("%%distribute mirrored\nimport os\nwhere = strategy.run(lambda: os.uname().nodename)")
    assert list(notebook.value("strategy.local_results(where)")) == workers
    check_stop(notebook)


_KEPT = """%%distribute mirrored
import distnb, torch
with strategy.scope():
    model = torch.nn.Linear(2, 1)
own = torch.full((1,), float(distnb.replica_id()))
rows = [1, 2]
"""
_TOTAL = """%%distribute mirrored
total = strategy.reduce("sum", strategy.run(lambda: own + model.bias.detach() * 0 + len(rows)), axis=None).item()
"""


def check_detached(start: str, replicas: int, env: dict[str, str], meanwhile: Callable[[], None]) -> None:
    """Check that engines stay when their notebook is killed, and that the next notebook has everything and ends them.

    Args:
        start: The line that starts the engines.
        replicas: Their number.
        env: Added to the environment of the first notebook, but not of the second.
        meanwhile: Called while no notebook is connected.
    """
    with Notebook(env=env) as first:
        first.run(f"{start} --detach --name kept", timeout_s=150)
        first.run(_KEPT)
        weights = first.value("model.weight.numpy().tolist()")
        os.kill(first.pid, signal.SIGKILL)
        processes.ends(first.pid, 10)
    meanwhile()
    with Notebook() as second:
        shown = second.run("%distnb connect kept").text
        assert "Mirrored: model." in shown
        assert "Per replica: own." in shown
        assert second.value("rows") == [1, 2]
        assert second.value("model.weight.numpy().tolist()") == weights
        second.run(_TOTAL)
        assert second.value("total") == sum(range(replicas)) + 2 * replicas
        check_stop(second)


def check_stop(notebook: Notebook) -> None:
    """Check that after a stop no machine has a process or a file left."""
    notebook.run("%distnb stop", timeout_s=60)
    # A process that is ended from here may need a moment on the other machine.
    processes.wait_until(lambda: not left() and not processes.run_directories(), 20, "something is left")


def check_secrets(notebook: Notebook, at_least: int) -> None:
    """Check that no process of this run has a secret of the cluster among its arguments or variables.

    Args:
        notebook: A notebook with its cluster in `cluster`.
        at_least: The least number of processes.
    """
    secrets = notebook.value("[getattr(cluster.engines.keys, name) for name in ('client_secret', 'server_secret')]")
    checked = 0
    for pid in processes.children_of_this_run():
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            assert not any(secret.encode() in text for secret in secrets)
            checked += 1
    assert checked >= 2 * at_least


def left() -> list[str]:
    """Return the processes of a cluster, without those that run the notebook."""
    found = []
    for process in processes.children_of_this_run().values():
        try:
            command = "" if process.name() == processes.WARM_KERNEL else " ".join(process.cmdline())
        except psutil.Error:
            continue
        if ("distnb." in command or "guardian.py" in command) and "sh -c" not in command:
            found.append(command)
    return found
