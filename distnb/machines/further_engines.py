"""The placement of the engines that a running cluster gains: their numbers, machines and devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distnb.cluster.devices import further_devices
from distnb.cluster.local.capacity import Capacity, check_capacity, this_machine
from distnb.errors import DistnbError, StartError
from distnb.machines.base import Found, Transport, probe
from distnb.machines.host_plan import HostPlan
from distnb.machines.hosts import HostOptions
from distnb.topology import WORKER, Device, Task

__all__ = ["PlacedEngine", "place_further"]


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


def place_further(
    plan: HostPlan,
    there: Sequence[PlacedEngine],
    count: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[PlacedEngine], tuple[str, ...]]:
    """Return the engines to start so that a cluster has more engines or, with parameter servers, more workers.

    New engines get the lowest free numbers, and the lowest free devices of their machine. On other machines, each new
    engine runs on the machine with the fewest engines that has room; worker *i* runs on machine *i* of the start, in
    turn, as at the start.

    Args:
        plan: The plan of the cluster's start.
        there: The cluster's engines.
        count: The number of further engines or workers.
        on_progress: Called with a text when machines are queried.

    Returns:
        The engines, and the notices for the user.

    Raises:
        StartError: No machine has room for them, or the machines cannot be extended.
    """
    if any(each.device.type == "tpu" for each in there):
        raise StartError(
            "A cluster on TPU chips cannot be resized: torch_tpu connects the chips of all processes when they start. "
            "Start another cluster: %distnb stop, then %distnb start --devices tpu."
        )
    tasks = _further_tasks(plan, there, count)
    size = len(tasks) or count
    numbers = list(itertools.islice(_free(each.engine for each in there), size))
    transport = plan.transport
    if transport is None or plan.machines is None:
        return _placed(plan, there, numbers, tasks, [""] * size, lambda host: (None, this_machine()))
    hosts, found = _further_hosts(plan, plan.machines, transport, there, tasks, size, on_progress)
    try:
        return _placed(plan, there, numbers, tasks, hosts, lambda host: found[host][:2])
    except BaseException:
        for host in set(hosts) - {each.host for each in there}:
            transport.release(host)
        raise


def _placed(
    plan: HostPlan,
    there: Sequence[PlacedEngine],
    numbers: Sequence[int],
    tasks: Sequence[Task],
    hosts: Sequence[str],
    examine: Callable[[str], tuple[int | None, Capacity]],
) -> tuple[list[PlacedEngine], tuple[str, ...]]:
    """Return further engines on their hosts, with devices, and the notices.

    `examine` returns the number of GPUs and the capacity of a host.
    """
    machine_of = str if plan.transport is None else plan.transport.machine
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
            found = further_devices(len(places), used, oversubscribe=oversubscribe, gpus=gpus)
            notices += check_capacity(total, capacity, where, oversubscribe=oversubscribe, running=len(running))
        except DistnbError as error:
            raise type(error)(f"{machine}: {error}" if machine else str(error)) from None
        devices |= dict(zip(places, found, strict=True))
    placed = [
        PlacedEngine(engine=engine, device=devices[place], host=hosts[place], task=tasks[place] if tasks else None)
        for place, engine in enumerate(numbers)
    ]
    return placed, tuple(notices)


def _free(used: Iterable[int]) -> Iterator[int]:
    """Yield the numbers from 0 on that are not used."""
    taken = set(used)
    return (number for number in itertools.count() if number not in taken)


def _further_tasks(plan: HostPlan, there: Sequence[PlacedEngine], count: int) -> list[Task]:
    """Return the task of each engine of further workers; none in a cluster without tasks."""
    if not plan.tasks:
        return []
    replicas = plan.tasks.count(plan.tasks[0])
    indices = _free(each.task.index for each in there if each.task is not None and each.computes)
    return [Task(WORKER, index) for index in itertools.islice(indices, count) for _ in range(replicas)]


def _further_hosts(
    plan: HostPlan,
    machines: HostOptions,
    transport: Transport,
    there: Sequence[PlacedEngine],
    tasks: Sequence[Task],
    size: int,
    on_progress: Callable[[str], None],
) -> tuple[list[str], Mapping[str, Found]]:
    """Return the host of each further engine, and the number of GPUs and the capacity of each host."""
    if new := list(transport.further_hosts(size)):
        try:
            transport.prepare(new, on_progress)
            return new, probe(new, transport, on_progress)
        except BaseException:
            for host in new:
                transport.release(host)
            raise
    if tasks and machines.launcher == "server":
        raise StartError(
            "A cluster whose workers and parameter servers are processes of `distnb worker`, each at an address of its "
            "own, cannot gain workers. Add the worker to the cluster_resolver, and start the cluster again; or start "
            "workers by ssh (hosts=[…], workers=…, ps=…), which can gain more."
        )
    transport.prepare(machines.hosts, on_progress)
    found = probe(machines.hosts, transport, on_progress)
    if tasks:
        return [machines.hosts[task.index % len(machines.hosts)] for task in tasks], found
    numbers = {host: sum(each.host == host for each in there) for host in machines.hosts}
    room = {host: _room(plan, machines, host, found[host].gpus) for host in machines.hosts}
    hosts: list[str] = []
    for _ in range(size):
        free = [host for host in machines.hosts if room[host] is None or numbers[host] < (room[host] or 0)]
        if not free and plan.options.oversubscribe:
            free = [*machines.hosts]
        if not free:
            full = "; ".join(f"{host} has {numbers[host]} of at most {room[host]}" for host in machines.hosts)
            raise StartError(
                f"No machine has room for {size} further engine{'s' * (size > 1)}: {full}. "
                + (
                    "The Slurm allocation is full: get a larger one, and start the cluster again there."
                    if machines.launcher == "slurm"
                    else "A cluster that was started with oversubscribe=True lets engines share devices."
                )
            )
        hosts.append(min(free, key=numbers.__getitem__))
        numbers[hosts[-1]] += 1
    return hosts, found


def _room(plan: HostPlan, machines: HostOptions, host: str, gpus: int) -> int | None:
    """Return the greatest number of engines on a machine; None if only its capacity limits the number.

    That is the number of its GPUs, if the engines run on GPUs. In a Slurm allocation without GPUs, it is the number of
    tasks that were requested for the node.
    """
    kinds = {device.type for device, its in zip(plan.devices, plan.hosts, strict=True) if its == host}
    if gpus and kinds != {"cpu"}:
        return gpus
    return machines.without_gpus.get(host) if machines.launcher == "slurm" else None
