"""`python -m distnb.machines.node_agent`: the node agent, started on another machine for each engine there.

The node agent represents the notebook on its machine. It makes the run directory, writes the secret connection file,
starts the engine, and ends it when the notebook releases it or can no longer be reached. It never computes, so an
engine cannot delay it. It has two connections to the notebook: its standard input, which stays open as long as the
notebook needs the engine, and a connection to the notebook's control channel, which the kernel checks with keep-alive
probes. For a suspended notebook, the notebook's kernel still answers the probes.

    probe   print, as a line of JSON, the versions, GPUs and capacity of this machine
    serve   read an `Assignment` from standard input, run its engine, and end with the engine's exit status. With a
            process id as second argument, end when that process ends, too. A server passes its own process id, because
            processes that it forked would keep the pipe open after its end.

Standard output carries a heartbeat each second and finally the exit status:

    distnb-beat
    distnb-beat
    distnb-status 137          the engine was killed: 128 + SIGKILL

Standard error carries the engine's output.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
from distnb.cluster.package_versions import installed_packages
from distnb.cluster.process_environment import (
    DEVICE_VARIABLE,
    ENGINE_VARIABLE,
    PYTHON_MODULE,
    engines_environment,
    without_task_variables,
)
from distnb.cluster.worker_placement import network_environment
from distnb.errors import StartError
from distnb.machines.heartbeat import heartbeat
from distnb.process_log import open_log

__all__ = ["BEAT", "KILLED", "STATUS", "Assignment", "main"]

KILLED = 128
"""The base of exit statuses for signals: 128 + *n* if signal *n* ended the engine, the form that ssh passes on."""

BEAT: Final = b"distnb-beat"
STATUS: Final = b"distnb-status"

_logger = logging.getLogger("distnb.cluster.node_agent")

_BEAT_S = 1.0
_RELEASED = 0
_FAILED = 1


@dataclass(frozen=True)
class Assignment:
    """The engine that a node agent runs, and its settings.

    Attributes:
        connection: The information that the engine needs to reach the notebook. Its `notebook_pid` is not valid here.
        notebook: The notebook's address.
        device: The engine's device on the node agent's machine.
        engines: The number of engines that share this machine.
        agent: The module whose `install` makes an engine of a process.
        hash_seed: The seed of string hashes, the same on every machine.
        variables: Environment variables of the notebook that the engine gets, too.
    """

    connection: Connection
    notebook: str
    engine: int
    device: str
    engines: int
    agent: str
    hash_seed: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the assignment as one line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Assignment:
        """Return the assignment in a line."""
        found = json.loads(line)
        return cls(**{**found, "connection": Connection(**found["connection"])})


class _NodeAgent:
    """The supervisor of one engine."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._reasons: queue.SimpleQueue[tuple[str, int, bool]] = queue.SimpleQueue()

    def release(self, why: str = "", status: int = _RELEASED, *, requested: bool = False) -> None:
        """End the engine. Any thread may call this.

        Args:
            why: The reason to log, or "" for none.
            status: The node agent's exit status.
            requested: True if the notebook requested the end, so that the engine may first end by itself. Otherwise the
                engine is killed, like an engine on the notebook's own machine after the notebook's end. If it ended by
                itself, its part of a program would count as finished.
        """
        self._reasons.put((why, status, requested))

    def run(self) -> int:
        """Start the engine, wait for a reason to end it, and clean up. Return the exit status."""
        assignment = self._assignment
        interface = interface_of(address_towards(assignment.notebook))
        with heartbeat(assignment.connection, partial(self.release, status=_FAILED)):
            processes = Processes()
            try:
                open_log(processes.directory, f"node-agent-{assignment.engine}")
                dataclasses.replace(assignment.connection, notebook_pid=os.getpid()).write(processes.directory)
                # The output goes to a pipe: ssh would wait for each user process that inherited our standard error.
                engine = processes.start(
                    [*PYTHON_MODULE, "distnb.engine"],
                    lambda pid, words, expected: self.release(status=_status_of(processes, pid)),
                    env={
                        **without_task_variables(os.environ),
                        **engines_environment(assignment.engines, processes.directory, agent=assignment.agent),
                        **network_environment(interface),
                        ENGINE_VARIABLE: str(assignment.engine),
                        DEVICE_VARIABLE: assignment.device,
                        "PYTHONHASHSEED": assignment.hash_seed,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                threading.Thread(target=_forward, args=(engine.stdout,), name="distnb-log", daemon=True).start()
                why, status, requested = self._reasons.get()
                _logger.info("ending the engine, status %d%s: %s", status, ", as requested" if requested else "", why)
                if why:
                    with suppress(OSError):  # the reader may have ended
                        print(f"distnb: {why}", file=sys.stderr, flush=True)
                if requested:
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
    """Wait for the end of standard input. Data on it requests a release; its end without data means a lost notebook."""
    requested = bool(os.read(0, 4096))
    why = "" if requested else "the notebook ended, or its connection was lost; its engine here is ended."
    agent.release(why, requested=requested)


def _await_end_of(server: int, agent: _NodeAgent) -> None:
    with suppress(ProcessLookupError):
        select.select([end_descriptor(server)], [], [])
    agent.release()


def _probe() -> int:
    found = {
        "distnb": __version__,
        "python": platform.python_version(),
        "gpus": available_gpus(),
        "capacity": dataclasses.asdict(this_machine()),
        "packages": installed_packages(),
    }
    os.write(1, json.dumps(found).encode() + b"\n")
    return 0


def _serve(server: int | None) -> int:
    with open(0, "rb", buffering=0, closefd=False) as source:  # unbuffered: `_await_end_of_input` reads the rest
        assignment = Assignment.decode(source.readline())
    agent = _NodeAgent(assignment)

    def end(number: int, frame: FrameType | None) -> None:
        # The notebook uses standard input instead. The machine's manager sends signals, for example Slurm's scancel.
        agent.release(f"ended by {signal.Signals(number).name}; the engine here is ended.", KILLED + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    threading.Thread(target=_await_end_of_input, args=(agent,), name="distnb-input", daemon=True).start()
    threading.Thread(target=_beat, name="distnb-beats", daemon=True).start()
    if server is not None:
        threading.Thread(target=_await_end_of, args=(server, agent), name="distnb-server", daemon=True).start()
    os.environ.update(assignment.variables)
    return agent.run()


def _beat() -> None:
    with suppress(OSError):  # the reader has ended; the end of input will end the node agent
        while True:
            os.write(1, BEAT + b"\n")
            time.sleep(_BEAT_S)


def main(task: str, server: str = "") -> int:
    """Perform the task, and return the exit status."""
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
    os._exit(code)  # a thread is still blocked in reading standard input
