"""Engines on other machines through mpiexec: they train with the right numbers, and a disconnected one is noticed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import needs
from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import Machines, machines
from tests.support.remote_engines import check_cut_off, check_roles, check_training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    needs("mpiexec")
    with machines(tmp_path_factory.mktemp("machines"), "red", "blue") as made:
        yield made


@pytest.fixture(scope="module")
def notebook(network: Machines) -> Iterator[Notebook]:
    """Return a notebook whose cluster TF_CONFIG names by addresses, with two tasks on each machine."""
    words = " ".join(network.ssh_args)
    tasks = [f"{network.address(name)}:{port}" for name in network.names for port in (1, 2)]
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": f"ssh {words}",  # Open MPI's way to other machines
        "HYDRA_LAUNCHER_EXTRA_ARGS": words,  # MPICH's
        "HYDRA_IFACE": f"{network.mark}b",
        "TF_CONFIG": f'{{"cluster": {{"worker": {tasks}}}}}'.replace("'", '"'),
    }
    with Notebook(env=environment) as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import os, torch, distnb, distnb.notebook; torch.set_num_threads(1)")
        made.run("%distnb start --launcher mpi --resolver tfconfig", timeout_s=150)
        made.run("cluster = distnb.notebook.compose.current()")
        yield made


def test_training_equals_one_replica(notebook: Notebook) -> None:
    assert notebook.value("[row.host for row in cluster.status()]") == ["red", "red", "blue", "blue"]
    check_training(notebook, "multi_worker")
    notebook.run("%%distribute multi_worker\nimport os; of_mpi = any(name.startswith('OMPI_') for name in os.environ)")
    assert notebook.value("of_mpi") is False  # an engine is not a rank of mpiexec


def test_a_machine_that_is_cut_off_ends_the_program(network: Machines, notebook: Notebook, tmp_path: Path) -> None:
    check_cut_off(notebook, network, "blue", "red", tmp_path)
    count = f"sum('{network.address('blue')} cannot be reached' in row.state for row in cluster.status())"
    assert notebook.value(count) == 2
    network.join("blue")
    notebook.run("%distnb stop", timeout_s=60)


@pytest.mark.soak  # test_hosts.py tests them; only the placement of tasks differs
def test_roles_are_assigned_to_machines(network: Machines, notebook: Notebook) -> None:
    red, blue = map(network.address, ("red", "blue"))
    tasks = {"chief": [f"{network.own}:1"], "worker": [f"{red}:1", f"{blue}:1"], "ps": [f"{blue}:2"]}
    start = (
        f"roles = distnb.cluster_resolver.SimpleClusterResolver({tasks})\n%distnb start --launcher mpi --resolver roles"
    )
    check_roles(notebook, start, {"worker 0": "red", "worker 1": "blue", "ps 0": "blue"}, ["red", "blue"])


def test_a_machine_unknown_to_mpiexec_is_an_error(notebook: Notebook) -> None:
    failed = notebook.try_run("%distnb start --launcher mpi --hosts localhost --launcher-args=--no-such-option")
    assert failed.error_name == "StartError"
    assert "mpiexec cannot start a process on localhost" in failed.error_text
    assert "no-such-option" in failed.error_text


def test_the_end_of_the_notebook_ends_all_engines(network: Machines, notebook: Notebook) -> None:
    notebook.run("%distnb start --launcher mpi --resolver tfconfig --per-host 1", timeout_s=150)
    assert any("mpiexec" in words for words in _commands())
    os.kill(notebook.pid, signal.SIGKILL)
    processes.wait_until(lambda: not _commands() and not processes.run_directories(), 20, "something is left")


def _commands() -> list[str]:
    """Return a cluster's commands, including mpiexec's own daemons and connections."""
    found = []
    for process in processes.children_of_this_run().values():
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return [words for words in found if any(name in words for name in ("distnb.", "mpiexec", "orted", "hydra", "ssh "))]
