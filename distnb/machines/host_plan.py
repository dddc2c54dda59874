"""The plan of a cluster on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.engine_plan import SERVERS_DEVICE, EnginePlan, PlacedEngine
from distnb.cluster.local.capacity import check_capacity
from distnb.cluster.local.launcher import Launcher
from distnb.cluster.local.processes import Processes
from distnb.cluster.network import listening_address
from distnb.cluster.start_options import StartOptions
from distnb.errors import DistnbError
from distnb.machines.agents.machine_launcher import Hosts, MachineLinks
from distnb.machines.further_engines import place_further
from distnb.machines.hosts import HostOptions, Way
from distnb.machines.transport import Found
from distnb.topology import WORKER, Device

__all__ = ["HostPlan", "make_plan"]


@dataclass(frozen=True, kw_only=True)
class HostPlan(EnginePlan):
    """The engines to start on other machines.

    Attributes:
        links: The agents of these machines.
        machines: The options for them.
    """

    links: MachineLinks
    machines: HostOptions

    def launcher(self, connection: Connection) -> Launcher:
        """Return the launcher of a cluster with this connection."""
        return Hosts(self.hosts, connection, self.address, self.links)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None] = lambda text: None
    ) -> tuple[list[PlacedEngine], tuple[str, ...]]:
        """Return the engines to start so that a cluster has more engines or, with parameter servers, more workers."""
        return place_further(self, there, count, on_progress)

    def close(self) -> None:
        """End the agents, and release the resources of the transport, after the engines have ended."""
        self.links.close()
        self.links.transport.close()


def make_plan(
    options: StartOptions,
    machines: HostOptions,
    way: Way,
    processes: Processes,
    on_progress: Callable[[str], None] = lambda text: None,
) -> HostPlan:
    """Return the plan of a cluster on other machines, after connecting to their agents.

    Workers get devices like engines without tasks. A server computes on the CPU.
    """
    links = MachineLinks(way.open(), processes)
    try:
        return replace(_plan(options, machines, links, on_progress), options=options)
    except BaseException:
        links.close()
        links.transport.close()
        raise


def _plan(
    options: StartOptions, machines: HostOptions, links: MachineLinks, on_progress: Callable[[str], None]
) -> HostPlan:
    devices, oversubscribe = options.devices, options.oversubscribe
    transport = links.transport
    transport.prepare(machines.hosts, on_progress)
    address = listening_address(map(transport.network_name, machines.hosts), machines.interface)
    found = links.open(machines.hosts, on_progress)
    packages = {host: each.packages for host, each in found.items()}
    if machines.tasks or machines.one_each:
        plan = _plan_tasks(machines, found, devices, links, address, oversubscribe=oversubscribe)
        return replace(plan, packages=packages)
    hosts: list[str] = []
    planned: list[Device] = []
    notices: list[str] = []
    for host, (gpus, capacity, _) in found.items():
        count = machines.per_host if isinstance(machines.per_host, int | None) else machines.per_host.get(host)
        if count is None and devices is None:
            count = machines.accelerators.get(host) or (None if gpus else machines.without_gpus.get(host))
        try:
            there = plan_devices(count, devices, oversubscribe=oversubscribe, gpus=gpus)
            notices += check_capacity(len(there), capacity, host, oversubscribe=oversubscribe)
        except DistnbError as error:
            raise type(error)(f"{host}: {error}") from None
        hosts += [host] * len(there)
        planned += there
    return HostPlan(
        devices=tuple(planned),
        address=address,
        hosts=tuple(hosts),
        links=links,
        machines=machines,
        notices=tuple(notices),
        packages=packages,
    )


def _plan_tasks(
    options: HostOptions,
    found: Mapping[str, Found],
    devices: str | Sequence[str | Device] | None,
    links: MachineLinks,
    address: str,
    *,
    oversubscribe: bool,
) -> HostPlan:
    """Return the plan for the engines of each task. The workers of one machine share its GPUs.

    Without tasks, each host is one engine.
    """
    by_machine: dict[str, list[int]] = {}
    tasks = options.tasks
    engines = [task for task in tasks for _ in range(options.replicas if task.job == WORKER else 1)]
    hosts = tuple(tasks[task] for task in engines) or options.hosts
    for engine, host in enumerate(hosts):
        by_machine.setdefault(links.transport.machine(host), []).append(engine)
    planned = [SERVERS_DEVICE] * len(hosts)
    notices: list[str] = []
    for machine, theirs in by_machine.items():
        gpus, capacity, _ = found[hosts[theirs[0]]]
        computing = [engine for engine in theirs if not engines or engines[engine].job == WORKER]
        try:
            if computing:
                there = plan_devices(len(computing), devices, oversubscribe=oversubscribe, gpus=gpus)
                for engine, device in zip(computing, there, strict=True):
                    planned[engine] = device
            notices += check_capacity(len(theirs), capacity, machine, oversubscribe=oversubscribe)
        except DistnbError as error:
            raise type(error)(f"{machine}: {error}") from None
    return HostPlan(
        devices=tuple(planned),
        address=address,
        hosts=hosts,
        links=links,
        machines=options,
        notices=tuple(notices),
        tasks=tuple(engines),
    )
