"""Engines on other machines, whatever reaches these: see `Transport`.

ipyparallel starts an engine in the background of the other machine, and asks from time to time whether it still runs.
Here a process of this machine stays connected with the engine's node agent. To this machine it is the engine: its
standard input lets the engine go, and its end tells at once. What is secret goes over it too, never into an argument
or a variable of any machine.
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
from pathlib import Path
from typing import IO, Any

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.launcher import EngineEnded, EngineOrder, Launched, Launcher
from distnb.cluster.local.capacity import Capacity, check_capacity
from distnb.cluster.local.orphans import end_group
from distnb.cluster.local.processes import REPORT_PIPE, Processes, describe_status
from distnb.cluster.process_environment import PYTHON_MODULE, hash_seed, import_environment
from distnb.cluster.remote.heartbeat import LOST
from distnb.cluster.remote.node_agent import KILLED, Assignment
from distnb.errors import DistnbError, StartError
from distnb.topology import Device

__all__ = ["NODE_AGENT", "WRAPPER", "Hosts", "Transport", "plan_hosts", "probe"]

NODE_AGENT = (*PYTHON_MODULE, "distnb.cluster.remote.node_agent")
"""The node agent's command, the same on every machine."""

WRAPPER = (*PYTHON_MODULE, "distnb.cluster.remote.wrapper")
"""The command that stands before another, which starts a node agent."""

_PROBE_TIMEOUT_S = 90.0
_ENDING_S = 10.0
_SAID_CHARS = 2000


class Transport(ABC):
    """How node agents on other machines are started, and talked to."""

    @abstractmethod
    def command(self, host: str, task: str) -> list[str]:
        """The command that runs a node agent on a machine for a task ("serve" or "probe"), connected with its standard
        input and output; no word of it is secret."""

    def environment(self, directory: Path | None = None) -> Mapping[str, str]:
        """The environment of the commands, but for what lets them import this distnb; `directory`: for their files."""
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
        hosts: The machine of each engine, as the transport names it.
        address: The address at which the notebook listens for them.
    """

    has_controller = False
    patience_s = 10.0

    def __init__(self, hosts: Sequence[str], connection: Connection, address: str, transport: Transport) -> None:
        self._hosts = tuple(hosts)
        # Shared memory and the notebook's pid mean nothing there, and ipyparallel's controller stays on loopback.
        self._connection = dataclasses.replace(
            connection, notebook_pid=0, listener_name="", listener_token="", controller=False
        )
        self._address = address
        self._transport = transport
        self._inputs: dict[int, IO[bytes]] = {}  # of each process that is connected with a node agent
        self._logs: dict[int, Path] = {}

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start a node agent for each engine."""
        for order in orders:
            launched(order.engine, self._start_node_agent(order, processes, ended))

    def _start_node_agent(self, order: EngineOrder, processes: Processes, ended: EngineEnded) -> int:
        host = self._hosts[order.engine]
        sharing = self._hosts.count(host)
        assignment = Assignment(
            self._connection, self._address, order.engine, str(order.device), sharing, order.agent, hash_seed()
        )
        self._logs[order.engine] = order.log

        def told(pid: int, words: str, expected: bool) -> None:
            with suppress(KeyError, OSError):
                self._inputs.pop(pid).close()
            ended(order.engine, pid, words, expected)

        with open(order.log, "ab") as log, open(processes.directory / REPORT_PIPE, "wb", buffering=0) as ready:
            process = processes.start(
                self._transport.command(host, "serve"),
                told,
                env={**self._transport.environment(processes.directory), **import_environment()},
                stdin=subprocess.PIPE,
                stdout=ready,
                stderr=log,
            )
        assert process.stdin is not None
        self._inputs[process.pid] = process.stdin
        with suppress(BrokenPipeError):  # it has ended already, and its log says why
            process.stdin.write(assignment.encode())
            process.stdin.flush()
        return process.pid

    def letting_go(self, pids: Sequence[int]) -> Callable[[], None] | None:
        """Tell the node agents that their engines are not wanted any more."""

        def let_go() -> None:
            for pid in pids:
                with suppress(KeyError, OSError, ValueError), self._inputs.pop(pid) as agent:  # it may have ended
                    agent.write(b"end\n")

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
        cause = self._transport.cause(self._said(engine))
        return f"(on {host}) {words}" + (f" ({cause})" if cause else "")

    def _said(self, engine: int) -> str:
        try:
            return self._logs[engine].read_text(errors="replace")[-_SAID_CHARS:]
        except (KeyError, OSError):
            return ""


# -- before the start ------------------------------------------------------------------------------------------------


def probe(hosts: Sequence[str], transport: Transport) -> dict[str, tuple[int, Capacity]]:
    """Ask each machine, all at once, how many GPUs it has, and how many engines it takes."""
    asked: dict[str, subprocess.Popen[str]] = {}
    try:
        for host in hosts:
            asked[host] = subprocess.Popen(
                transport.command(host, "probe"),
                env={**transport.environment(), **import_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        return {host: _answer(host, process, deadline, transport) for host, process in asked.items()}
    finally:
        for process in asked.values():
            process.terminate()  # it ends what it has started
        for process in asked.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
                continue
            end_group(process.pid)
            process.communicate()


def _answer(host: str, process: subprocess.Popen[str], deadline: float, transport: Transport) -> tuple[int, Capacity]:
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
        raise StartError(f"{transport.unreached(host)} It says:\n{said}")
    raise StartError(
        f"{host} has no distnb {__version__} at {sys.executable}: engines need the same Python environment at the "
        f"same path on every machine, from a shared file system or the same image. It says:\n{said}"
    )


def _checked(host: str, found: Mapping[str, Any]) -> tuple[int, Capacity]:
    theirs, ours = str(found["python"]).rpartition(".")[0], platform.python_version().rpartition(".")[0]
    if found["distnb"] != __version__ or theirs != ours:
        raise StartError(
            f"{host} has distnb {found['distnb']} on Python {found['python']}, and this is distnb {__version__} on "
            f"Python {platform.python_version()}. Functions are sent between them: make them the same."
        )
    return int(found["gpus"]), Capacity(**found["capacity"])


def plan_hosts(
    names: Sequence[str],
    transport: Transport,
    per_host: int | Mapping[str, int] | None,
    devices: str | Sequence[str | Device] | None,
    *,
    oversubscribe: bool,
    without_gpus: Mapping[str, int] | None = None,
) -> tuple[tuple[str, ...], tuple[Device, ...], tuple[str, ...]]:
    """The machine and the device of each engine, in order, and what the user should know of that.

    Args:
        per_host: How many engines each machine gets; None for one per GPU.
        devices, oversubscribe: As `plan_devices` and `check_capacity` take them, of every machine.
        without_gpus: How many engines a machine gets that has no GPUs, where neither `per_host` nor `devices` says.

    Raises:
        OptionError: The numbers or names make no sense.
        StartError: A machine cannot be reached, or does not have what was asked for.
    """
    hosts: list[str] = []
    planned: list[Device] = []
    notices: list[str] = []
    for host, (gpus, capacity) in probe(names, transport).items():
        count = per_host.get(host) if isinstance(per_host, Mapping) else per_host
        if count is None and devices is None and not gpus:
            count = (without_gpus or {}).get(host)
        try:
            there = plan_devices(count, devices, oversubscribe=oversubscribe, gpus=gpus)
            notices += check_capacity(len(there), capacity, host, oversubscribe=oversubscribe)
        except DistnbError as error:
            raise type(error)(f"{host}: {error}") from None
        hosts += [host] * len(there)
        planned += there
    return tuple(hosts), tuple(planned), tuple(notices)
