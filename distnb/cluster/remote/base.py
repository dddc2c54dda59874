"""Engines on other machines, whatever reaches these: see `Transport`.

ipyparallel starts an engine in the background of the other machine, and asks from time to time whether it still runs.
Here a process of this machine stays connected with the engine's node agent. To this machine it is the engine: its
standard input lets the engine go, and its end tells at once. What is secret goes over it too, never into an argument
or a variable of any machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.local.launcher import EngineEnded, EngineOrder, Launched, Launcher
from distnb.cluster.local.orphans import end_group
from distnb.cluster.local.processes import Processes, describe_status
from distnb.cluster.process_environment import PYTHON_MODULE, hash_seed, import_environment
from distnb.cluster.remote.heartbeat import LOST, LOST_AFTER_S
from distnb.cluster.remote.node_agent import BEAT, KILLED, STATUS, Assignment
from distnb.errors import StartError

__all__ = ["NODE_AGENT", "Hosts", "Transport", "probe"]

NODE_AGENT = (*PYTHON_MODULE, "distnb.cluster.remote.node_agent")
"""The node agent's command, the same on every machine."""

_ENDING_S = 10.0
_SAID_CHARS = 2000
_CHUNK = 1 << 16


class Transport(ABC):
    """How node agents on other machines are started, and talked to."""

    @abstractmethod
    def command(self, host: str, task: str) -> list[str]:
        """The command that runs a node agent on a machine for a task ("serve" or "probe"), connected with its standard
        input and output; no word of it is secret."""

    def environment(self, directory: Path | None = None) -> Mapping[str, str]:
        """The environment of the commands, but for what lets them import this distnb; `directory`: for their files."""
        return os.environ

    patience_s = 90.0
    """How long a machine may take to answer the first question."""

    def machine(self, host: str) -> str:
        """What is equal for those hosts that are one machine."""
        return host

    @abstractmethod
    def network_name(self, host: str) -> str:
        """The name or address by which the network knows a machine."""

    def cause(self, said: str) -> str:
        """Why an engine ended, if the end of what its command said tells; else ""."""
        return ""

    @abstractmethod
    def unreached(self, host: str, status: int) -> str:
        """What is told of a machine where no node agent answered, by the command's exit status."""


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
        # The notebook's pid means nothing there, and ipyparallel's controller stays in its private directory.
        self._connection = dataclasses.replace(connection, notebook_pid=0, controller=False)
        self._address = address
        self._transport = transport
        self._lines: dict[int, _Line] = {}  # by the pid of the process that is connected with a node agent

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start a node agent for each engine."""
        for order in orders:
            launched(order.engine, self._start_node_agent(order, processes, ended))

    def _start_node_agent(self, order: EngineOrder, processes: Processes, ended: EngineEnded) -> int:
        host = self._hosts[order.engine]
        machines = [*map(self._transport.machine, self._hosts)]
        sharing = machines.count(machines[order.engine])
        assignment = Assignment(
            connection=self._connection,
            notebook=self._address,
            engine=order.engine,
            device=str(order.device),
            engines=sharing,
            agent=order.agent,
            hash_seed=hash_seed(),
        )

        def told(pid: int, words: str, expected: bool) -> None:
            words = self._lines.pop(pid).close(words)
            try:
                cause = self._transport.cause(order.log.read_text(errors="replace")[-_SAID_CHARS:])
            except OSError:
                cause = ""
            # A cause that the transport knows (scancel, a time limit) counts more than a silence that it explains.
            how = f"(on {host}) {words or 'was ended'}"
            if not words and not cause:
                how = f"was lost: its machine {host} cannot be reached any more"
            ended(order.engine, pid, how + (f" ({cause})" if cause else ""), expected)

        with processes.changed, open(order.log, "ab") as log:
            process = processes.start(
                self._transport.command(host, "serve"),
                told,
                env={**self._transport.environment(processes.directory), **import_environment()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
            line = self._lines[process.pid] = _Line(process, processes.loop)
        line.tell(assignment.encode())
        return process.pid

    def releasing(self, pids: Sequence[int]) -> Callable[[], None] | None:
        """Tell the node agents that their engines are not wanted any more."""

        def let_go() -> None:
            for line in [self._lines[pid] for pid in pids if pid in self._lines]:
                line.tell(b"end\n")

        return let_go

    def host(self, engine: int) -> str:
        """The machine, as it was named at the start."""
        return self._hosts[engine]


class _Line:
    """What is said by a node agent, and to it, over a process of this machine that stays connected with it.

    The node agent says each second that it is there, and at last how it ended. Programs such as srun and mpiexec find
    out late, or never, that the other machine is gone, and each tells in another form how its task ended.
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

    def tell(self, words: bytes) -> None:
        with suppress(OSError, ValueError):  # it has ended, and its log says why
            self._stdin.write(words)

    # -- in the watcher's thread -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._stdout.closed:  # it may have ended already
            self._loop.add_reader(self._stdout, self._hear)

    def _hear(self) -> bool:
        """Take what there is. Returns whether there may be more."""
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
        if self._status is None:
            self._status = LOST
        _end_with_all_below(self._process)

    def close(self, words: str) -> str:
        """The process has ended, as these words say. Returns how the node agent did; "" where it is lost."""
        while self._hear():  # the last words
            pass
        self._loop.remove_reader(self._stdout)
        self._stdin.close()
        self._stdout.close()
        heard, status = self._silence is not None, self._status
        if self._silence is not None:
            self._silence.cancel()
        if status is None and self._process.returncode < 0:
            return words  # what connects was killed here
        if status is None:
            # Whoever rules the machine, such as Slurm's scancel, ends a node agent by a signal: the machine is there.
            status = self._process.returncode if heard else LOST
            status = status if KILLED < status < KILLED + signal.NSIG else LOST
        if status == LOST:
            return ""
        return describe_status(KILLED - status if KILLED < status < KILLED + signal.NSIG else status)


def _end_with_all_below(process: subprocess.Popen[Any]) -> None:
    """Kill a process that is not reaped, and what it has started in groups of their own, as mpiexec does its ssh."""
    with suppress(psutil.Error):
        for below in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                below.kill()
    end_group(process.pid)


# -- before the start ------------------------------------------------------------------------------------------------


def probe(
    hosts: Sequence[str], transport: Transport, on_progress: Callable[[str], None] = lambda text: None
) -> dict[str, tuple[int, Capacity]]:
    """Ask each machine, all at once, how many GPUs it has, and how many engines it takes.

    Raises StartError that names every machine which did not answer.
    """
    asked: dict[str, subprocess.Popen[str]] = {}
    try:
        for host in hosts:
            try:
                asked[host] = subprocess.Popen(
                    transport.command(host, "probe"),
                    env={**transport.environment(), **import_environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"{transport.unreached(host, LOST)} It cannot be started: {error}.") from error
        deadline = time.monotonic() + transport.patience_s
        found: dict[str, tuple[int, Capacity]] = {}
        failures: list[str] = []
        for place, (host, process) in enumerate(asked.items()):
            on_progress(f"waiting for {', '.join([*asked][place:])}")
            try:
                found[host] = _answer(host, process, deadline, transport)
            except StartError as error:
                failures.append(str(error))
        if failures:
            raise StartError("\n".join(failures))
        return found
    finally:
        for process in asked.values():
            process.terminate()  # it ends what it has started
        for process in asked.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
                continue
            _end_with_all_below(process)
            process.communicate()


def _answer(host: str, process: subprocess.Popen[str], deadline: float, transport: Transport) -> tuple[int, Capacity]:
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise StartError(f"{host} did not answer within {transport.patience_s:.0f} s.") from None
    # Among what a shell of theirs prints at its start.
    found = next((line for line in out.splitlines() if line.startswith("{")), None)
    if found is not None:
        return _checked(host, json.loads(found))
    said = "\n".join(f"    {line}" for line in err.strip().splitlines()[-5:]) or "    (nothing)"
    raise StartError(f"{transport.unreached(host, process.returncode)} It says:\n{said}")


def _checked(host: str, found: Mapping[str, Any]) -> tuple[int, Capacity]:
    theirs, ours = str(found["python"]).rpartition(".")[0], platform.python_version().rpartition(".")[0]
    if found["distnb"] != __version__ or theirs != ours:
        raise StartError(
            f"{host} has distnb {found['distnb']} on Python {found['python']}, and this is distnb {__version__} on "
            f"Python {platform.python_version()}. Functions are sent between them: make them the same."
        )
    return int(found["gpus"]), Capacity(**found["capacity"])
