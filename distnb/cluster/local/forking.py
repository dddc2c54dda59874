"""The launcher of this machine's engines, which forks them from one process, the template (`distnb.engine.template`).

Loading torch costs each process seconds and memory, so only the template loads it. For each launch it forks a process
that forks the engines, which share its memory, and then ends. Meanwhile the notebook's process adopts orphans, so the
engines become its children. It watches and reaps them like any other child:

    notebook ── starts ──▶ template ── forks ──▶ process in between ── forks ──▶ engine 0, engine 1
    notebook ◀── "4709" ── process in between
    notebook ◀── "0 4711", "1 4712" ── engines                       each engine leads a group of its own
    notebook ── "begin" ──▶ process in between, which ends           the engines are children of the notebook

The template stays for further engines: these start in a tenth of the time. A launch of all engines starts another one,
and so does a launch with another environment: a new template reads settings and modules again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import IO, Any

from distnb.cluster import tpu_chips
from distnb.cluster.local.guardian import end_descriptor
from distnb.cluster.local.launcher import EngineEnded, EngineOrder, Launched, Launcher, PlacedEngine
from distnb.cluster.local.orphans import adopting_orphans
from distnb.cluster.local.processes import Processes
from distnb.cluster.local.zygote import ENGINES, zygote_of_this_process
from distnb.cluster.network import require_loopback
from distnb.cluster.process_environment import (
    DEVICE_VARIABLE,
    ENGINE_VARIABLE,
    PYTHON_MODULE,
    THREADS_VARIABLE,
    engines_environment,
)

__all__ = ["ThisMachine"]

_logger = logging.getLogger("distnb.cluster")

_END_MS = 5000
_REPORT_NBYTES = 64
_OF_THREADS = ("OMP_NUM_THREADS", THREADS_VARIABLE)  # each engine gets its own numbers


class ThisMachine(Launcher):
    """The launcher of engines on the machine of this process, forked from one process.

    Args:
        engines: The engines that the first launch may start.
        network: The variables from `network_environment`, for a cluster of several machines. By default, the engines
            communicate through the loopback interface.
    """

    has_controller = True
    patience_s = 2.0

    def __init__(self, engines: Iterable[PlacedEngine] = (), network: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(engines)
        self._network = network
        self._for_chips: dict[str, str] | None = None
        self._template: _Template | None = None

    def launch(
        self,
        orders: Sequence[EngineOrder],
        processes: Processes,
        launched: Launched,
        ended: EngineEnded,
        *,
        sharing: int | None = None,
    ) -> None:
        """Have the template fork engines.

        `sharing` is the number of processes that share the machine; None for the number of this launcher's engines.

        Raises:
            StartError: The engines could not communicate with each other.
        """
        if not self._network:
            require_loopback()
        devices = tuple(each.device for each in self.places.values())
        if self._for_chips is None:
            self._for_chips = tpu_chips.launch_environment(devices)
        shared = engines_environment(sharing or len(devices), processes.directory, agent=orders[0].agent)
        shared |= self._network
        assignments = {
            order.engine: {
                "log": str(order.log),
                "environment": {
                    **shared,
                    ENGINE_VARIABLE: str(order.engine),
                    DEVICE_VARIABLE: str(order.device),
                    **tpu_chips.chip_environment(order.device, devices, self._for_chips),
                },
            }
            for order in orders
        }
        template = self._template
        settings = {name: value for name, value in (os.environ | shared).items() if name not in _OF_THREADS}
        is_whole = len(orders) == len(self.places)
        if template is None or is_whole or template.settings != settings or not processes.should_run(template.pid):
            if template is not None:
                template.end()
            with open(orders[0].log, "ab") as log:  # the template's output goes to the log of the first engine
                template = self._template = _Template(processes, os.environ | shared, settings, log)
        template.fork(assignments, launched, ended)

    def remove(self, engine: int) -> None:
        """Remove an engine whose process has ended. The template ends with the last one."""
        super().remove(engine)
        if not self.places and self._template is not None:
            self._template.end()

    def end(self, pids: Mapping[int, int], processes: Processes) -> None:
        """End engines, and wait for that. The template ends with all of them."""
        super().end(pids, processes)
        if self._template is not None and pids.keys() >= self.places.keys():
            self._template.end()


class _Template:
    """The process that has loaded torch, and forks engines each time that it gets a list of them.

    Attributes:
        settings: The environment for which it has loaded the modules, without the numbers of threads.
    """

    def __init__(
        self, processes: Processes, environment: Mapping[str, str], settings: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self.settings = settings
        self._processes = processes
        self._stays = True
        self._starting: dict[int, EngineEnded] = {}
        self._adopting: threading.Thread | None = None
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            try:
                self.pid = self._start(environment, there, log)
            except BaseException:
                self._socket.close()
                raise

    def _start(self, environment: Mapping[str, str], notebook: socket.socket, log: IO[bytes]) -> int:
        """Start the process, with a socket to this one as its standard input. Return its pid."""
        zygote = zygote_of_this_process()
        if zygote is not None:
            try:
                streams = (notebook.fileno(), log.fileno(), log.fileno())
                pid = zygote.fork(ENGINES, (), environment, streams, options=PYTHON_MODULE[1:-1])
            except OSError:
                _logger.warning("no template can be forked", exc_info=True)
            else:
                self._processes.adopt(pid, self._ended)
                self._stays = False  # the zygote forks another one at once, and this one would need memory
                return pid
        command = [*PYTHON_MODULE, ENGINES]
        return self._processes.start(command, self._ended, env=environment, stdin=notebook, stdout=log, stderr=log).pid

    def _ended(self, pid: int, words: str, expected: bool) -> None:
        for engine, ended in self._starting.items():
            ended(engine, pid, words, expected)  # ignored for engines that have a process of their own
        if self._adopting is not None:
            self._adopting.join(_END_MS / 1000)
        self._socket.close()

    def fork(self, assignments: Mapping[int, Mapping[str, Any]], launched: Launched, ended: EngineEnded) -> None:
        """Have engines forked. The assignments are by engine."""
        self._starting = dict.fromkeys(assignments, ended)
        for engine in assignments:
            launched(engine, self.pid)
        with suppress(BrokenPipeError):  # the template has ended, and its log says why
            self._socket.send(json.dumps([*assignments.values()]).encode())

        def adopt() -> None:
            try:
                if self._adopt(len(assignments), launched, ended) and not self._stays:
                    self.end()
            except BaseException:  # noqa: BLE001  # after any error the engines end with the template; the log has it
                with open(next(iter(assignments.values()))["log"], "a") as log:
                    print(f"The notebook could not take over its engines.\n{traceback.format_exc()}", file=log)
                self.end()

        self._adopting = threading.Thread(target=adopt, name="distnb-forking", daemon=True)
        self._adopting.start()

    def _adopt(self, engines: int, launched: Launched, ended: EngineEnded) -> bool:
        """Adopt the engines when all of them have reported that they lead a process group, and let them begin.

        Return False if the template ended first. It may still be writing the reason to its log.
        """
        with suppress(ConnectionResetError):  # if the template ended first
            forking = 0  # the process in between
            pids: dict[int, int] = {}
            while len(pids) < engines:
                report = self._socket.recv(_REPORT_NBYTES)
                if not report:
                    return False  # the watcher handles the template's end
                engine, pid = map(int, report.split())
                if engine < 0:
                    forking = pid
                else:
                    pids[engine] = pid
            with self._processes.changed:  # while it is held, no end is reported, and no engine is ended
                if not self._processes.should_run(self.pid):
                    return False  # the engines end with the template
                for engine, pid in pids.items():
                    with suppress(ProcessLookupError):  # the engine ended with the template
                        self._processes.adopt(pid, partial(ended, engine))
                        launched(engine, pid)
                end = select.poll()
                descriptor = end_descriptor(forking)
                end.register(descriptor, select.POLLIN)
                with adopting_orphans():
                    with suppress(BrokenPipeError):
                        self._socket.send(b"begin")
                    if not end.poll(_END_MS):
                        os.kill(forking, signal.SIGKILL)
                        end.poll()
                os.close(descriptor)
            return True
        return False

    def end(self) -> None:
        """End the process. Engines that have begun stay."""
        self._processes.expect([self.pid])
        self._processes.signal([self.pid], signal.SIGKILL)
