"""A notebook with engines on other machines over ssh: they train with the right numbers, are lost and come back."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import Machines, machines
from tests.support.remote_engines import (
    check_cut_off,
    check_killed,
    check_resize,
    check_roles,
    check_secrets,
    check_stop,
    check_training,
    left,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


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
        made.run(
            f'%distnb start --hosts red,blue --per-host 2 --sync {network.hidden} --ssh-args "{words}"', timeout_s=120
        )
        made.run("import distnb, distnb.notebook.compose; cluster = distnb.notebook.compose.current()")
        yield made


def test_engines_run_on_the_requested_machines(network: Machines, notebook: Notebook) -> None:
    notebook.run("big = torch.ones(1 << 20)")  # outside the channel if memory is shared
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
        assert set(listening) <= {network.address(host)}
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
    ours = psutil.Process(notebook.pid).net_connections("inet")
    # Jupyter itself listens on loopback.
    assert {c.laddr.ip for c in ours if c.status == psutil.CONN_LISTEN} <= {network.own, "127.0.0.1"}


def test_no_secret_is_in_arguments_or_environment_variables(notebook: Notebook) -> None:
    check_secrets(notebook, 3 * 4)  # ssh, machine agent and engine of each of four


def test_modules_that_only_the_notebook_has_are_sent(network: Machines, notebook: Notebook) -> None:
    (network.hidden / "only_here.py").write_text("ANSWER = 42\n")
    notebook.run(f"import sys; sys.path.insert(0, {str(network.hidden)!r})")
    notebook.run("%%distribute mirrored\nfrom only_here import ANSWER\nthere = os.listdir(sys.path[1])")
    assert notebook.value("[ANSWER, there]") == [42, []]


def test_training_equals_one_replica(notebook: Notebook) -> None:
    check_training(notebook, "mirrored")


def test_a_machine_loses_and_gains_an_engine(notebook: Notebook) -> None:
    check_resize(notebook, ["red", "red", "blue", "blue"])


def test_a_machine_that_is_cut_off_ends_the_program(network: Machines, notebook: Notebook, tmp_path: Path) -> None:
    lost = notebook.value("[row.pid for row in cluster.status() if row.host == 'blue']")
    check_cut_off(notebook, network, "blue", "red", tmp_path)
    assert notebook.value("sum('machine blue cannot be reached' in row.state for row in cluster.status())") == 2
    for pid in lost:  # they cannot be notified, and detect it themselves
        processes.ends(pid, 40)


def test_engines_of_a_reconnected_machine_are_restarted(network: Machines, notebook: Notebook) -> None:
    network.join("blue")
    notebook.run("%distnb restart --missing", timeout_s=120)
    notebook.run("%%distribute mirrored\nback = os.uname().nodename")
    assert notebook.value("strategy.local_results(back)") == ("red", "red", "blue", "blue")


def test_a_killed_engine_ends_the_program(notebook: Notebook) -> None:
    check_killed(notebook, "blue")


def test_stop_leaves_no_process_on_any_machine(notebook: Notebook) -> None:
    check_stop(notebook)


def test_roles_are_assigned_to_machines(network: Machines, notebook: Notebook) -> None:
    words = " ".join(network.ssh_args)
    start = f'%distnb start --hosts red,blue --workers 2 --ps 1 --ssh-args "{words}"'
    check_roles(notebook, start, {"worker 0": "red", "worker 1": "blue", "ps 0": "red"}, ["red", "blue"])


def test_an_unreachable_machine_is_an_error(network: Machines, notebook: Notebook) -> None:
    start = "distnb.start(on=distnb.SSH(['red'], arguments=['-p', '9', *ssh_args]))"
    failed = notebook.try_run(start)
    assert failed.error_name == "StartError"
    assert "ssh cannot reach red" in failed.error_text
    assert "Connection refused" in failed.error_text
    assert left() == []


def test_the_end_of_the_notebook_ends_all_engines(notebook: Notebook) -> None:
    notebook.run("cluster = distnb.start(on=distnb.SSH(['red'], 1, arguments=ssh_args))", timeout_s=120)
    assert len(left()) == 6  # ssh, machine agent, template, engine, and a guardian on each machine
    os.kill(notebook.pid, signal.SIGKILL)
    processes.wait_until(lambda: not left() and not processes.run_directories(), 20, "something is left")
