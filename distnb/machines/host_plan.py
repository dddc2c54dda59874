"""The plan of a cluster: which engines run on which machines and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.local.capacity import check_capacity, this_machine
from distnb.cluster.local.forking import ThisMachine
from distnb.cluster.local.launcher import Launcher
from distnb.cluster.network import listening_address
from distnb.cluster.start_options import StartOptions
from distnb.errors import DistnbError
from distnb.machines.base import Found, Hosts, Transport, probe
from distnb.machines.hosts import HostOptions
from distnb.topology import WORKER, Device, Task

__all__ = ["HostPlan", "make_plan"]

_SERVERS_DEVICE = Device("cpu")


@dataclass(frozen=True)
class HostPlan:
    """The engines to start.

    Attributes:
        devices: The device of each engine.
        address: The address at which the notebook listens for the engines.
        hosts: The machine of each engine; empty for this machine.
        transport: The transport to these machines.
        notices: The notices for the user before the start.
        tasks: The task of each engine; empty if all engines are alike.
        packages: The versions of the packages on each machine.
        options: The options of the start.
        machines: The options for other machines, or None.
    """

    devices: tuple[Device, ...]
    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    transport: Transport | None = None
    notices: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    options: StartOptions = field(default_factory=StartOptions)
    machines: HostOptions | None = None

    def launcher(self, connection: Connection) -> Launcher:
        """Return the launcher of a cluster with this connection."""
        if self.transport is None:
            return ThisMachine(self.devices)
        return Hosts(self.hosts, connection, self.address, self.transport)

    def close(self) -> None:
        """Release the resources of the transport, after the engines have ended."""
        if self.transport is not None:
            self.transport.close()


def make_plan(
    options: StartOptions, machines: HostOptions | None, on_progress: Callable[[str], None] = lambda text: None
) -> HostPlan:
    """Return the plan of a cluster on this machine, or on other machines after querying their devices.

    Workers get devices like engines without tasks. A server computes on the CPU.
    """
    devices, oversubscribe, tasks = options.devices, options.oversubscribe, options.tasks
    if machines is None:
        workers = [task for task in tasks if task.job == WORKER]
        here = plan_devices(len(workers) if tasks else options.n, devices, oversubscribe=oversubscribe)
        here += (_SERVERS_DEVICE,) * (len(tasks) - len(workers))
        crowded = check_capacity(len(here), this_machine(), oversubscribe=oversubscribe)
        return HostPlan(devices=here, notices=crowded, tasks=tasks, options=options)
    transport = machines.transport()
    try:
        return replace(_plan(options, machines, transport, on_progress), options=options, machines=machines)
    except BaseException:
        transport.close()
        raise


def _plan(
    options: StartOptions, machines: HostOptions, transport: Transport, on_progress: Callable[[str], None]
) -> HostPlan:
    devices, oversubscribe = options.devices, options.oversubscribe
    transport.prepare(machines.hosts, on_progress)
    address = listening_address(map(transport.network_name, machines.hosts), machines.interface)
    found = probe(machines.hosts, transport, on_progress)
    packages = {host: each.packages for host, each in found.items()}
    if machines.tasks or machines.ipyparallel is not None:
        plan = _plan_tasks(machines, found, devices, transport, address, oversubscribe=oversubscribe)
        return replace(plan, packages=packages)
    hosts: list[str] = []
    planned: list[Device] = []
    notices: list[str] = []
    for host, (gpus, capacity, _) in found.items():
        count = machines.per_host
        if not isinstance(count, int):
            # If devices are named, a resolver's number of GPUs is ignored.
            known = (count or {}).get(host) or (None if gpus else machines.without_gpus.get(host))
            count = known if devices is None else None
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
        transport=transport,
        notices=tuple(notices),
        packages=packages,
    )


def _plan_tasks(
    options: HostOptions,
    found: Mapping[str, Found],
    devices: str | Sequence[str | Device] | None,
    transport: Transport,
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
        by_machine.setdefault(transport.machine(host), []).append(engine)
    planned = [_SERVERS_DEVICE] * len(hosts)
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
        transport=transport,
        notices=tuple(notices),
        tasks=tuple(engines),
    )
