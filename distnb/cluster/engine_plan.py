"""The plan of a cluster: its engines with their machines and devices, at the start and when the cluster grows.

Engines run on this machine unless the option `on` of the start is an object for other machines. That object returns a
`Planner`, which makes an `EnginePlan` whose methods reach the machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from distnb.cluster.connection import Connection
from distnb.cluster.devices import further_devices, plan_devices
from distnb.cluster.local.capacity import Capacity, check_capacity, this_machine
from distnb.cluster.local.forking import ThisMachine
from distnb.cluster.local.launcher import Launcher, PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import StartOptions
from distnb.errors import DistnbError, OptionError, StartError
from distnb.topology import WORKER, Device, Task

__all__ = [
    "EnginePlan",
    "Placed",
    "Planner",
    "check_replicas_per_worker",
    "check_resizable",
    "errors_of",
    "further_tasks",
    "place_engines",
    "plan_on_this_machine",
    "planner_of",
]

_SERVERS_DEVICE = Device("cpu")

OnProgress = Callable[[str], None]
Placed = tuple[list[PlacedEngine], tuple[str, ...]]
"""Engines with their places, and notices for the user."""


@dataclass(frozen=True)
class EnginePlan:
    """The engines to start on this machine. Subclasses plan engines on other machines.

    Attributes:
        engines: The engines, by their numbers from 0 on.
        notices: The notices for the user before the start.
        options: The options of the start.
        address: The address at which the notebook listens for engines on other machines; "" if there are none.
        packages: The versions of the packages on each of these machines.
        folders: The notebook's folders that are sent to these machines.
    """

    engines: tuple[PlacedEngine, ...]
    notices: tuple[str, ...] = ()
    options: StartOptions = field(default_factory=StartOptions)
    address: str = ""
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    def launcher(self, connection: Connection) -> Launcher:
        """Return the launcher of a cluster with this connection."""
        return ThisMachine(self.engines)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: OnProgress = lambda text: None
    ) -> Placed:
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
        return place_engines(self.options, [""] * (len(tasks) or count), tasks, _examine_this_machine, there=there)

    def close(self) -> None:
        """Free the plan's resources, after the engines have ended."""


Planner = Callable[[StartOptions, Processes, OnProgress], EnginePlan]
"""A function that plans the engines of a start, after querying the devices of the machines. Pickle can copy it.

The second argument starts and ends the processes by which other machines are reached. The third shows progress.
"""


def plan_on_this_machine(
    options: StartOptions, processes: Processes | None = None, on_progress: OnProgress = lambda text: None
) -> EnginePlan:
    """Return the plan of engines on this machine. Workers get devices like engines without tasks."""
    tasks = options.tasks
    count = len(tasks) or len(plan_devices(options.n, options.devices, oversubscribe=options.oversubscribe))
    engines, notices = place_engines(options, [""] * count, tasks, _examine_this_machine)
    return EnginePlan(engines=tuple(engines), notices=notices, options=options)


def _examine_this_machine(host: str) -> tuple[None, Capacity]:
    return None, this_machine()


def planner_of(options: StartOptions) -> Planner:
    """Return the function that plans the engines.

    Raises:
        OptionError: The options contradict each other.
    """
    if options.on is not None:
        return options.on.planner(options)
    check_replicas_per_worker(options, options.tasks)
    return plan_on_this_machine


def check_replicas_per_worker(options: StartOptions, tasks: Sequence[Task]) -> None:
    """Raise OptionError if the number of replicas of each worker is given for a cluster without tasks."""
    if options.replicas_per_worker is not None and not tasks:
        raise OptionError(
            f"replicas_per_worker={options.replicas_per_worker} is for a cluster with parameter servers: give workers "
            "and ps, too. Engines that are all alike are counted by n, or by the number on each machine."
        )


def place_engines(
    options: StartOptions,
    hosts: Sequence[str],
    tasks: Sequence[Task],
    examine: Callable[[str], tuple[int | None, Capacity]],
    *,
    machine_of: Callable[[str], str] = str,
    there: Sequence[PlacedEngine] | None = None,
) -> Placed:
    """Return engines on their hosts, with numbers and devices, and the notices for the user.

    A parameter server computes on the CPU.

    Args:
        hosts: The host of each engine.
        tasks: The task of each engine; empty if all are alike.
        examine: Returns the number of GPUs and the capacity of a host; None for the number of this machine.
        machine_of: Returns the machine of a host. Several hosts may be on the same machine.
        there: The engines of a cluster that grows; None at the start.
    """
    devices = [_SERVERS_DEVICE] * len(hosts)
    notices: list[str] = []
    by_machine: dict[str, list[int]] = {}
    for place, host in enumerate(hosts):
        by_machine.setdefault(machine_of(host), []).append(place)
    for machine, places in by_machine.items():
        gpus, capacity = examine(hosts[places[0]])
        running = [each for each in there or () if machine_of(each.host) == machine]
        computing = [place for place in places if not tasks or tasks[place].computes]
        over = options.oversubscribe
        with errors_of(machine):
            if there is not None:
                used = [each.device for each in running if each.computes]
                planned = further_devices(len(computing), used, oversubscribe=over, gpus=gpus)
            elif computing:
                planned = plan_devices(len(computing), options.devices, oversubscribe=over, gpus=gpus)
            else:
                planned = ()
            notices += check_capacity(
                len(running) + len(places),
                capacity,
                machine or "this machine",
                oversubscribe=over,
                running=None if there is None else len(running),
            )
        for place, device in zip(computing, planned, strict=True):
            devices[place] = device
    numbers = _free_numbers(each.engine for each in there or ())
    placed = [
        PlacedEngine(engine=engine, device=devices[place], host=host, task=tasks[place] if tasks else None)
        for place, (host, engine) in enumerate(zip(hosts, numbers, strict=False))
    ]
    return placed, tuple(notices)


@contextmanager
def errors_of(machine: str) -> Iterator[None]:
    """Name a machine in the errors of a `with` block, unless it is this one ("")."""
    try:
        yield
    except DistnbError as error:
        if not machine:
            raise
        raise type(error)(f"{machine}: {error}") from None


def _free_numbers(used: Iterable[int]) -> Iterator[int]:
    """Yield the numbers from 0 on that are not used."""
    taken = set(used)
    return (number for number in itertools.count() if number not in taken)


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
    first = plan.engines[0].task
    if first is None:
        return []
    replicas = sum(each.task == first for each in plan.engines)
    indices = _free_numbers(each.task.index for each in there if each.task is not None and each.computes)
    return [Task(WORKER, index) for index in itertools.islice(indices, count) for _ in range(replicas)]
