"""`python -m distnb.cluster.local.controller PID …`: ipyparallel's controller, which ends with the notebook."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distnb.cluster.local.orphans import die_with
from distnb.cluster.local.processes import Processes
from distnb.cluster.process_environment import PYTHON_MODULE, import_environment
from distnb.errors import StartError
from distnb.process_log import log_environment, open_log

__all__ = ["main", "start_controller"]

_START_TIMEOUT_S = 60.0
_POLL_S = 0.05


def start_controller(processes: Processes) -> None:
    """Start ipyparallel's controller, and wait until it has written the file for clients.

    It starts a process for its heart monitor, and threads for its schedulers.

    The controller listens on UNIX sockets in the run directory, so no other process can take one of its ports first. To
    connect, a client needs the CURVE key from the controller's connection files, which only this user can read.
    """
    directory, log_path = processes.directory, processes.directory / "log" / "controller.log"
    command = (
        *(*PYTHON_MODULE, "distnb.cluster.local.controller", str(os.getpid())),
        f"--profile-dir={directory}",
        "--transport=ipc",
        f"--ip={directory}/ipp",
        "--ports=1-40",  # names of sockets
        "--location=127.0.0.1",
        "--usethreads",
        "--ping=1000",
        "--log-level=WARN",
        "--IPController.auto_create=False",  # it must not create the directory again after its removal
        "--IPController.enable_curve=True",
    )
    with open(log_path, "ab") as log:
        controller = processes.start(
            command,
            lambda pid, status, expected: None,
            env={**os.environ, **import_environment(), **log_environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ).pid
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not (directory / "security" / "ipcontroller-client.json").exists():
        if processes.has_ended(controller) or time.monotonic() > deadline:
            processes.kill([controller])
            raise StartError(f"ipyparallel's controller did not start. Its log:\n{log_path.read_text()}")
        time.sleep(_POLL_S)


def main(notebook_pid: int, arguments: list[str]) -> None:
    """Run the controller with ipyparallel's own command line, until it is terminated or the notebook ends."""
    os.umask(0o077)  # the connection files contain the key
    die_with(notebook_pid)
    open_log(Path(arguments[0].partition("=")[2]), "controller")
    # Only ipyparallel runs in this process. With another start method, Python 3.14 would start two more processes
    # for its heart monitor, and leave a temporary folder behind when this process is killed.
    multiprocessing.set_start_method("fork")
    from ipyparallel.controller.app import IPController

    class Controller(IPController):  # type: ignore[misc]
        def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
            """Write the file atomically, because clients read it as soon as it exists."""
            path = Path(self.profile_dir.security_dir, fname)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(cdict, indent=2))
            part.replace(path)

        def construct_url(self, kind: str, channel: str, index: object = None) -> str:
            """Return the URL of a UNIX socket: ipyparallel binds `path-number`, but its clients use `path:number`."""
            path, _, number = super().construct_url(kind, channel, index).rpartition("-")
            return f"{path}:{number}"

    Controller.launch_instance(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
