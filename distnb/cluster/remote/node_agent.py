"""`python -m distnb.cluster.remote.node_agent`: started on another machine, by ssh or the like, for each engine there.

It stands for the notebook on its machine: it makes the run directory, writes the secret connection file, starts the
engine, and ends it when the notebook lets go or cannot be reached any more. It never computes, so nothing that an
engine does can keep it from noticing. Two things tell it of the notebook: its standard input, which is kept open for
as long as the notebook wants the engine, and a connection to the notebook's control channel, whose other end the
kernel probes. A notebook that merely stands still confirms probes.

    probe   print, as a line of JSON, what this machine has
    serve   read an `Assignment` from standard input, keep its engine, and end with the engine's exit status; with a
            process id as second argument also when that process ends (a server's: what it forked keeps its pipes open)

To standard output it says each second that it is there, and at last its exit status.
What the engine writes goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Final

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.devices import available_gpus
from distnb.cluster.local.capacity import this_machine
from distnb.cluster.local.guardian import end_descriptor
from distnb.cluster.local.processes import Processes
from distnb.cluster.network import address_towards, interface_of
from distnb.cluster.process_environment import (
    DEVICE_VARIABLE,
    ENGINE_VARIABLE,
    PYTHON_MODULE,
    engines_environment,
    without_task_variables,
)
from distnb.cluster.remote.heartbeat import heartbeat
from distnb.cluster.worker_placement import network_environment
from distnb.errors import StartError

__all__ = ["BEAT", "KILLED", "STATUS", "Assignment", "main"]

KILLED = 128
"""An engine that signal *n* ended gives the exit status 128 + *n*, as a shell says it: ssh carries no other."""

BEAT: Final = b"distnb-beat"
STATUS: Final = b"distnb-status"

_BEAT_S = 1.0
_LET_GO = 0
_FAILED = 1


@dataclass(frozen=True)
class Assignment:
    """What a node agent is told.

    Attributes:
        connection: How the engine reaches the notebook. Its `notebook_pid` means nothing there.
        notebook: The notebook's address.
        device: The engine's device on that machine.
        engines: How many engines share that machine.
        agent: Module whose `install` makes an engine of a process.
        hash_seed: The same on every machine.
    """

    connection: Connection
    notebook: str
    engine: int
    device: str
    engines: int
    agent: str
    hash_seed: str

    def encode(self) -> bytes:
        """One line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Assignment:
        """Read such a line."""
        found = json.loads(line)
        return cls(**{**found, "connection": Connection(**found["connection"])})


class _NodeAgent:
    """Keeps one engine."""

    def __init__(self, assignment: Assignment) -> None:
        self._told = assignment
        self._reasons: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()

    def let_go(self, why: str = "", status: int = _LET_GO, *, asked: bool = False) -> None:
        """End the engine, from any thread.

        Args:
            why: What is to be written to the log; empty for nothing.
            status: The node agent's exit status.
            asked: The notebook wants it: the engine may end by itself first. Else it is killed, as it would be beside
                a notebook that has ended: were it to end by itself, its part of a program would count as finished.
        """
        self._reasons.put((why, status, asked))

    def keep(self) -> int:
        """Start the engine, wait for a reason to end, and leave nothing behind. Returns the exit status."""
        told = self._told
        interface = interface_of(address_towards(told.notebook))
        with heartbeat(told.connection, partial(self.let_go, status=_FAILED)):
            processes = Processes()
            try:
                dataclasses.replace(told.connection, notebook_pid=os.getpid()).write(processes.directory)
                # Not our own standard error: ssh would wait for every process of the user's that has inherited it.
                engine = processes.start(
                    [*PYTHON_MODULE, "distnb.engine"],
                    lambda pid, words, expected: self.let_go(status=_status_of(processes, pid)),
                    env={
                        **without_task_variables(os.environ),
                        **engines_environment(told.engines, processes.directory, agent=told.agent),
                        **network_environment(interface),
                        ENGINE_VARIABLE: str(told.engine),
                        DEVICE_VARIABLE: told.device,
                        "PYTHONHASHSEED": told.hash_seed,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                threading.Thread(target=_forward, args=(engine.stdout,), name="distnb-log", daemon=True).start()
                why, status, asked = self._reasons.get()
                if why:
                    with suppress(OSError):  # nobody may read it any more
                        print(f"distnb: {why}", file=sys.stderr, flush=True)
                if asked:
                    processes.end([engine.pid])
                return status
            finally:
                processes.close()


def _status_of(processes: Processes, pid: int) -> int:
    status = processes.status(pid)
    return _FAILED if status is None else status if status >= 0 else KILLED - status


def _forward(source: IO[bytes]) -> None:
    with suppress(OSError):
        while data := os.read(source.fileno(), 65536):
            os.write(2, data)


def _await_end_of_input(agent: _NodeAgent) -> None:
    """A word says that the engine is not wanted any more. Without one the notebook is gone, or the way to it."""
    asked = bool(os.read(0, 4096))
    agent.let_go("" if asked else "the notebook let go of its engine here without a word; it is ended.", asked=asked)


def _await_end_of(server: int, agent: _NodeAgent) -> None:
    with suppress(ProcessLookupError):
        select.select([end_descriptor(server)], [], [])
    agent.let_go()


def _probe() -> int:
    found = {
        "distnb": __version__,
        "python": platform.python_version(),
        "gpus": available_gpus(),
        "capacity": dataclasses.asdict(this_machine()),
    }
    os.write(1, json.dumps(found).encode() + b"\n")
    return 0


def _serve(server: int | None) -> int:
    with open(0, "rb", buffering=0, closefd=False) as told:  # what comes after the line is for another reader
        agent = _NodeAgent(Assignment.decode(told.readline()))

    def end(number: int, frame: FrameType | None) -> None:
        # Not the notebook, which says so on standard input: whoever rules this machine, such as Slurm's scancel.
        agent.let_go(f"told to end by {signal.Signals(number).name}; the engine here is ended.", KILLED + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    threading.Thread(target=_await_end_of_input, args=(agent,), name="distnb-input", daemon=True).start()
    threading.Thread(target=_beat, name="distnb-beats", daemon=True).start()
    if server is not None:
        threading.Thread(target=_await_end_of, args=(server, agent), name="distnb-server", daemon=True).start()
    return agent.keep()


def _beat() -> None:
    with suppress(OSError):  # nobody listens any more, and the end of its input tells the node agent so
        while True:
            os.write(1, BEAT + b"\n")
            time.sleep(_BEAT_S)


def main(task: str, server: str = "") -> int:
    """Do what the arguments say; returns the exit status."""
    status = _FAILED
    try:
        status = _probe() if task == "probe" else _serve(int(server) if server else None)
    except StartError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        with suppress(OSError):
            os.write(1, b"%s %d\n" % (STATUS, status))
    return status


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread still sits in its reading of standard input
