"""A notebook in a real Slurm allocation whose nodes are network namespaces, with engines started by srun."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import needs
from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import Machines, machines
from tests.support.remote_engines import (
    check_resize,
    check_roles,
    check_secrets,
    check_stop,
    left,
)
from tests.support.slurm import allocation, steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), "blue", "red") as made:
        yield made


@pytest.fixture(scope="module")
def environment(network: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with allocation(network, tmp_path_factory.mktemp("slurm"), "--ntasks-per-node=2") as made:
        yield made


@pytest.fixture(scope="module")
def notebook(environment: dict[str, str]) -> Iterator[Notebook]:
    with Notebook(env={**environment, "OMP_NUM_THREADS": "1"}) as made:
        processes.OF_MODULE.add(made.pid)
        made.run("import os, torch, distnb, distnb.notebook; torch.set_num_threads(1)")
        made.run("%distnb start --launcher slurm", timeout_s=150)
        made.run("cluster = distnb.notebook.compose.current()")
        yield made


def test_engines_run_on_the_nodes(network: Machines, notebook: Notebook) -> None:
    assert notebook.value("[row.host for row in cluster.status()]") == ["blue", "blue", "red", "red"]
    notebook.run("""%%distribute mirrored
import os, socket, psutil
found = (socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["SLURM_JOB_ID"],
         "SLURM_PROCID" in os.environ,
         sorted({c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}))
""")
    job = notebook.value("os.environ['SLURM_JOB_ID']")
    found = notebook.value("strategy.local_results(found)")
    assert [each[:5] for each in found] == [
        (host, local, "2", job, False) for host in ("blue", "red") for local in "01"
    ]
    for host, *_, listening in found:
        assert set(listening) <= {network.address(host)}


def test_no_secret_is_in_arguments_or_environment_variables(notebook: Notebook) -> None:
    check_secrets(notebook, 4 * 4)  # wrapper, srun, node agent and engine of each of four


def test_a_strategy_made_with_the_allocations_resolver_uses_its_machines(notebook: Notebook) -> None:
    notebook.run("slurm = distnb.MultiWorkerMirroredStrategy(distnb.cluster_resolver.SlurmClusterResolver())")
    notebook.run("""%%distribute slurm
def make(context):
    global pipelines
    pipelines = context.num_input_pipelines, context.input_pipeline_id
    return [torch.zeros(1)]
strategy.distribute_datasets_from_function(make)
""")
    assert notebook.value("strategy.local_results(pipelines)") == ((2, 0), (2, 0), (2, 1), (2, 1))


@pytest.mark.soak  # test_hosts.py tests it, too
def test_an_allocation_is_resized(notebook: Notebook) -> None:
    check_resize(notebook, ["blue", "blue", "red", "red"])
    processes.OF_MODULE.update(steps())


def test_a_step_ended_by_scancel_is_reported(environment: dict[str, str], notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%distnb restart --missing", timeout_s=150)
    processes.OF_MODULE.update(steps())
    agent = psutil.Process(notebook.value("cluster.status()[3].pid")).parent()
    assert agent is not None
    goes = tmp_path / "goes"
    cell = notebook.start(f"""%%distribute mirrored
import torch.distributed as dist
while True:
    dist.all_reduce(torch.ones(1))
    open({str(goes)!r}, "w").close()
""")
    processes.wait_until(goes.exists, 60, "the cell does not begin")
    step = f"{environment['SLURM_JOB_ID']}.{agent.environ()['SLURM_STEP_ID']}"
    subprocess.run([needs("scancel"), step], env=environment, check=True, timeout=30)
    ended = notebook.finish(cell, timeout_s=40)
    assert ended.error_name in ("EngineDied", "CollectiveError"), ended.traceback
    notebook.run("%%distribute mirrored\nleft = strategy.num_replicas_in_sync", timeout_s=40)
    assert notebook.value("left") == 2
    for state in notebook.value("[row.state for row in cluster.status() if row.host == 'red']"):
        assert state.startswith("(on red) was killed by SIG")
        assert f"Slurm says: STEP {step} ON red CANCELLED" in state


def test_stop_leaves_no_process_on_any_node(notebook: Notebook) -> None:
    check_stop(notebook)


@pytest.mark.soak  # test_hosts.py tests them; only the placement of tasks differs
def test_roles_are_assigned_to_nodes(notebook: Notebook) -> None:
    """Use a resolver's roles: the allocation has two tasks on each node."""
    start = (
        "roles = distnb.cluster_resolver.SlurmClusterResolver({'worker': 3, 'ps': 1})\n%distnb start --resolver roles"
    )
    placed = {"worker 0": "blue", "worker 1": "blue", "worker 2": "red", "ps 0": "red"}
    check_roles(notebook, start, placed, ["blue", "blue", "red"])


def test_a_failing_srun_is_an_error(notebook: Notebook) -> None:
    failed = notebook.try_run("distnb.start(on=distnb.Slurm(['red'], arguments=['--no-such-option']))")
    assert failed.error_name == "StartError"
    assert "srun cannot start a process on red" in failed.error_text
    assert "unrecognized option '--no-such-option'" in failed.error_text


def test_the_end_of_the_notebook_ends_all_engines(notebook: Notebook) -> None:
    """End a notebook whose cluster a resolver named."""
    notebook.run("%distnb start --resolver slurm --per-host 1", timeout_s=120)
    assert notebook.value("[row.host for row in distnb.notebook.compose.current().status()]") == ["blue", "red"]
    # srun (two processes), machine agent with its guardian, template, engine, and the notebook's guardian.
    processes.wait_until(lambda: len(left()) == 2 * 6 + 1, 20)
    os.kill(notebook.pid, signal.SIGKILL)
    processes.wait_until(lambda: not left() and not processes.run_directories(), 20, "something is left")
