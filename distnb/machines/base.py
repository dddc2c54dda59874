"""The launcher of engines on other machines, over any `Transport`.

ipyparallel starts an engine in the background of the other machine and polls whether it still runs. Here, a process of
this machine, such as ssh, stays connected to the engine's node agent:

    notebook ── stdin/stdout ──▶ ssh ── network ──▶ node agent ──▶ engine
                                 (here)             (there)

For the cluster, that local process represents the engine. The launcher releases the engine by a line on the process's
standard input, and detects the process's end at once. Secrets are also sent on standard input. They are never in an
argument or a variable on any machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.local.launcher import LOST_AFTER_S, EngineEnded, EngineOrder, Launched, Launcher
from distnb.cluster.local.orphans import end_group
from distnb.cluster.local.processes import Processes, describe_status
from distnb.cluster.process_environment import PYTHON_MODULE, forwarded_environment, hash_seed, import_environment
from distnb.errors import StartError
from distnb.machines.heartbeat import LOST
from distnb.machines.node_agent import BEAT, KILLED, STATUS, Assignment
from distnb.topology import Device

__all__ = ["NODE_AGENT", "Found", "Hosts", "Transport", "check_versions", "probe"]

NODE_AGENT = (*PYTHON_MODULE, "distnb.machines.node_agent")
"""The node agent's command, the same on every machine."""

_logger = logging.getLogger("distnb.machines")

_ENDING_S = 10.0
_OUTPUT_CHARS = 2000
_CHUNK = 1 << 16


class Transport(ABC):
    """A way to start node agents on other machines and to communicate with them."""

    def prepare(  # noqa: B027  (most transports need no preparation)
        self, hosts: Sequence[str], on_progress: Callable[[str], None]
    ) -> None:
        """Prepare for commands on these machines, before each start of engines there. May take long.

        Raises:
            StartError: A machine is not available.
        """

    def further_hosts(self, count: int) -> tuple[str, ...]:
        """Return the names of new hosts, one for each of several further engines.

        Return () if these engines run on the machines of the start.
        """
        return ()

    def release(self, host: str) -> None:  # noqa: B027  (most transports reserve nothing for an engine)
        """Release what was reserved on a host for its only engine, which has been removed."""

    def close(self) -> None:  # noqa: B027  (most transports have no resources)
        """Release the resources of the transport, after the engines have ended."""

    @abstractmethod
    def command(self, host: str, task: str) -> list[str]:
        """Return the command that runs a node agent on a machine.

        The agent performs a task ("serve" or "probe"). Its standard input and output are those of the command. No
        argument is secret.
        """

    def environment(self, directory: Path) -> Mapping[str, str]:
        """Return the environment of one command. `directory` is a directory for the files of all commands."""
        return os.environ

    patience_s = 90.0
    """The time within which a machine must answer a probe."""

    def machine(self, host: str) -> str:
        """Return the name of a host's machine. Several hosts may be on the same machine."""
        return host

    @abstractmethod
    def network_name(self, host: str) -> str:
        """Return the name or address of a machine on the network."""

    def cause(self, output: str) -> str:
        """Return the cause of an engine's end from the last output of its command; "" if the output has none."""
        return ""

    @abstractmethod
    def unreached(self, host: str, status: int) -> str:
        """Return the error for a machine where no node agent answered. `status` is the command's exit status."""


class Hosts(Launcher):
    """The launcher of engines on other machines.

    Args:
        hosts: The machine of each engine, by the transport's names.
        address: The address at which the notebook listens for the engines.
    """

    has_controller = False
    patience_s = 10.0

    def __init__(self, hosts: Sequence[str], connection: Connection, address: str, transport: Transport) -> None:
        self._hosts = dict(enumerate(hosts))
        # The notebook's pid is meaningless on other machines, and they cannot reach ipyparallel's controller.
        self._connection = dataclasses.replace(connection, notebook_pid=0, controller=False)
        self._address = address
        self._transport = transport
        self._links: dict[int, _AgentLink] = {}  # by the pid of the local process that is connected to a node agent

    def prepare(self, engines: Sequence[int], on_progress: Callable[[str], None]) -> None:
        """Prepare the machines of these engines."""
        self._transport.prepare(list(dict.fromkeys(self._hosts[engine] for engine in engines)), on_progress)

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start a node agent for each engine."""
        for order in orders:
            launched(order.engine, self._start_node_agent(order, processes, ended))

    def _start_node_agent(self, order: EngineOrder, processes: Processes, ended: EngineEnded) -> int:
        host = self._hosts[order.engine]
        machines = [*map(self._transport.machine, self._hosts.values())]
        sharing = machines.count(self._transport.machine(host))
        assignment = Assignment(
            connection=self._connection,
            notebook=self._address,
            engine=order.engine,
            device=str(order.device),
            engines=sharing,
            agent=order.agent,
            hash_seed=hash_seed(),
            variables=forwarded_environment(),
        )

        def link_ended(pid: int, words: str, expected: bool) -> None:
            words = self._links.pop(pid).close(words)
            try:
                cause = self._transport.cause(order.log.read_text(errors="replace")[-_OUTPUT_CHARS:])
            except OSError:
                cause = ""
            # If the transport reports a cause (scancel, a time limit), that explains the silence.
            how = f"(on {host}) {words or 'was ended'}"
            if not words and not cause:
                how = f"was lost: its machine {host} cannot be reached"
            _logger.info("node agent of engine %d on %s: %s", order.engine, host, how)
            ended(order.engine, pid, how + (f" ({cause})" if cause else ""), expected)

        with processes.changed, open(order.log, "ab") as log:
            process = processes.start(
                self._transport.command(host, "serve"),
                link_ended,
                env={**self._transport.environment(processes.directory), **import_environment()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
            link = self._links[process.pid] = _AgentLink(process, processes.loop)
        _logger.info("node agent of engine %d on %s is connected to process %d", order.engine, host, process.pid)
        link.send(assignment.encode())
        return process.pid

    def add(self, engine: int, device: Device, host: str) -> None:
        """Add an engine on a machine."""
        self._hosts[engine] = host

    def remove(self, engine: int) -> None:
        """Remove an engine, and release its host if the host was reserved for it."""
        self._transport.release(self._hosts.pop(engine))

    def releasing(self, pids: Sequence[int]) -> Callable[[], None] | None:
        """Return a function that asks the node agents to end their engines."""

        def release() -> None:
            for link in [self._links[pid] for pid in pids if pid in self._links]:
                link.send(b"end\n")

        return release

    def host(self, engine: int) -> str:
        """Return the machine's name from the start; "" if the engine was removed."""
        return self._hosts.get(engine, "")


class _AgentLink:
    """The connection to a node agent, through a process of this machine such as ssh.

    The node agent sends a heartbeat each second, and finally its exit status. The end of the local process would not
    suffice: srun and mpiexec detect the loss of the other machine late or never, and each reports an exit status in its
    own way.
    """

    def __init__(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._loop = process, loop
        self._stdin, self._stdout = process.stdin, process.stdout
        self._rest = b""
        self._status: int | None = None
        self._silence: asyncio.TimerHandle | None = None
        os.set_blocking(self._stdout.fileno(), False)
        loop.call_soon_threadsafe(self._begin)

    def send(self, words: bytes) -> None:
        with suppress(OSError, ValueError):  # the node agent has ended, and its log says why
            self._stdin.write(words)

    # -- in the watcher's thread -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._stdout.closed:  # the process may have ended already
            self._loop.add_reader(self._stdout, self._receive)

    def _receive(self) -> bool:
        """Read and handle the available lines. Return whether there may be more."""
        try:
            data = os.read(self._stdout.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._stdout)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            kind, _, number = line.partition(b" ")
            if kind == STATUS and number.isdigit():
                self._status = int(number)
            elif kind == BEAT:
                if self._silence is not None:
                    self._silence.cancel()
                self._silence = self._loop.call_later(LOST_AFTER_S, self._give_up)
        return True

    def _give_up(self) -> None:
        _logger.warning("no heartbeat arrived through process %d for %g s", self._process.pid, LOST_AFTER_S)
        if self._status is None:
            self._status = LOST
        _kill_tree(self._process)

    def close(self, words: str) -> str:
        """Close the connection after its local process has ended. Return the node agent's status; "" if it was lost.

        `words` is the status of the local process. The returned status is in words, too.
        """
        while self._receive():  # the last lines
            pass
        self._loop.remove_reader(self._stdout)
        self._stdin.close()
        self._stdout.close()
        has_beaten, status = self._silence is not None, self._status
        if self._silence is not None:
            self._silence.cancel()
        if status is None and self._process.returncode < 0:
            return words  # the local process was killed
        if status is None:
            # A manager such as Slurm ends a node agent by a signal (scancel). Then the machine is still reachable.
            status = self._process.returncode if has_beaten else LOST
            status = status if KILLED < status < KILLED + signal.NSIG else LOST
        if status == LOST:
            return ""
        return describe_status(KILLED - status if KILLED < status < KILLED + signal.NSIG else status)


def _kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process that is not reaped yet, and all of its descendants.

    Some descendants are in other process groups: mpiexec starts its ssh in a separate one.
    """
    with suppress(psutil.Error):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                descendant.kill()
    end_group(process.pid)


# -- before the start ------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The answer of a machine to a probe.

    Attributes:
        gpus: The number of its GPUs.
        capacity: The cores and the memory.
        packages: The versions of its installed packages (see `installed_packages`).
    """

    gpus: int
    capacity: Capacity
    packages: Mapping[str, str]


def probe(
    hosts: Sequence[str], transport: Transport, on_progress: Callable[[str], None] = lambda text: None
) -> dict[str, Found]:
    """Query the devices, the capacity and the packages of all machines at the same time.

    Raises:
        StartError: Some machines did not answer. The message names each of them.
    """
    asked: dict[str, subprocess.Popen[str]] = {}
    directory = Path(tempfile.mkdtemp(prefix="distnb-"))
    try:
        for host in hosts:
            asked[host] = _ask(host, transport, directory)
        deadline = time.monotonic() + transport.patience_s
        found: dict[str, Found] = {}
        failures: list[str] = []
        for place, (host, process) in enumerate(asked.items()):
            on_progress(f"waiting for {', '.join([*asked][place:])}")
            try:
                found[host] = _answer(host, process, deadline, transport)
                _logger.info("%s has %d GPUs and %s", host, *found[host][:2])
            except StartError as error:
                failures.append(str(error))
        if failures:
            raise StartError("\n".join(failures))
        return found
    finally:
        for process in asked.values():
            process.terminate()  # a transport passes the signal on to its children
        for process in asked.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
                continue
            _kill_tree(process)
            process.communicate()
        shutil.rmtree(directory, ignore_errors=True)


def _ask(host: str, transport: Transport, directory: Path) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            transport.command(host, "probe"),
            env={**transport.environment(directory), **import_environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{transport.unreached(host, LOST)} The command cannot be started: {error}.") from error


def _answer(host: str, process: subprocess.Popen[str], deadline: float, transport: Transport) -> Found:
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise StartError(
            f"{host} did not answer within {transport.patience_s:.0f} s. Is it up, and reachable from here?"
        ) from None
    # The answer may be between lines that the remote shell prints at its start.
    found = next((line for line in out.splitlines() if line.startswith("{")), None)
    if found is not None:
        return _checked(host, json.loads(found))
    said = "\n".join(f"    {line}" for line in err.strip().splitlines()[-5:]) or "    (nothing)"
    raise StartError(f"{transport.unreached(host, process.returncode)} Its output:\n{said}")


def _checked(host: str, found: Mapping[str, Any]) -> Found:
    check_versions(host, found)
    return Found(gpus=int(found["gpus"]), capacity=Capacity(**found["capacity"]), packages=found["packages"])


def check_versions(host: str, found: Mapping[str, Any]) -> None:
    """Raise StartError if a machine has another version of distnb or Python than this one."""
    theirs, ours = str(found["python"]).rpartition(".")[0], platform.python_version().rpartition(".")[0]
    if found["distnb"] != __version__ or theirs != ours:
        raise StartError(
            f"{host} has distnb {found['distnb']} on Python {found['python']}, but this is distnb {__version__} on "
            f"Python {platform.python_version()}. Functions are sent between them: install the same versions."
        )
