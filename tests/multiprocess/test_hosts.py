"""One notebook, engines on other machines: they start by ssh, train with the right numbers, are lost and come back."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.kernel import Notebook
from tests.machines import Machines, machines

pytestmark = pytest.mark.timeout(170)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), "red", "blue") as made:
        yield made


@pytest.fixture(scope="module")
def notebook(network: Machines) -> Iterator[Notebook]:
    with Notebook() as made:
        processes.OF_MODULE.add(made.pid)
        made.run(f"import os, torch; torch.set_num_threads(1); ssh_args = {network.ssh_args!r}")
        words = " ".join(network.ssh_args)
        made.run(f'%distnb start --hosts red,blue --per-host 2 --ssh-args "{words}"', timeout_s=120)
        made.run("import distnb, distnb.session; cluster = distnb.session.current()")
        yield made


def test_engines_are_where_they_were_asked_for(network: Machines, notebook: Notebook) -> None:
    notebook.run("big = torch.ones(1 << 20)")  # beside the channel, where there is shared memory
    notebook.run("""%%distribute mirrored
import os, socket, psutil
big = big + 1
listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
found = (socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], sorted(listening),
         os.environ["DISTNB_CONNECTION"])
""")
    assert notebook.value("big.numpy().sum().item()") == 2 * (1 << 20)
    found = notebook.value("strategy.local_results(found)")
    assert [each[:3] for each in found] == [
        ("red", "0", "2"),
        ("red", "1", "2"),
        ("blue", "0", "2"),
        ("blue", "1", "2"),
    ]
    assert notebook.value("[row.host for row in cluster.status()]") == ["red", "red", "blue", "blue"]
    for host, _, _, listening, path in found:
        assert listening == [network.address(host)]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
    ours = psutil.Process(notebook.pid).net_connections("inet")
    assert {c.laddr.ip for c in ours if c.status == psutil.CONN_LISTEN} <= {network.own, "127.0.0.1"}  # Jupyter's own


def test_no_secret_is_an_argument_or_a_variable(notebook: Notebook) -> None:
    secrets = notebook.value("(cluster._keys.client_secret, cluster._keys.server_secret)")
    looked_at = 0
    for pid in processes.children_of_this_run():
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            assert not any(secret.encode() in text for secret in secrets)
            looked_at += 1
    assert looked_at >= 2 * 3 * 4  # ssh, keeper and engine of each of four


TRAINING = """
from sklearn.datasets import load_digits
import torch.nn.functional as F
torch.manual_seed(7)
digits = load_digits()
inputs, labels = torch.tensor(digits.data / 16)[:250], torch.tensor(digits.target)[:250]
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


def test_training_equals_one_replica(notebook: Notebook) -> None:
    found = []
    for name in ("mirrored", "default"):
        notebook.run(f"%%distribute {name}\n{TRAINING}")
        found.append((notebook.value("losses"), notebook.value("weights")))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


def test_a_machine_that_is_cut_off(network: Machines, notebook: Notebook, tmp_path: Path) -> None:
    lost = notebook.value("[row.pid for row in cluster.status() if row.host == 'blue']")
    goes = tmp_path / "goes"
    cell = notebook.start(f"""%%distribute mirrored
import torch.distributed as dist
kept = torch.full((3,), 7.0)
while True:
    dist.all_reduce(torch.ones(1))
    open({str(goes)!r}, "w").close()
""")
    processes.wait_until(goes.exists, 60, "the cell does not begin")
    network.cut("blue")
    ended = notebook.finish(cell, timeout_s=40)
    # Who finds out first: ssh on this machine, or the replicas on the other one.
    assert ended.error_name in ("EngineDied", "CollectiveError"), ended.traceback
    assert any(text in ended.error_text for text in ("machine blue cannot be reached", "connection to another replica"))
    count = "sum('blue cannot be reached' in row.state for row in cluster.status())"
    processes.wait_until(lambda: notebook.value(count) == 2, 20)
    notebook.run(
        "%%distribute mirrored\nleft = distnb.replica_id(), strategy.num_replicas_in_sync, os.uname().nodename"
    )
    assert notebook.value("strategy.local_results(left)") == ((0, 2, "red"), (1, 2, "red"))
    for pid in lost:  # nobody can tell them: they see for themselves
        processes.ends(pid, 20)


def test_its_engines_come_back(network: Machines, notebook: Notebook) -> None:
    network.join("blue")
    notebook.run("%distnb restart --missing", timeout_s=120)
    notebook.run("%%distribute mirrored\nback = os.uname().nodename")
    assert notebook.value("strategy.local_results(back)") == ("red", "red", "blue", "blue")


def test_an_engine_that_is_killed(notebook: Notebook) -> None:
    ended = notebook.try_run("""%%distribute mirrored
import signal
if distnb.replica_id() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""")
    assert ended.error_name == "EngineDied"
    assert "(on blue) was killed by SIGKILL" in ended.error_text


def test_stop_leaves_no_process_on_any_machine(notebook: Notebook) -> None:
    notebook.run("%distnb stop", timeout_s=60)
    assert _left() == []
    assert not processes.run_directories()


def test_a_machine_that_cannot_be_reached(network: Machines, notebook: Notebook) -> None:
    start = "distnb.start(hosts=['red'], ssh_args=['-p', '9', *ssh_args])"
    failed = notebook.try_run(start)
    assert failed.error_name == "StartError"
    assert "ssh does not reach red" in failed.error_text
    assert "Connection refused" in failed.error_text
    assert _left() == []


def test_the_end_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("cluster = distnb.start(hosts=['red'], per_host=1, ssh_args=ssh_args)", timeout_s=120)
    assert len(_left()) == 4  # ssh, keeper and engine; and the guard
    os.kill(notebook.pid, signal.SIGKILL)
    processes.wait_until(lambda: not _left() and not processes.run_directories(), 20, "something is left")


def _left() -> list[str]:
    """The processes of a cluster, but those that run the notebook."""
    found = []
    for process in processes.children_of_this_run().values():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "distnb." in command and "sh -c" not in command:
            found.append(command)
    return found
