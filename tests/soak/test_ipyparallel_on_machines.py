"""Engines next to those of an ipyparallel cluster on other machines, which are network namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import pytest

from tests.support import processes
from tests.support.kernel import Notebook, lines_of_each
from tests.support.machines import Machines, machines

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(170)]

_SUM = """%%distribute mirrored
import socket
import torch
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(total.item(), socket.gethostname())"""
_STATES = "[row.state for row in distnb.notebook.compose.require().status()]"


@contextlib.contextmanager
def ipyparallel_on(made: Machines, folder: Path) -> Iterator[Path]:
    """Run a controller on this machine, and an engine on each of the others. Provide the clients' connection file."""
    profile = f"--profile-dir={folder}"
    modules = [["controller", f"--ip={made.own}", f"--location={made.own}"]]
    modules += [["engine"] for _ in made.names]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, (module, *arguments) in enumerate(modules):
            command = [sys.executable, "-m", f"ipyparallel.{module}", profile, "--log-level=ERROR", *arguments]
            if number:
                script = f"hostname {made.names[number - 1]}; exec {' '.join(command)}"
                namespace = f"{made.mark}{number - 1}"
                command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", script]
            started.append(subprocess.Popen(command))
            if not number:
                file = folder / "security" / "ipcontroller-client.json"
                processes.wait_until(file.exists, 30.0)
        with ipyparallel.Client(str(file)) as client:
            client.wait_for_engines(len(made.names), timeout=60)
        yield file
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def test_a_machine_that_is_cut_off_is_lost() -> None:
    with tempfile.TemporaryDirectory() as name, machines(Path(name), "north", "south") as made:
        folder = Path(name, "profile")
        folder.mkdir()
        with ipyparallel_on(made, folder) as file, Notebook() as notebook:
            notebook.run("import distnb, distnb.notebook.compose")
            notebook.run(f"%distnb start --ipyparallel {file}", timeout_s=90)
            shown = [line for lines in lines_of_each(notebook.run(_SUM).stdout) for line in lines]
            assert sorted(shown) == ["2.0 north", "2.0 south"]
            rows = "[(row.host, row.pid) for row in distnb.notebook.compose.require().status()]"
            (engine, pid), *_ = [(n, pid) for n, (host, pid) in enumerate(notebook.value(rows)) if host == "south"]
            made.cut("south")
            processes.wait_until(lambda: notebook.value(_STATES)[engine].startswith("was lost"), 30.0)
            processes.ends(pid, 30.0)
            processes.wait_until(lambda: len(_servers()) == 1, 30.0, f"left: {_servers()}")
            notebook.run("%distnb stop")
            processes.wait_until(lambda: not _servers(), 10.0, f"left: {_servers()}")


def _servers() -> list[str]:
    """Return the servers next to ipyparallel's engines."""
    commands = []
    for process in processes.children_of_this_run().values():
        with contextlib.suppress(Exception):
            commands.append(" ".join(process.cmdline()))
    return [command for command in commands if command.endswith("distnb.machines.transports.ipyparallel_engine")]


if os.geteuid() != 0:
    pytestmark.append(pytest.mark.skip(reason="making network namespaces needs root"))
