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
from tests.remote_engines import check_secrets, check_training, left

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
    check_secrets(notebook, 3 * 4)  # ssh, keeper and engine of each of four


def test_training_equals_one_replica(notebook: Notebook) -> None:
    check_training(notebook, "mirrored")


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
    assert left() == []
    assert not processes.run_directories()


def test_a_machine_that_cannot_be_reached(network: Machines, notebook: Notebook) -> None:
    start = "distnb.start(hosts=['red'], ssh_args=['-p', '9', *ssh_args])"
    failed = notebook.try_run(start)
    assert failed.error_name == "StartError"
    assert "ssh does not reach red" in failed.error_text
    assert "Connection refused" in failed.error_text
    assert left() == []


def test_the_end_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("cluster = distnb.start(hosts=['red'], per_host=1, ssh_args=ssh_args)", timeout_s=120)
    assert len(left()) == 4  # ssh, keeper and engine; and the guard
    os.kill(notebook.pid, signal.SIGKILL)
    processes.wait_until(lambda: not left() and not processes.run_directories(), 20, "something is left")
