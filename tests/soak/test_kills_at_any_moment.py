"""A notebook, a transport, a machine agent or an engine killed at any moment of a start, a resize or a stop."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import psutil
import pytest

from tests.conftest import needs
from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import machines
from tests.support.ray_cluster import CPUS, RayCluster
from tests.support.remote_engines import left
from tests.support.slurm import allocation

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800), pytest.mark.soak]

_GONE_WITHIN_S = 10.0
_ROUNDS = {"start": 10, "resize": 5, "stop": 5}  # 20 moments for each victim
_TAKES_S = {"start": 6.0, "resize": 3.0, "stop": 2.0}
_CELL = "%%distribute mirrored\nimport torch.distributed as dist\ndist.barrier()"
_COMMANDS = {"ssh": "ssh", "mpi": "mpiexec", "slurm": "srun"}


@dataclass(frozen=True)
class _Way:
    """A way to start four engines.

    Attributes:
        start: The line that starts them.
        command: The program that is connected to each machine, or its module; "" for this machine.
        is_free: Returns whether the machines' manager has all of its resources again.
    """

    start: str
    command: str = ""
    env: dict[str, str] = field(default_factory=dict)
    is_free: Callable[[], bool] = lambda: True


@pytest.fixture(scope="module", params=["local", "ssh", "mpi", "slurm", "ray"])
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Way]:
    if request.param == "local":
        yield _Way("%distnb start -n 4 --oversubscribe")
        return
    if request.param == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
        cluster = RayCluster()
        start = f"%distnb start --ray {cluster.address} -n 4 --cpus-per-engine 0.5"
        yield _Way(start, "distnb.machines.server_client", is_free=lambda: cluster.do("free") == CPUS)
        cluster.close()
        return
    command = _COMMANDS[request.param]
    needs(command)
    with ExitStack() as stack:
        network = stack.enter_context(machines(tmp_path_factory.mktemp("machines"), "blue", "red"))
        words = " ".join(network.ssh_args)
        if request.param == "ssh":
            yield _Way(f'%distnb start --hosts blue,red --per-host 2 --ssh-args "{words}"', command)
        elif request.param == "mpi":
            env = {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_plm_rsh_agent": f"ssh {words}",
                "HYDRA_LAUNCHER_EXTRA_ARGS": words,
                "HYDRA_IFACE": f"{network.mark}b",
            }
            hosts = ",".join(network.address(name) for name in network.names)
            yield _Way(f"%distnb start --launcher mpi --hosts {hosts} --per-host 2", command, env)
        else:
            made = allocation(network, tmp_path_factory.mktemp("slurm"), "--ntasks-per-node=3")
            yield _Way("%distnb start --launcher slurm --per-host 2", command, stack.enter_context(made))


def _victims(kind: str, way: _Way) -> list[psutil.Process]:
    """Return the processes of a kind, the oldest first."""
    is_one: dict[str, Callable[[list[str]], bool]] = {
        "transport": lambda words: way.command in (os.path.basename(words[0]), words[3]),
        "agent": lambda words: words[1:4] == ["-P", "-m", "distnb.machines.agents.machine_agent"],
        "engine": lambda words: words[-2:] == ["-m", "distnb.engine"],
    }
    found = []
    for process in processes.children_of_this_run().values():
        with suppress(psutil.Error, IndexError):
            if is_one[kind](process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda each: each.pid)


@pytest.mark.parametrize("victim", ["notebook", "transport", "agent", "engine"])
@pytest.mark.parametrize("phase", _ROUNDS)
def test_nothing_is_left_and_what_lives_goes_on(real_processes: None, way: _Way, phase: str, victim: str) -> None:
    if not way.command and victim in ("transport", "agent"):
        pytest.skip("there is none on this machine")
    chance = random.Random(f"{phase} {victim}")
    cells = {"start": way.start, "stop": "%distnb stop"}
    for number in range(_ROUNDS[phase]):
        cell = cells.get(phase, f"%distnb resize {chance.choice([2, 5])}")
        with Notebook(env=way.env) as notebook:
            notebook.run("import torch; torch.set_num_threads(1)")
            if phase != "start":
                notebook.run(way.start, timeout_s=120)
            message = notebook.start(cell)
            time.sleep(_TAKES_S[phase] * (number + chance.random()) / _ROUNDS[phase])
            if victim == "notebook":
                os.kill(notebook.pid, signal.SIGKILL)
            else:
                if found := _victims(victim, way):
                    with suppress(psutil.NoSuchProcess):
                        chance.choice(found).kill()
                ended = notebook.finish(message, cell, timeout_s=120)
                assert ended.error_name in ("", "StartError", "EngineDied", "ClusterError"), ended.traceback
                if phase != "stop" and not ended.error_name:
                    # The news of a loss may take longer than the next line, and then end the next cell.
                    notebook.run("%distnb restart --missing", timeout_s=60)
                    if notebook.try_run(_CELL, timeout_s=60).error_name:
                        notebook.run("%distnb restart --missing", timeout_s=60)
                        notebook.run(_CELL, timeout_s=60)
                notebook.try_run("%distnb stop", timeout_s=60)
            processes.wait_until(
                lambda: not left() and not processes.run_directories() and way.is_free(),
                _GONE_WITHIN_S,
                "something is left",
            )
