"""Starts the engines of this machine: one process loads what they need, and forks them (`distnb.engine.template`).

Until it has, that process is the one of each engine. Then it ends, while this one adopts orphans: the engines are
children of this process, reaped and told of like any other.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from distnb.cluster import tpu_chips
from distnb.cluster.local.guardian import end_descriptor
from distnb.cluster.local.launcher import EngineEnded, EngineOrder, Launched, Launcher
from distnb.cluster.local.loopback import require_loopback
from distnb.cluster.local.orphans import adopting_orphans
from distnb.cluster.local.processes import Processes
from distnb.cluster.process_environment import DEVICE_VARIABLE, ENGINE_VARIABLE, PYTHON_MODULE, engines_environment
from distnb.topology import Device

__all__ = ["ThisMachine"]

_LEAVE_MS = 5000
_REPORT_NBYTES = 64


class ThisMachine(Launcher):
    """Engines beside the notebook, forked from one process; `devices` has one for each."""

    has_controller = True
    patience_s = 2.0

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._for_chips: dict[str, str] | None = None

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start the process that loads and forks. With the calling thread it goes, until it has forked.

        Raises:
            StartError: The engines could not communicate with each other.
        """
        require_loopback()
        if self._for_chips is None:
            self._for_chips = tpu_chips.launch_environment(self._devices)
        shared = engines_environment(len(self._devices), processes.directory, agent=orders[0].agent)
        told = [
            {
                "log": str(order.log),
                "environment": {
                    ENGINE_VARIABLE: str(order.engine),
                    DEVICE_VARIABLE: str(order.device),
                    **tpu_chips.chip_environment(order.device, self._devices, self._for_chips),
                },
            }
            for order in orders
        ]
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def template_ended(pid: int, words: str, expected: bool) -> None:
            for order in orders:
                ended(order.engine, pid, words, expected)  # of those that it has forked this is not the process now

        # What is written before there are several processes is in the log of the first.
        with there, open(orders[0].log, "ab") as log:
            try:
                template = processes.start(
                    [*PYTHON_MODULE, "distnb.engine"],
                    template_ended,
                    env={**os.environ, **shared},
                    stdin=there,
                    stdout=log,
                    stderr=log,
                ).pid
            except BaseException:
                here.close()
                raise
        for order in orders:
            launched(order.engine, template)
        with suppress(BrokenPipeError):  # it has ended already, and its log says why
            here.send(json.dumps(told).encode())

        def adopt() -> None:
            try:
                _adopt(here, template, len(orders), processes, launched, ended)
            except BaseException:  # noqa: BLE001  # whatever it is: the engines end with the template, whose log tells why
                with open(orders[0].log, "a") as log:
                    print(f"The notebook could not take over its engines.\n{traceback.format_exc()}", file=log)
                processes.signal([template], signal.SIGKILL)

        threading.Thread(target=adopt, name="distnb-forking", daemon=True).start()


def _adopt(
    here: socket.socket, template: int, engines: int, processes: Processes, launched: Launched, ended: EngineEnded
) -> None:
    """Once each engine says that it leads a group of its own, take them all over, and let them begin."""
    with here, suppress(ConnectionResetError):  # where the template ended unheard
        pids: dict[int, int] = {}
        while len(pids) < engines:
            said = here.recv(_REPORT_NBYTES)
            if not said:
                return  # the template's end tells the rest
            engine, pid = map(int, said.split())
            pids[engine] = pid
        with processes.changed:  # nobody is told of an end, or ends them, meanwhile
            if not processes.wants(template):
                return  # they end with it
            for engine, pid in pids.items():
                with suppress(ProcessLookupError):  # it ended with the template, whose end tells the rest
                    processes.adopt(pid, partial(ended, engine))
                    launched(engine, pid)
            gone = select.poll()
            descriptor = end_descriptor(template)
            gone.register(descriptor, select.POLLIN)
            with adopting_orphans():
                with suppress(BrokenPipeError):
                    here.send(b"begin")
                if not gone.poll(_LEAVE_MS):
                    os.kill(template, signal.SIGKILL)
                    gone.poll()
            os.close(descriptor)
