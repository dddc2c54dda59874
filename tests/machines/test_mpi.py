"""Engines on other machines through mpiexec: where they run, and their end. `test_hosts_in_processes.py` has the rest."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import needs
from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import Machines, machines
from tests.support.remote_engines import check_roles

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    needs("mpiexec")
    with machines(tmp_path_factory.mktemp("machines"), "red", "blue") as made:
        yield made


@pytest.fixture(scope="module")
def notebook(network: Machines) -> Iterator[Notebook]:
    """Return a notebook whose cluster TF_CONFIG names by addresses."""
    words = " ".join(network.ssh_args)
    tasks = [f"{network.address(name)}:1" for name in network.names]
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


def test_engines_run_on_the_named_machines_and_are_no_ranks_of_mpiexec(notebook: Notebook) -> None:
    assert notebook.value("[row.host for row in cluster.status()]") == ["red", "blue"]
    notebook.run("""%%distribute multi_worker
total = torch.ones(())
torch.distributed.all_reduce(total)
found = total.item(), any(name.startswith("OMPI_") for name in os.environ)
""")
    assert notebook.value("found") == (2.0, False)


@pytest.mark.soak  # test_hosts.py tests them; only the placement of tasks differs
def test_roles_are_assigned_to_machines(network: Machines, notebook: Notebook) -> None:
    red, blue = map(network.address, ("red", "blue"))
    tasks = {"chief": [f"{network.own}:1"], "worker": [f"{red}:1", f"{blue}:1"], "ps": [f"{blue}:2"]}
    start = (
        f"roles = distnb.cluster_resolver.SimpleClusterResolver({tasks})\n%distnb start --launcher mpi --resolver roles"
    )
    check_roles(notebook, start, {"worker 0": "red", "worker 1": "blue", "ps 0": "blue"}, ["red", "blue"])


def test_a_machine_unknown_to_mpiexec_is_an_error(notebook: Notebook) -> None:
    notebook.run("%distnb stop", timeout_s=60)
    failed = notebook.try_run("%distnb start --launcher mpi --hosts localhost --launcher-args=--no-such-option")
    assert failed.error_name == "StartError"
    assert "mpiexec cannot start a process on localhost" in failed.error_text
    assert "no-such-option" in failed.error_text


def test_the_end_of_the_notebook_ends_all_engines(network: Machines, notebook: Notebook) -> None:
    notebook.run("%distnb start --launcher mpi --resolver tfconfig", timeout_s=150)
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
