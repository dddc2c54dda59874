"""Engines on other machines, whatever carries the words between: see `Transport`.

ipyparallel starts an engine in the background of the other machine, and asks from time to time whether it still runs.
Here a process of this machine stays connected with the engine's keeper: it is the engine to this machine, its standard
input is how the engine is let go, and its end tells at once. What is secret goes over it too, never into an argument or
a variable of any machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from ipyparallel.cluster.launcher import LocalEngineLauncher

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.launcher import EngineEnded, EngineOrder, Launched, Launcher
from distnb.cluster.local.capacity import Capacity, check_capacity, crowding
from distnb.cluster.local.ipyparallel_launchers import Watched
from distnb.cluster.local.orphans import end_group
from distnb.cluster.local.processes import Processes, Reaped, describe_status
from distnb.cluster.local.watcher import REPORT_PIPE, Watcher
from distnb.cluster.process_environment import hash_seed, import_environment
from distnb.cluster.remote.calling import LOST
from distnb.cluster.remote.node_agent import KILLED, Assignment
from distnb.errors import DistnbError, StartError
from distnb.topology import Device

__all__ = [
    "BEARER",
    "KEEPER",
    "CommandNodeAgentLauncher",
    "Hosts",
    "NodeAgentLauncher",
    "Transport",
    "plan_hosts",
    "probe",
]

KEEPER = (sys.executable, "-P", "-m", "distnb.cluster.remote.node_agent")
"""The keeper's command, the same on every machine."""

BEARER = (sys.executable, "-P", "-m", "distnb.cluster.remote.wrapper")
"""The command that bears another, which starts a keeper."""

_PROBE_TIMEOUT_S = 90.0
_ENDING_S = 10.0
_SAID_CHARS = 2000


class NodeAgentLauncher(Watched):
    """Starts the process that is connected with one engine's keeper; before a launcher of ipyparallel's."""

    told = b""
    inherited: Mapping[str, str] = os.environ
    _input: IO[bytes]

    def start(self) -> None:
        """Start it and tell the keeper what to do."""
        reports = os.path.join(self.profile_dir, REPORT_PIPE)
        with open(self.output_file, "ab") as log, open(reports, "wb", buffering=0) as ready:
            started = self._popen_process = subprocess.Popen(
                self.args,
                env={**self.inherited, **import_environment()},
                stdin=subprocess.PIPE,
                stdout=ready,
                stderr=log,
                start_new_session=True,
            )
        self.pid = started.pid
        self.notify_start(self.pid)
        assert started.stdin is not None
        self._input = started.stdin
        try:
            self._input.write(self.told)
            self._input.flush()
        except BrokenPipeError:
            pass  # it has ended already, and its log says why
        self._start_waiting()

    def let_go(self) -> None:
        """Tell the keeper that its engine is not wanted any more."""
        with suppress(OSError, ValueError):  # it may have ended
            self._input.write(b"end\n")
            self._input.close()

    def _end(self, status: int | None) -> None:
        with suppress(OSError):
            self._input.close()
        super()._end(status)


class CommandNodeAgentLauncher(NodeAgentLauncher, LocalEngineLauncher):  # type: ignore[misc]
    """Starts a keeper by `engine_cmd` as it is: ipyparallel would add what its own engines are told."""

    def find_args(self) -> list[str]:
        """The command line: no word of it is secret."""
        return list(self.engine_cmd)


class Transport(ABC):
    """How keepers on other machines are started, and talked to."""

    @abstractmethod
    def launcher(self, host: str, **settings: Any) -> NodeAgentLauncher:
        """A launcher of a keeper on a machine; its `told` is the keeper's standard input.

        Args:
            settings: As ipyparallel's launchers take them.
        """

    @abstractmethod
    def probing(self, host: str) -> list[str]:
        """The command that prints what a machine's keeper answers to `probe`."""

    def environment(self, directory: Path | None = None) -> Mapping[str, str]:
        """The environment of the commands, but for what lets them import this distnb.

        Args:
            directory: Where they may leave files; None for nowhere.
        """
        return os.environ

    @abstractmethod
    def network_name(self, host: str) -> str:
        """The name or address by which the network knows a machine."""

    def cause(self, said: str) -> str:
        """Why an engine ended, if the end of what its command said tells; else ""."""
        return ""

    @abstractmethod
    def unreached(self, host: str) -> str:
        """What is told of a machine to which no connection is made; what was said follows."""


class Hosts(Launcher):
    """Engines on other machines.

    Args:
        hosts: The machine of each engine, as the way names it.
        connection: How engines reach the notebook.
        address: The address at which they do.
        way: How the machines are reached.
    """

    has_controller = False
    patience_s = 10.0

    def __init__(self, hosts: Sequence[str], connection: Connection, address: str, way: Transport) -> None:
        self._hosts = tuple(hosts)
        # Shared memory and the notebook's pid mean nothing there, and ipyparallel's controller stays on loopback.
        self._connection = dataclasses.replace(
            connection, notebook_pid=0, listener_name="", listener_token="", controller=False
        )
        self._address = address
        self._way = way
        self._launchers: dict[int, NodeAgentLauncher] = {}
        self._logs: dict[int, Path] = {}

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start a keeper for each engine."""
        for order in orders:
            pid = processes.launch(partial(self._start_keeper, order), partial(ended, order.engine))
            launched(order.engine, pid)

    def _start_keeper(self, order: EngineOrder, watcher: Watcher, ended: Reaped) -> int:
        host = self._hosts[order.engine]
        assignment = Assignment(
            self._connection,
            self._address,
            order.engine,
            str(order.device),
            self._hosts.count(host),
            order.agent,
            order.replaces,
            {"PYTHONHASHSEED": hash_seed()},
        )
        launcher = self._way.launcher(
            host, identifier=str(order.engine), output_file=str(order.log), profile_dir=str(order.directory)
        )
        launcher.inherited = self._way.environment(order.directory)
        launcher.told, launcher.watcher, launcher.ended = assignment.encode(), watcher, ended
        launcher.start()
        self._launchers[launcher.pid] = launcher
        self._logs[order.engine] = order.log
        return int(launcher.pid)

    def letting_go(self, pids: Sequence[int]) -> Callable[[], None] | None:
        """Tell the keepers that their engines are not wanted any more."""

        def let_go() -> None:
            for pid in pids:
                if pid in self._launchers:
                    self._launchers.pop(pid).let_go()

        return let_go

    def host(self, engine: int) -> str:
        """The machine, as it was named at the start."""
        return self._hosts[engine]

    def describe(self, engine: int, status: int | None, words: str) -> str:
        """How it ended, and where."""
        host = self._hosts[engine]
        if status == LOST:
            return f"was lost: its machine {host} cannot be reached any more"
        if status is not None and KILLED < status < KILLED + signal.NSIG:
            words = describe_status(KILLED - status)
        cause = self._way.cause(self._said(engine))
        return f"(on {host}) {words}" + (f" ({cause})" if cause else "")

    def _said(self, engine: int) -> str:
        try:
            return self._logs[engine].read_text(errors="replace")[-_SAID_CHARS:]
        except (KeyError, OSError):
            return ""

    def lost_with(self, engine: int, status: int | None) -> tuple[int, ...]:
        """The others on its machine, when that is not reached any more: their processes here end a moment later."""
        if status != LOST:
            return ()
        host = self._hosts[engine]
        return tuple(other for other, where in enumerate(self._hosts) if where == host and other != engine)


# -- before the start ------------------------------------------------------------------------------------------------


def probe(hosts: Sequence[str], way: Transport) -> dict[str, tuple[int, Capacity]]:
    """Ask each machine, all at once, how many GPUs it has, and how many engines it takes.

    Raises:
        StartError: One cannot be reached, or has not what engines need.
    """
    asked: dict[str, subprocess.Popen[str]] = {}
    try:
        for host in hosts:
            asked[host] = subprocess.Popen(
                way.probing(host),
                env={**way.environment(), **import_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        return {host: _answer(host, process, deadline, way) for host, process in asked.items()}
    finally:
        for process in asked.values():
            process.terminate()  # it ends what it has started
        for process in asked.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
                continue
            end_group(process.pid)
            process.communicate()


def _answer(host: str, process: subprocess.Popen[str], deadline: float, way: Transport) -> tuple[int, Capacity]:
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise StartError(f"{host} did not answer within {_PROBE_TIMEOUT_S:.0f} s.") from None
    # The last line: what a shell of theirs prints at its start comes before.
    last = out.strip().rpartition("\n")[2]
    if process.returncode == 0 and last.startswith("{"):
        return _checked(host, json.loads(last))
    said = "\n".join(f"    {line}" for line in err.strip().splitlines()[-5:]) or "    (nothing)"
    if process.returncode == LOST:
        raise StartError(f"{way.unreached(host)} It says:\n{said}")
    raise StartError(
        f"{host} has no distnb {__version__} at {sys.executable}: engines need the same Python environment at the "
        f"same path on every machine, from a shared file system or the same image. It says:\n{said}"
    )


def _checked(host: str, found: Mapping[str, Any]) -> tuple[int, Capacity]:
    theirs, ours = str(found["python"]).rpartition(".")[0], platform.python_version().rpartition(".")[0]
    if found["distnb"] != __version__ or theirs != ours:
        raise StartError(
            f"{host} has distnb {found['distnb']} on Python {found['python']}, and this is distnb {__version__} on "
            f"Python {platform.python_version()}. Functions travel between them: make them the same."
        )
    return int(found["gpus"]), Capacity(**found["capacity"])


def plan_hosts(
    names: Sequence[str],
    way: Transport,
    per_host: int | Mapping[str, int] | None,
    devices: str | Sequence[str | Device] | None,
    *,
    oversubscribe: bool,
    without_gpus: Mapping[str, int] | None = None,
) -> tuple[tuple[str, ...], tuple[Device, ...], tuple[str, ...]]:
    """The machine and the device of each engine, in order, and what the user should know of that.

    The same devices are asked of every machine.

    Args:
        names: The machines.
        way: How they are reached.
        per_host: How many engines each gets; None for one per GPU.
        devices, oversubscribe: As `plan_devices` and `check_capacity` take them.
        without_gpus: How many engines a machine gets that has no GPUs, where neither `per_host` nor `devices` says.

    Raises:
        OptionError: The numbers or names make no sense.
        StartError: A machine cannot be reached, or does not have what was asked for.
    """
    hosts: list[str] = []
    planned: list[Device] = []
    notices: list[str] = []
    for host, (gpus, capacity) in probe(names, way).items():
        count = per_host.get(host) if isinstance(per_host, Mapping) else per_host
        if count is None and devices is None and not gpus:
            count = (without_gpus or {}).get(host)
        try:
            there = plan_devices(count, devices, oversubscribe=oversubscribe, gpus=gpus)
            check_capacity(len(there), capacity, oversubscribe=oversubscribe)
        except DistnbError as error:
            raise type(error)(f"{host}: {error}") from None
        hosts += [host] * len(there)
        planned += there
        notices += filter(None, [crowding(len(there), capacity, host)])
    return tuple(hosts), tuple(planned), tuple(notices)
