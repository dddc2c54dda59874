"""The launcher of simulated engines, and the plan of a cluster of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distnb.cluster.connection import Connection, connection_path
from distnb.cluster.engine_plan import EnginePlan
from distnb.cluster.local.launcher import EngineEnded, EngineOrder, Launched, Launcher, PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.package_versions import installed_packages
from distnb.cluster.process_environment import import_environment
from distnb.cluster.start_options import StartOptions
from distnb.notebook import engine_owners
from distnb.topology import Device

__all__ = ["SimulatedMachines", "SimulatedPlan", "replace_engines", "replacing_engines"]

_PER_MACHINE = 8


class SimulatedMachines(Launcher):
    """The launcher of simulated engines, in a few processes of this machine.

    Args:
        engines: The engines of the start.
        processes: The number of processes.
    """

    has_controller = False
    patience_s = 2.0

    def __init__(self, engines: Iterable[PlacedEngine], processes: int) -> None:
        super().__init__(engines)
        self._count = processes

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start the processes, each with an equal share of the engines."""
        for number in range(min(self._count, len(orders))):
            self._start(orders[number :: self._count], processes, launched, ended)

    def _start(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        def process_ended(pid: int, words: str, expected: bool) -> None:
            for order in orders:
                ended(order.engine, pid, words, expected)

        engines = [(order.engine, self.places[order.engine].host) for order in orders]
        with processes.changed, open(orders[0].log, "ab") as log:
            process = processes.start(
                [sys.executable, "-m", "benchmarks.simulated_engines", str(connection_path(processes.directory))],
                process_ended,
                env={**import_environment(), "PYTHONHASHSEED": "0"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
            assert process.stdin is not None
            with process.stdin as orders_file:
                orders_file.write(json.dumps(engines).encode())
            for order in orders:
                launched(order.engine, process.pid)


@dataclass(frozen=True)
class SimulatedPlan(EnginePlan):
    """The plan of a cluster of simulated engines, in `processes` processes."""

    processes: int = 2

    def launcher(self, connection: Connection) -> Launcher:
        """Return the launcher of the cluster."""
        return SimulatedMachines(self.engines, self.processes)


@dataclass(frozen=True)
class _Simulation:
    """The plan of simulated engines."""

    remote: bool
    processes: int

    def plan(self, options: StartOptions, processes: Processes, on_progress: Callable[[str], None]) -> EnginePlan:
        engines = tuple(map(self._place, range(options.n or 2)))
        if not self.remote:
            return SimulatedPlan(engines, processes=self.processes)
        packages = dict.fromkeys((each.host for each in engines), installed_packages())
        return SimulatedPlan(engines, address="127.0.0.1", packages=packages, processes=self.processes)

    def _place(self, number: int) -> PlacedEngine:
        if not self.remote:
            return PlacedEngine(number, Device("cpu", number))
        return PlacedEngine(number, Device("cpu", number % _PER_MACHINE), f"machine-{number // _PER_MACHINE}")


def replace_engines(*, remote: bool, processes: int = 2) -> Callable[[], None]:
    """Simulate the engines of clusters that this process starts from now on. Return the function that ends this.

    Args:
        remote: Whether the engines are reached as on other machines, over TCP, or through UNIX sockets. There are eight
            engines on each machine.
        processes: The number of processes that simulate engines.
    """
    names = vars(engine_owners)  # where the function that plans engines is looked up
    before = names["planner_of"]

    def restore() -> None:
        names["planner_of"] = before

    names["planner_of"] = lambda options: _Simulation(remote, processes).plan
    return restore


@contextmanager
def replacing_engines(*, remote: bool, processes: int = 2) -> Iterator[None]:
    """Simulate the engines of clusters that are started in a `with` block. See `replace_engines`."""
    restore = replace_engines(remote=remote, processes=processes)
    try:
        yield
    finally:
        restore()
