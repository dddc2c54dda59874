"""The plan of a cluster on other machines, at the start and when the cluster grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.engine_plan import EnginePlan, Placed, check_resizable, errors_of, further_tasks, place_engines
from distnb.cluster.local.launcher import Launcher, PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.network import listening_address
from distnb.cluster.start_options import StartOptions
from distnb.errors import StartError
from distnb.machines.agents.machine_launcher import Hosts, MachineLinks
from distnb.machines.hosts import HostOptions, Way
from distnb.machines.transport import Found
from distnb.topology import WORKER, Task

__all__ = ["HostPlace", "HostPlan"]


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
        return Hosts(self.engines, connection, self.address, self.links)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None] = lambda text: None
    ) -> Placed:
        """Return the engines to start so that a cluster has more engines or, with parameter servers, more workers.

        Each new engine runs on the machine with the fewest engines that has room; worker *i* runs on machine *i* of the
        start, in turn, as at the start.
        """
        check_resizable(there)
        tasks = further_tasks(self, there, count)
        size = len(tasks) or count
        transport = self.links.transport
        new = transport.further_hosts(size)
        asked = new or self.machines.hosts
        try:
            if tasks and not new and self.machines.has_fixed_tasks:
                raise StartError(
                    "A cluster whose workers and parameter servers are processes of `distnb worker`, each at an "
                    "address of its own, cannot gain workers. Add the worker to the cluster_resolver, and start the "
                    "cluster again; or start workers by ssh (on=distnb.SSH([…]), workers=…, ps=…), which can gain more."
                )
            transport.prepare(asked, on_progress)
            found = self.links.open(asked, on_progress)
            hosts = new or self._hosts_of_further(there, tasks, size, found)
            return place_engines(
                self.options,
                hosts,
                tasks,
                lambda host: found[host][:2],
                machine_of=transport.machine,
                there=there,
            )
        except BaseException:
            for host in set(asked) - {each.host for each in there}:
                self.links.release(host)
            raise

    def _hosts_of_further(
        self, there: Sequence[PlacedEngine], tasks: Sequence[Task], size: int, found: Mapping[str, Found]
    ) -> list[str]:
        """Return a machine of the start for each further engine."""
        machines = self.machines
        if tasks:
            return [machines.hosts[task.index % len(machines.hosts)] for task in tasks]
        numbers = {host: sum(each.host == host for each in there) for host in machines.hosts}
        room = {host: self._room(host, found[host].gpus) for host in machines.hosts}
        hosts: list[str] = []
        for _ in range(size):
            free = [host for host in machines.hosts if room[host] is None or numbers[host] < (room[host] or 0)]
            if not free and self.options.oversubscribe:
                free = [*machines.hosts]
            if not free:
                full = "; ".join(f"{host} has {numbers[host]} of at most {room[host]}" for host in machines.hosts)
                raise StartError(
                    f"No machine has room for {size} further engine{'s' * (size > 1)}: {full}. "
                    + (
                        "The Slurm allocation is full: get a larger one, and start the cluster again there."
                        if machines.has_fixed_room
                        else "A cluster that was started with oversubscribe=True lets engines share devices."
                    )
                )
            hosts.append(min(free, key=numbers.__getitem__))
            numbers[hosts[-1]] += 1
        return hosts

    def _room(self, host: str, gpus: int) -> int | None:
        """Return the greatest number of engines on a machine; None if only its capacity limits the number.

        That is the number of its GPUs, if the engines run on GPUs. In a Slurm allocation without GPUs, it is the number
        of tasks that were requested for the node.
        """
        kinds = {each.device.type for each in self.engines if each.host == host}
        if gpus and kinds != {"cpu"}:
            return gpus
        return self.machines.without_gpus.get(host) if self.machines.has_fixed_room else None

    def close(self) -> None:
        """End the agents, and release the resources of the transport, after the engines have ended."""
        self.links.close()
        self.links.transport.close()


@dataclass(frozen=True)
class HostPlace:
    """The place of engines on other machines, and the notebook's folders that are sent there."""

    machines: HostOptions
    way: Way
    folders: tuple[str, ...] = ()

    def plan(self, options: StartOptions, processes: Processes, on_progress: Callable[[str], None]) -> HostPlan:
        """Return the plan of the engines, after connecting to the agents of the machines."""
        machines = self.machines
        links = MachineLinks(self.way.open(), processes)
        transport = links.transport
        try:
            transport.prepare(machines.hosts, on_progress)
            address = listening_address(map(transport.network_name, machines.hosts), machines.interface)
            found = links.open(machines.hosts, on_progress)
            tasks = [task for task in machines.tasks for _ in range(machines.replicas if task.job == WORKER else 1)]
            hosts = [machines.tasks[task] for task in tasks] or _hosts_of_engines(options, machines, found)
            are_shared = tasks or machines.one_each  # otherwise each host has all devices of its machine
            engines, notices = place_engines(
                options,
                hosts,
                tasks,
                lambda host: found[host][:2],
                machine_of=transport.machine if are_shared else str,
            )
        except BaseException:
            links.close()
            transport.close()
            raise
        return HostPlan(
            engines=tuple(engines),
            notices=notices,
            options=options,
            address=address,
            packages={host: each.packages for host, each in found.items()},
            folders=self.folders,
            links=links,
            machines=machines,
        )


def _hosts_of_engines(options: StartOptions, machines: HostOptions, found: Mapping[str, Found]) -> list[str]:
    """Return the machine of each engine of a cluster without tasks."""
    if machines.one_each:
        return [*machines.hosts]
    hosts: list[str] = []
    for host, (gpus, _, _) in found.items():
        count = machines.per_host if isinstance(machines.per_host, int | None) else machines.per_host.get(host)
        if count is None and options.devices is None:
            count = machines.accelerators.get(host) or (None if gpus else machines.without_gpus.get(host))
        with errors_of(host):
            devices = plan_devices(count, options.devices, oversubscribe=options.oversubscribe, gpus=gpus)
        hosts += [host] * len(devices)
    return hosts
