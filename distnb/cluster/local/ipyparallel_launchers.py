"""ipyparallel's launchers for one controller and one engine, watched by our watcher instead of a thread each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher, LocalProcessLauncher

from distnb.cluster.local.processes import Reaped
from distnb.cluster.local.watcher import Watcher
from distnb.cluster.process_environment import import_environment

__all__ = [
    "ControllerProcessLauncher",
    "EngineProcessLauncher",
    "Watched",
    "launch_controller",
    "launch_template",
]

# -P: a file of the user's, such as random.py beside the notebook, must not stand in for a module that we import.
_PYTHON = (sys.executable, "-P", "-m")


class Watched(LocalProcessLauncher):  # type: ignore[misc]
    """A launcher whose process is reaped by a `Watcher`, and whose log stays until the cluster's directory goes."""

    watcher: Watcher
    ended: Reaped

    def _start_waiting(self) -> None:
        self.watcher.watch(self.pid, self._end)

    def _end(self, status: int | None) -> None:
        if self._popen_process is not None:
            self._popen_process.returncode = status if status is not None else 0  # already reaped
        self.notify_stop({"exit_code": status, "pid": self.pid, "identifier": self.identifier})
        self.ended(self.pid, status)

    def _log_output(self, stop_data: object = None) -> None:
        """The log is read by whoever has to explain the end."""

    def _start_streaming(self) -> None:
        """Never: under a debugging log level every line of the log would be copied into the user's cell."""


class EngineProcessLauncher(Watched, LocalEngineLauncher):  # type: ignore[misc]
    """Starts the process from which engines are forked."""

    orders: socket.socket

    def start(self) -> None:
        """Start it, with a socket as its standard input."""
        with open(self.output_file, "ab") as log:
            started = self._popen_process = subprocess.Popen(
                self.args,
                env={**os.environ, **self.get_env()},
                cwd=self.work_dir,
                stdin=self.orders.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = started.pid
        self.notify_start(self.pid)
        self._start_waiting()


class ControllerProcessLauncher(Watched, LocalControllerLauncher):  # type: ignore[misc]
    """Starts ipyparallel's controller."""


def launch_template(
    orders: socket.socket, directory: Path, log: Path, environment: dict[str, str], watcher: Watcher, ended: Reaped
) -> int:
    """Start the process from which engines are forked, and return its pid. `ended` is called in the watcher's thread.

    Args:
        orders: Its standard input.
        log: Where it writes.
    """
    launcher = EngineProcessLauncher(
        engine_cmd=[*_PYTHON, "distnb.engine"],
        environment=environment,
        identifier="engines",
        output_file=str(log),
        profile_dir=str(directory),
        work_dir=os.getcwd(),
    )
    launcher.orders = orders
    return _start(launcher, watcher, ended)


def launch_controller(directory: Path, log: Path, watcher: Watcher, ended: Reaped) -> int:
    """Start the controller and return its pid. One process, with its heart monitor, serves all.

    It listens on UNIX sockets in the run directory, so that no other process can take a port of its meanwhile. They
    are closed to all who cannot read its connection files, which have the key (CURVE).
    """
    arguments = (
        f"--profile-dir={directory}",
        "--transport=ipc",
        f"--ip={directory}/ipp",
        "--ports=1-40",  # names of sockets
        "--location=127.0.0.1",
        "--usethreads",
        "--ping=1000",
        "--log-level=WARN",
        "--IPController.auto_create=False",  # a directory that was removed stays so
        "--IPController.enable_curve=True",
    )
    launcher = ControllerProcessLauncher(
        controller_cmd=[*_PYTHON, "distnb.cluster.local.controller", str(os.getpid())],
        controller_args=[*arguments],
        environment=import_environment(),
        identifier="controller",
        output_file=str(log),
        profile_dir=str(directory),
        work_dir=os.getcwd(),
    )
    return _start(launcher, watcher, ended)


def _start(launcher: Watched, watcher: Watcher, ended: Reaped) -> int:
    launcher.watcher, launcher.ended = watcher, ended
    launcher.start()
    return int(launcher.pid)
