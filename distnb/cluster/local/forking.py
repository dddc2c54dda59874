"""The launcher of this machine's engines, which forks them from one process, the template (`distnb.engine.template`).

Loading torch costs each process seconds and memory, so only the template loads it. The template forks the engines,
which share its memory, and then ends. Meanwhile the notebook's process adopts orphans, so the engines become its
children. It watches and reaps them like any other child:

    notebook ── starts ──▶ template ── forks ──▶ engine 0, engine 1     the template represents both engines
    notebook ◀── "0 4711", "1 4712" ── template                         each engine leads a group of its own
    notebook ── "begin" ──▶ template, which ends                        the engines are children of the notebook
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
from typing import IO

from distnb.cluster import tpu_chips
from distnb.cluster.local.guardian import end_descriptor
from distnb.cluster.local.launcher import EngineEnded, EngineOrder, Launched, Launcher, PlacedEngine
from distnb.cluster.local.orphans import adopting_orphans
from distnb.cluster.local.processes import Ended, Processes
from distnb.cluster.local.zygote import ENGINES, zygote_of_this_process
from distnb.cluster.network import require_loopback
from distnb.cluster.process_environment import DEVICE_VARIABLE, ENGINE_VARIABLE, PYTHON_MODULE, engines_environment

__all__ = ["ThisMachine"]

_logger = logging.getLogger("distnb.cluster")

_TEMPLATE_END_MS = 5000
_REPORT_NBYTES = 64


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

    def launch(
        self,
        orders: Sequence[EngineOrder],
        processes: Processes,
        launched: Launched,
        ended: EngineEnded,
        *,
        sharing: int | None = None,
    ) -> None:
        """Start the template. If the calling thread ends before the engines are forked, the template ends, too.

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
        assignments = [
            {
                "log": str(order.log),
                "environment": {
                    ENGINE_VARIABLE: str(order.engine),
                    DEVICE_VARIABLE: str(order.device),
                    **tpu_chips.chip_environment(order.device, devices, self._for_chips),
                },
            }
            for order in orders
        ]
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def template_ended(pid: int, words: str, expected: bool) -> None:
            for order in orders:
                ended(order.engine, pid, words, expected)  # ignored for engines that have a process of their own

        # The template's output goes to the log of the first engine.
        with there, open(orders[0].log, "ab") as log:
            environment = {**os.environ, **shared, **self._network}
            try:
                template = _start_template(processes, template_ended, environment, there, log)
            except BaseException:
                here.close()
                raise
        for order in orders:
            launched(order.engine, template)
        with suppress(BrokenPipeError):  # the template has ended, and its log says why
            here.send(json.dumps(assignments).encode())

        def adopt() -> None:
            try:
                _adopt(here, template, len(orders), processes, launched, ended)
            except BaseException:  # noqa: BLE001  # after any error the engines end with the template; the log has it
                with open(orders[0].log, "a") as log:
                    print(f"The notebook could not take over its engines.\n{traceback.format_exc()}", file=log)
                processes.signal([template], signal.SIGKILL)

        threading.Thread(target=adopt, name="distnb-forking", daemon=True).start()


def _start_template(
    processes: Processes, ended: Ended, environment: Mapping[str, str], notebook: socket.socket, log: IO[bytes]
) -> int:
    """Start the template, with a socket to this process as its standard input. Return its pid."""
    zygote = zygote_of_this_process()
    if zygote is not None:
        try:
            streams = (notebook.fileno(), log.fileno(), log.fileno())
            template = zygote.fork(ENGINES, (), environment, streams, options=PYTHON_MODULE[1:-1])
        except OSError:
            _logger.warning("no template can be forked", exc_info=True)
        else:
            processes.adopt(template, ended)
            return template
    command = [*PYTHON_MODULE, ENGINES]
    return processes.start(command, ended, env=environment, stdin=notebook, stdout=log, stderr=log).pid


def _adopt(
    here: socket.socket, template: int, engines: int, processes: Processes, launched: Launched, ended: EngineEnded
) -> None:
    """Adopt the engines when all of them have reported that they lead a process group, and let them begin."""
    with here, suppress(ConnectionResetError):  # if the template ended first
        pids: dict[int, int] = {}
        while len(pids) < engines:
            report = here.recv(_REPORT_NBYTES)
            if not report:
                return  # the watcher handles the template's end
            engine, pid = map(int, report.split())
            pids[engine] = pid
        with processes.changed:  # while it is held, no end is reported, and no engine is ended
            if not processes.should_run(template):
                return  # the engines end with the template
            for engine, pid in pids.items():
                with suppress(ProcessLookupError):  # the engine ended with the template
                    processes.adopt(pid, partial(ended, engine))
                    launched(engine, pid)
            template_end = select.poll()
            descriptor = end_descriptor(template)
            template_end.register(descriptor, select.POLLIN)
            with adopting_orphans():
                with suppress(BrokenPipeError):
                    here.send(b"begin")
                if not template_end.poll(_TEMPLATE_END_MS):
                    os.kill(template, signal.SIGKILL)
                    template_end.poll()
            os.close(descriptor)
