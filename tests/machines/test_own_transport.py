"""A way to machines that another package adds, from the line of a start to the end of its engines."""

from __future__ import annotations

import os
import signal
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from distnb.errors import OptionError
from distnb.machines import start_line
from distnb.magics.commands import COMMANDS
from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.process_machines import ProcessMachines
from tests.support.remote_engines import left

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

_TOTAL = """%%distribute mirrored
import os, torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
own, agent = os.environ.get("OWN"), os.getppid()
"""


def test_a_package_adds_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("processes", "tests.support.process_machines:ProcessMachines", "distnb.launchers")
    monkeypatch.setattr(start_line, "entry_points", lambda group: EntryPoints([point]).select(group=group))
    read = lambda text: start_line.read_options(vars(COMMANDS["start"].read(text)), {})  # noqa: E731
    assert read('--launcher processes --hosts a,b:2 --launcher-args "X=1"') == ProcessMachines(
        "a,b:2", arguments=["X=1"]
    )
    with pytest.raises(
        OptionError, match="The launchers are local, ssh, slurm, mpi, server, ray, ipyparallel, processes"
    ):
        read("--launcher pbs --hosts a")
    with pytest.raises(OptionError, match=r"--launcher processes is for engines on other machines\. Name them, too"):
        read("--launcher processes")


def test_its_engines_compute_are_replaced_and_end() -> None:
    with Notebook() as notebook:
        notebook.run("import distnb, os, torch; torch.set_num_threads(1)\nfrom tests.support import process_machines")
        on = "process_machines.ProcessMachines('a:2,b:1', arguments=['OWN=1'])"
        notebook.run(f"cluster = distnb.start(on={on})", timeout_s=60)
        notebook.run(_TOTAL)
        assert notebook.value("total.item()") == 3.0
        assert notebook.value("own") == "1"
        agents = notebook.value("strategy.local_results(agent)")
        assert agents[0] == agents[1] != agents[2]
        os.kill(notebook.value("cluster.status()[1].pid"), signal.SIGKILL)
        processes.wait_until(lambda: notebook.value("cluster.status()[1].state").startswith("(on a) was killed"), 10)
        notebook.run("%distnb restart --missing", timeout_s=60)
        notebook.run(_TOTAL)
        assert notebook.value("(total.item(), strategy.local_results(agent))") == (3.0, agents)  # of the same agent
        os.kill(agents[2], signal.SIGKILL)
        processes.wait_until(lambda: "was killed" in notebook.value("cluster.status()[2].state"), 10)
        notebook.run("%distnb restart --missing", timeout_s=60)
        notebook.run(_TOTAL)
        again = notebook.value("strategy.local_results(agent)")
        assert again[:2] == agents[:2]
        assert again[2] != agents[2]
        notebook.run("%distnb stop")
        processes.wait_until(lambda: not left() and not processes.run_directories(), 10, "something is left")
