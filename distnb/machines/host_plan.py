"""The machines of a cluster's engines, and its plan, at the start and when the cluster grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.engine_plan import EnginePlan, Placed, check_resizable, errors_of, further_tasks, place_engines
from distnb.cluster.local.launcher import Launcher, PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.network import listening_address
from distnb.cluster.start_options import StartOptions
from distnb.machines.agents.machine_launcher import Hosts, MachineLinks
from distnb.machines.transport import Found, Way
from distnb.topology import WORKER, Task

__all__ = ["HostOptions", "HostPlan", "plan_hosts"]


@dataclass(frozen=True)
class HostOptions:
    """The machines for engines.

    Attributes:
        hosts: The machines, by the transport's names, each once.
        per_host: The number of engines on each machine, or of machines by host. None for one per GPU, or two on the
            CPU; also for a machine that is not in it.
        interface: The interface or address of this machine at which it listens for engines. None for the interface that
            leads to the machines.
        without_gpus: The number of engines on a machine without GPUs, by host; 2 for any other host.
        tasks: In a cluster with parameter servers, the machine of each worker and server, in engine order. Every engine
            belongs to one of these tasks.
        replicas: The number of engines of each worker.
    """

    hosts: tuple[str, ...]
    per_host: int | Mapping[str, int] | None = None
    interface: str | None = None
    without_gpus: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[Task, str] = field(default_factory=dict)
    replicas: int = 1


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
            transport.prepare(asked, on_progress)
            found = self.links.open(asked, on_progress)
            if tasks and not new:
                new = tuple(self.machines.hosts[task.index % len(self.machines.hosts)] for task in tasks)
            return place_engines(
                self.options,
                new or self._least_used(there, size, found),
                tasks,
                lambda host: found[host][:2],
                machine_of=transport.machine,
                there=there,
            )
        except BaseException:
            for host in set(asked) - {each.host for each in there}:
                self.links.release(host)
            raise

    def _least_used(self, there: Sequence[PlacedEngine], size: int, found: Mapping[str, Found]) -> list[str]:
        """Return a machine for each further engine: one with a free GPU, if its engines run on GPUs."""
        on_gpus = {each.host for each in self.engines if each.device.type != "cpu"}
        numbers = Counter(each.host for each in there)
        hosts: list[str] = []
        for _ in range(size):
            free = [host for host in self.machines.hosts if host not in on_gpus or numbers[host] < found[host].gpus]
            hosts.append(min(free or self.machines.hosts, key=numbers.__getitem__))
            numbers[hosts[-1]] += 1
        return hosts

    def close(self) -> None:
        """End the agents, and release the resources of the transport, after the engines have ended."""
        self.links.close()
        self.links.transport.close()


def plan_hosts(
    machines: HostOptions,
    way: Way,
    folders: tuple[str, ...],
    options: StartOptions,
    processes: Processes,
    on_progress: Callable[[str], None],
) -> HostPlan:
    """Return the plan of the engines of a start, after connecting to the agents of the machines.

    Args:
        way: The way to the machines.
        folders: The notebook's folders that are sent there.
    """
    links = MachineLinks(way.open(), processes)
    transport = links.transport
    try:
        transport.prepare(machines.hosts, on_progress)
        address = listening_address(map(transport.network_name, machines.hosts), machines.interface)
        found = links.open(machines.hosts, on_progress)
        tasks = [task for task in machines.tasks for _ in range(machines.replicas if task.job == WORKER else 1)]
        hosts = [machines.tasks[task] for task in tasks]
        hosts = hosts or _hosts_of_engines(options, machines, found, transport.machine)
        engines, notices = place_engines(
            options, hosts, tasks, lambda host: found[host][:2], machine_of=transport.machine
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
        folders=folders,
        links=links,
        machines=machines,
    )


def _hosts_of_engines(
    options: StartOptions, machines: HostOptions, found: Mapping[str, Found], machine_of: Callable[[str], str]
) -> list[str]:
    """Return the machine of each engine of a cluster without tasks. Hosts of one machine divide its devices."""
    sharing = Counter(map(machine_of, found))
    hosts: list[str] = []
    for host, (gpus, _, _) in found.items():
        count = machines.per_host if isinstance(machines.per_host, int | None) else machines.per_host.get(host)
        if count is None and options.devices is None:
            count = max(1, gpus // sharing[machine_of(host)]) if gpus else machines.without_gpus.get(host)
        if count is None:
            with errors_of(host):
                count = len(plan_devices(None, options.devices, oversubscribe=options.oversubscribe, gpus=gpus))
        hosts += [host] * count
    return hosts
