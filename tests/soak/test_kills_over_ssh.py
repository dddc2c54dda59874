"""A notebook, an ssh, a machine agent or an engine killed at any moment of a start, a resize or a stop over ssh."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.support import processes
from tests.support.kernel import Notebook
from tests.support.machines import Machines, machines
from tests.support.remote_engines import left

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800), pytest.mark.soak]

_ROUNDS = 20
_GONE_WITHIN_S = 10.0
_STARTED_S = 6.0  # about the time of a start, a resize and a stop
_VICTIMS = {
    "ssh": lambda words: words[:1] == ["ssh"],
    "agent": lambda words: "distnb.machines.agents.machine_agent" in words,
    "engine": lambda words: words[-2:] == ["-m", "distnb.engine"],
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), "red", "blue") as made:
        yield made


def _kill(victim: str, chance: random.Random) -> bool:
    """Kill a process of a kind. Return False if there is none now."""
    found = []
    for process in processes.children_of_this_run().values():
        with suppress(psutil.Error):
            if _VICTIMS[victim](process.cmdline()):
                found.append(process)
    if not found:
        return False
    with suppress(psutil.NoSuchProcess):
        chance.choice(sorted(found, key=lambda each: each.pid)).kill()
    return True


@pytest.mark.parametrize("victim", ["notebook", *_VICTIMS])
@pytest.mark.parametrize("phase", ["start", "resize", "stop"])
def test_nothing_is_left_and_what_lives_goes_on(network: Machines, phase: str, victim: str) -> None:
    chance = random.Random(f"{phase} {victim}")
    start = f'%distnb start --hosts red,blue --per-host 2 --ssh-args "{" ".join(network.ssh_args)}"'
    cells = {"start": start, "resize": f"%distnb resize {chance.choice([2, 6])}", "stop": "%distnb stop"}
    for _ in range(_ROUNDS // 4 if phase != "start" else _ROUNDS):
        with Notebook() as notebook:
            notebook.run("import torch; torch.set_num_threads(1)")
            if phase != "start":
                notebook.run(start, timeout_s=60)
            message = notebook.start(cells[phase])
            time.sleep(chance.uniform(0.0, _STARTED_S if phase == "start" else 2.0))
            if victim == "notebook":
                os.kill(notebook.pid, signal.SIGKILL)
            else:
                _kill(victim, chance)
                ended = notebook.finish(message, cells[phase], timeout_s=60)
                assert ended.error_name in ("", "StartError", "EngineDied", "ClusterError"), ended.traceback
                notebook.try_run("%%distribute mirrored\nimport torch\nok = 1", timeout_s=60)
                if phase != "stop" and not ended.error_name:
                    notebook.run("%distnb restart --missing", timeout_s=60)
                    notebook.run("%%distribute mirrored\ncount = strategy.num_replicas_in_sync", timeout_s=60)
                notebook.try_run("%distnb stop", timeout_s=60)
            processes.wait_until(
                lambda: not left() and not processes.run_directories(), _GONE_WITHIN_S, "something is left"
            )
