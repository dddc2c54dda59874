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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from distnb.cluster import tpu_chips
from distnb.cluster.launcher import EngineEnded, EngineOrder, Launched, Launcher
from distnb.cluster.local.orphans import adopting_orphans, end_process
from distnb.cluster.local.processes import Processes
from distnb.cluster.process_environment import PYTHON_MODULE, engine_environment, engines_environment
from distnb.topology import Device

__all__ = ["ThisMachine"]

_LEAVE_S = 5.0
_REPORT_NBYTES = 64


class ThisMachine(Launcher):
    """Engines beside the notebook, forked from one process.

    Args:
        devices: One per engine.
    """

    has_controller = True
    patience_s = 2.0

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._for_chips: dict[str, str] | None = None

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        if self._for_chips is None:
            self._for_chips = tpu_chips.launch_environment(self._devices)
        shared = engines_environment(len(self._devices), orders[0].directory, agent=orders[0].agent)
        own = [
            engine_environment(order.engine, order.device, replaces=order.replaces)
            | tpu_chips.chip_environment(order.device, self._devices, self._for_chips)
            for order in orders
        ]
        _fork_engines(orders, shared, own, processes, launched, ended)


def _fork_engines(
    orders: Sequence[EngineOrder],
    shared: Mapping[str, str],
    own: Sequence[Mapping[str, str]],
    processes: Processes,
    launched: Launched,
    ended: EngineEnded,
) -> None:
    """Start engines. To be called in a thread that stays until they are ready: with it goes the process that loads.

    Args:
        orders: The engines. What is written before there are several processes is in the log of the first.
        shared: Environment variables that are the same for all of them.
        own: Those of each.
        launched, ended: As of `Launcher.launch`.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def template_ended(pid: int, words: str, expected: bool) -> None:
        for order in orders:
            ended(order.engine, pid, words, expected)  # of those that it has forked this is not the process any more

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
    told = [{"log": str(order.log), "environment": dict(each)} for order, each in zip(orders, own, strict=True)]
    with suppress(BrokenPipeError):  # it has ended already, and its log says why
        here.send(json.dumps(told).encode())
    processes.watcher.listen(here, _Adoption(template, len(orders), processes, launched, ended).hear)


class _Adoption:
    """Hears of the forked engines; once all are there, they begin."""

    def __init__(
        self, template: int, engines: int, processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        self._template = template
        self._engines = engines
        self._processes = processes
        self._launched = launched
        self._ended = ended
        self._pids: dict[int, int] = {}

    def hear(self, template: socket.socket) -> bool:
        """An engine says that it leads a group of its own. Returns whether there is more to hear."""
        said = template.recv(_REPORT_NBYTES)
        if not said:
            return False  # its end tells the rest
        engine, pid = map(int, said.split())
        self._pids[engine] = pid
        if len(self._pids) < self._engines:
            return True
        with self._processes.changed:
            if not self._processes.expects(self._template):  # else they are not wanted any more, and end with it
                self._adopt(template)
        return False

    def _adopt(self, template: socket.socket) -> None:
        for engine, pid in self._pids.items():
            self._processes.adopt(pid, partial(self._ended, engine))
            self._launched(engine, pid)
        gone = os.pidfd_open(self._template)
        try:
            with adopting_orphans():
                with suppress(BrokenPipeError):
                    template.send(b"begin")
                if not select.select([gone], [], [], _LEAVE_S)[0]:
                    end_process(self._template, signal.SIGKILL)
                    select.select([gone], [], [])
        finally:
            os.close(gone)
