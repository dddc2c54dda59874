"""The plan of a cluster: its engines with their machines and devices, at the start and when the cluster grows.

Engines run on this machine unless the option `on` of the start is an object for other machines. That object returns an
`EnginePlace`, which makes an `EnginePlan` whose methods reach the machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distnb.cluster.connection import Connection
from distnb.cluster.devices import further_devices, plan_devices
from distnb.cluster.local.capacity import Capacity, check_capacity, this_machine
from distnb.cluster.local.forking import ThisMachine
from distnb.cluster.local.launcher import Launcher
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import StartOptions
from distnb.errors import DistnbError, OptionError, StartError
from distnb.topology import WORKER, Device, Task

__all__ = [
    "SERVERS_DEVICE",
    "EnginePlace",
    "EnginePlan",
    "PlacedEngine",
    "ThisMachinePlace",
    "check_replicas_per_worker",
    "check_resizable",
    "free_numbers",
    "further_tasks",
    "place_engines",
    "place_of",
]

SERVERS_DEVICE = Device("cpu")
"""The device of a parameter server."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class PlacedEngine:
    """An engine with its place.

    Attributes:
        host: The name of its machine, or "" for this one.
        task: Its task in a cluster with parameter servers, or None.
    """

    engine: int
    device: Device
    host: str = ""
    task: Task | None = None

    @property
    def computes(self) -> bool:
        """True if the engine may be a replica."""
        return self.task is None or self.task.computes


@dataclass(frozen=True)
class EnginePlan:
    """The engines to start on this machine. Subclasses plan engines on other machines.

    Attributes:
        devices: The device of each engine.
        notices: The notices for the user before the start.
        tasks: The task of each engine; empty if all engines are alike.
        options: The options of the start.
        address: The address at which the notebook listens for engines on other machines.
        hosts: The machine of each engine; empty for this machine.
        packages: The versions of the packages on each of these machines.
        folders: The notebook's folders that are sent to these machines.
    """

    devices: tuple[Device, ...]
    notices: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    options: StartOptions = field(default_factory=StartOptions)
    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    def launcher(self, connection: Connection) -> Launcher:
        """Return the launcher of a cluster with this connection."""
        return ThisMachine(self.devices)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: OnProgress = lambda text: None
    ) -> tuple[list[PlacedEngine], tuple[str, ...]]:
        """Return the engines to start so that a cluster has more engines or, with parameter servers, more workers.

        New engines get the lowest free numbers, and the lowest free devices of their machine.

        Args:
            there: The cluster's engines.
            count: The number of further engines or workers.
            on_progress: Called with a text when machines are queried.

        Returns:
            The engines, and the notices for the user.

        Raises:
            StartError: No machine has room for them, or the machines cannot be extended.
        """
        check_resizable(there)
        tasks = further_tasks(self, there, count)
        hosts = [""] * (len(tasks) or count)
        return place_engines(self, there, tasks, hosts, lambda host: (None, this_machine()))

    def close(self) -> None:
        """Free the plan's resources, after the engines have ended."""


class EnginePlace(Protocol):
    """The machines of a cluster's engines, chosen by the options of the start. Pickle can copy it."""

    def plan(self, options: StartOptions, processes: Processes, on_progress: OnProgress) -> EnginePlan:
        """Return the plan of the engines, after querying the devices of the machines.

        `processes` starts and ends the processes by which other machines are reached.
        """


class ThisMachinePlace:
    """The place of engines that run on this machine."""

    def plan(
        self, options: StartOptions, processes: Processes | None = None, on_progress: OnProgress = lambda text: None
    ) -> EnginePlan:
        """Return the plan of the engines. Workers get devices like engines without tasks."""
        tasks, oversubscribe = options.tasks, options.oversubscribe
        workers = [task for task in tasks if task.job == WORKER]
        devices = plan_devices(len(workers) if tasks else options.n, options.devices, oversubscribe=oversubscribe)
        devices += (SERVERS_DEVICE,) * (len(tasks) - len(workers))
        notices = check_capacity(len(devices), this_machine(), oversubscribe=oversubscribe)
        return EnginePlan(devices=devices, notices=notices, tasks=tasks, options=options)


def place_of(options: StartOptions) -> EnginePlace:
    """Return the place of the engines.

    Raises:
        OptionError: The options contradict each other.
    """
    if options.on is not None:
        return options.on.place(options)
    check_replicas_per_worker(options, options.tasks)
    return ThisMachinePlace()


def check_replicas_per_worker(options: StartOptions, tasks: Sequence[Task]) -> None:
    """Raise OptionError if the number of replicas of each worker is given for a cluster without tasks."""
    if options.replicas_per_worker is not None and not tasks:
        raise OptionError(
            f"replicas_per_worker={options.replicas_per_worker} is for a cluster with parameter servers: give workers "
            "and ps, too. Engines that are all alike are counted by n, or by the number on each machine."
        )


# -- further engines ---------------------------------------------------------------------------------------------------


def check_resizable(there: Sequence[PlacedEngine]) -> None:
    """Raise if a cluster with these engines cannot be resized."""
    if any(each.device.type == "tpu" for each in there):
        raise StartError(
            "A cluster on TPU chips cannot be resized: torch_tpu connects the chips of all processes when they start. "
            "Start another cluster: %distnb stop, then %distnb start --devices tpu."
        )


def further_tasks(plan: EnginePlan, there: Sequence[PlacedEngine], count: int) -> list[Task]:
    """Return the task of each engine of further workers; none in a cluster without tasks."""
    if not plan.tasks:
        return []
    replicas = plan.tasks.count(plan.tasks[0])
    indices = free_numbers(each.task.index for each in there if each.task is not None and each.computes)
    return [Task(WORKER, index) for index in itertools.islice(indices, count) for _ in range(replicas)]


def place_engines(
    plan: EnginePlan,
    there: Sequence[PlacedEngine],
    tasks: Sequence[Task],
    hosts: Sequence[str],
    examine: Callable[[str], tuple[int | None, Capacity]],
    machine_of: Callable[[str], str] = str,
) -> tuple[list[PlacedEngine], tuple[str, ...]]:
    """Return further engines on their hosts, with numbers and devices, and the notices for the user.

    Args:
        examine: Returns the number of GPUs and the capacity of a host.
        machine_of: Returns the machine of a host. Several hosts may be on the same machine.
    """
    numbers = list(itertools.islice(free_numbers(each.engine for each in there), len(hosts)))
    devices: dict[int, Device] = {}
    notices: list[str] = []
    by_machine: dict[str, list[int]] = {}
    for place, host in enumerate(hosts):
        by_machine.setdefault(machine_of(host), []).append(place)
    for machine, places in by_machine.items():
        gpus, capacity = examine(hosts[places[0]])
        running = [each for each in there if machine_of(each.host) == machine]
        used = [each.device for each in running if each.computes]
        oversubscribe = plan.options.oversubscribe
        total = len(running) + len(places)
        where = machine or "this machine"
        try:
            further = further_devices(len(places), used, oversubscribe=oversubscribe, gpus=gpus)
            notices += check_capacity(total, capacity, where, oversubscribe=oversubscribe, running=len(running))
        except DistnbError as error:
            raise type(error)(f"{machine}: {error}" if machine else str(error)) from None
        devices |= dict(zip(places, further, strict=True))
    placed = [
        PlacedEngine(engine=engine, device=devices[place], host=hosts[place], task=tasks[place] if tasks else None)
        for place, engine in enumerate(numbers)
    ]
    return placed, tuple(notices)


def free_numbers(used: Iterable[int]) -> Iterator[int]:
    """Yield the numbers from 0 on that are not used."""
    taken = set(used)
    return (number for number in itertools.count() if number not in taken)
