"""`python -m distnb.machines.agents.machine_agent`: the program that owns the engines of one other machine.

A transport starts it once per machine. It reports what the machine has, forks engines from a process that has loaded
torch, as on the notebook's own machine (`distnb.cluster.local.forking`), watches them, and ends them: at an order, or
when the notebook has ended or can no longer be reached. It never computes, so an engine cannot delay it.

It has two connections to the notebook: its standard streams (`machine_messages.py`), which stay open as long as the
notebook needs the machine, and one to the notebook's control channel, which the kernel checks with keep-alive probes.
For a suspended notebook, the notebook's kernel still answers the probes.

    main thread     follows orders, one after the other, until a reason to end comes
    input, output   read orders, and write reports: a notebook that does not read delays nothing else
    watcher         learns of ends, and reports the engines' output (`distnb.cluster.local.processes`)

An argument is the id of a process with which the agent ends, too. A server passes its own, because processes that it
forked would keep the pipe open after its end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TextIO

from distnb import __version__
from distnb.cluster.connection import Connection
from distnb.cluster.devices import available_gpus
from distnb.cluster.local.capacity import this_machine
from distnb.cluster.local.forking import ThisMachine
from distnb.cluster.local.launcher import LOST_AFTER_S, EngineOrder, PlacedEngine
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.local.orphans import at_end_of
from distnb.cluster.local.processes import Processes, describe_status
from distnb.cluster.network import address_towards, interface_of
from distnb.cluster.package_versions import installed_packages
from distnb.cluster.process_environment import without_task_variables
from distnb.cluster.worker_placement import network_environment
from distnb.errors import DistnbError, StartError
from distnb.machines.agents.heartbeat import heartbeat
from distnb.machines.agents.machine_messages import Assignment, encode_report
from distnb.process_log import open_log
from distnb.topology import parse_device

__all__ = ["facts", "main"]

_logger = logging.getLogger("distnb.cluster.machine_agent")

_BEAT_S = 1.0
_MOST_CHARS = 1 << 20  # in a report
_MOST_WAITING = 100  # reports that the notebook has not read: more output is read later


@dataclass(frozen=True)
class _End:
    """A reason to end.

    Attributes:
        why: The reason to write to standard error, or "" for none.
        words: How the engines ended, for the notebook; "" if it has asked for it, or has gone.
        requested: True if the notebook requested the end, so that the engines may first end by themselves. Otherwise
            they are killed, like engines on the notebook's own machine after the notebook's end. If one ended by
            itself, its part of a program would count as finished.
    """

    why: str = ""
    words: str = ""
    requested: bool = False


class _Reports:
    """The reports to the notebook, which a thread writes."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="distnb-output", daemon=True)
        self._thread.start()

    @property
    def are_many(self) -> bool:
        return self._waiting.qsize() > _MOST_WAITING

    def send(self, *words: Any) -> None:
        self._waiting.put(encode_report(*words))

    def close(self) -> None:
        """Write what waits, unless the reader does not read it."""
        self._waiting.put(None)
        self._thread.join(_BEAT_S)

    def _write(self) -> None:
        with suppress(OSError):  # the reader has ended; the end of input will end this process
            while (line := self._waiting.get()) is not None:
                unwritten = memoryview(line)
                while unwritten:
                    unwritten = unwritten[os.write(1, unwritten) :]


class _MachineAgent:
    """The owner of the machine's engines, for one cluster. `follow` and `close` run in the main thread."""

    def __init__(self, assignment: Assignment, reports: _Reports, ends: queue.SimpleQueue[Any]) -> None:
        self._assignment, self._reports = assignment, reports
        self._pids: dict[int, int] = {}  # of the engines that run
        self._logs: dict[int, TextIO] = {}  # what the engines write outside programs; the watcher's thread reads it
        self._resources = ExitStack()
        interface = interface_of(address_towards(assignment.notebook))
        _take_environment(assignment)
        lost = lambda why: ends.put(_End(why, "exited with code 1"))  # noqa: E731
        try:
            self._resources.enter_context(heartbeat(assignment.connection.heartbeat_url, assignment.connection, lost))
            self._processes = Processes()
            self._resources.callback(self._processes.close)
            (self._processes.directory / "log").mkdir()
            open_log(self._processes.directory, "machine-agent")
            own: Connection = dataclasses.replace(assignment.connection, notebook_pid=os.getpid())
            own.write(self._processes.directory)
        except BaseException:
            self._resources.close()
            raise
        self._launcher = ThisMachine(network=network_environment(interface))
        self._processes.loop.call_soon_threadsafe(self._forward_output)

    def follow(self, order: Sequence[Any]) -> None:
        """Follow an order. Ends of engines take seconds, so a thread waits for them."""
        match order:
            case "launch", engines, sharing:
                self._launch(dict(engines), sharing)
            case "end", engines:
                threading.Thread(target=self._end, args=(engines,), daemon=True).start()

    def _launch(self, devices: dict[int, str], sharing: int) -> None:
        _logger.info("starting engines: %s", devices)
        orders = []
        for engine, name in devices.items():
            device = parse_device(name)
            path = self._processes.directory / "log" / f"engine-{engine}.log"
            self._logs[engine] = open(path, "w+", errors="replace")  # noqa: SIM115  (closed when the engine has ended)
            self._launcher.places[engine] = PlacedEngine(engine, device)
            orders.append(EngineOrder(engine=engine, device=device, log=path, agent=self._assignment.agent))
        try:
            raise_file_limit(sharing)
            with self._processes.changed:
                self._launcher.launch(orders, self._processes, self._launched, self._ended, sharing=sharing)
        except (OSError, DistnbError) as error:
            for engine in devices:
                self._reports.send("output", engine, f"{error}\n")
                self._forget(engine, "could not be started")

    def _launched(self, engine: int, pid: int) -> None:
        self._pids[engine] = pid

    def _ended(self, engine: int, pid: int, words: str, expected: bool) -> None:
        if self._pids.get(engine) != pid:
            return  # the template, which the engine has left
        del self._pids[engine]
        self._forget(engine, words)

    def _forget(self, engine: int, words: str) -> None:
        self._launcher.remove(engine)
        self._processes.loop.call_soon_threadsafe(self._report_end, engine, self._logs.pop(engine), words)

    def _report_end(self, engine: int, log: TextIO, words: str) -> None:
        with log:
            while self._report_output(engine, log):  # what the engine wrote precedes its end
                pass
        self._reports.send("ended", engine, words)

    def _forward_output(self) -> None:
        """Report what engines have written, once a second, unless the notebook has not read the earlier reports."""
        if not self._reports.are_many:
            for engine, log in self._logs.copy().items():
                self._report_output(engine, log)
        self._processes.loop.call_later(_BEAT_S, self._forward_output)

    def _report_output(self, engine: int, log: TextIO) -> bool:
        if text := log.read(_MOST_CHARS):
            self._reports.send("output", engine, text)
        return bool(text)

    def _end(self, engines: Sequence[int]) -> None:
        with self._processes.changed:  # no engine gets a new process meanwhile
            pids = [*{self._pids[engine] for engine in engines if engine in self._pids}]
            self._processes.expect(pids)
        try:
            self._processes.end(pids)
        except DistnbError as error:
            for engine in engines:
                self._reports.send("output", engine, f"{error}\n")

    def close(self, end: _End) -> None:
        """End all engines, and remove the private directory."""
        with self._resources:
            if end.requested:
                self._processes.end([*set(self._pids.values())])


def _take_environment(assignment: Assignment) -> None:
    """Give this process, and so its engines, the environment of the cluster instead of a launcher's task's."""
    kept = without_task_variables(os.environ)
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    os.environ.update(assignment.variables, PYTHONHASHSEED=assignment.hash_seed)


def facts() -> dict[str, Any]:
    """Return the versions, GPUs and capacity of this machine."""
    return {
        "distnb": __version__,
        "python": platform.python_version(),
        "gpus": available_gpus(),
        "capacity": dataclasses.asdict(this_machine()),
        "packages": installed_packages(),
    }


def _read_orders(events: queue.SimpleQueue[Any]) -> None:
    """Read orders until standard input ends, which without an order to close means a lost notebook."""
    with open(0, "rb", closefd=False) as source:
        for line in source:
            order = json.loads(line)
            if order == ["close"]:
                events.put(_End(requested=True))
                return
            events.put(order)
    events.put(_End("the notebook ended, or its connection was lost; its engines here are ended."))


def _beat(reports: _Reports) -> None:
    while True:
        reports.send("beat")
        time.sleep(_BEAT_S)


def _serve(events: queue.SimpleQueue[Any], reports: _Reports) -> _End:
    """Follow orders until there is a reason to end, and clean up."""
    agent: _MachineAgent | None = None
    end = _End()
    try:
        while (event := events.get(timeout=LOST_AFTER_S)) == ["wait"]:
            pass
        while not isinstance(event, _End):
            if agent is None:
                agent = _MachineAgent(Assignment.of(event[1]), reports, events)
            else:
                agent.follow(event)
            event = events.get()
        end = event
    except queue.Empty:  # a transport may not notice the notebook's end: Slurm keeps the step of a killed srun
        end = _End("the notebook, which was planning its cluster, ended or cannot be reached.")
    except StartError as error:
        end = _End(str(error), "exited with code 1")
    finally:
        _logger.info("ending the engines%s: %s", ", as requested" if end.requested else "", end.why or end.words)
        if end.words:
            reports.send("closes", end.words)
        if end.why:
            with suppress(OSError):  # the reader may have ended
                print(f"distnb: {end.why}", file=sys.stderr, flush=True)
        if agent is not None:
            agent.close(end)
        reports.close()
    return end


def main(server: str = "") -> int:
    """Serve the notebook, and return the exit status."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def signalled(number: int, frame: FrameType | None) -> None:
        # The notebook uses standard input instead. The machine's manager sends signals, for example Slurm's scancel.
        name = signal.Signals(number).name
        events.put(_End(f"ended by {name}; the engines here are ended.", describe_status(-number)))

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signalled)
    reports = _Reports()
    reports.send("facts", facts())
    for target in (partial(_read_orders, events), partial(_beat, reports)):
        threading.Thread(target=target, daemon=True).start()
    if server:
        at_end_of(int(server), lambda: events.put(_End()))
    return int(bool(_serve(events, reports).words))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread is still blocked in reading standard input
