"""The machines of the engines that a running cluster gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from distnb.cluster.engine_plan import PlacedEngine, check_resizable, further_tasks, place_engines
from distnb.errors import StartError
from distnb.machines.hosts import HostOptions
from distnb.machines.transport import Found
from distnb.topology import Task

if TYPE_CHECKING:
    from distnb.machines.host_plan import HostPlan

__all__ = ["place_further"]


def place_further(
    plan: HostPlan, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None]
) -> tuple[list[PlacedEngine], tuple[str, ...]]:
    """Return the engines to start on other machines: see `EnginePlan.place_further`.

    Each new engine runs on the machine with the fewest engines that has room; worker *i* runs on machine *i* of the
    start, in turn, as at the start.
    """
    check_resizable(there)
    tasks = further_tasks(plan, there, count)
    hosts, found = _further_hosts(plan, plan.machines, there, tasks, len(tasks) or count, on_progress)
    try:
        return place_engines(plan, there, tasks, hosts, lambda host: found[host][:2], plan.links.transport.machine)
    except BaseException:
        for host in set(hosts) - {each.host for each in there}:
            plan.links.release(host)
        raise


def _further_hosts(
    plan: HostPlan,
    machines: HostOptions,
    there: Sequence[PlacedEngine],
    tasks: Sequence[Task],
    size: int,
    on_progress: Callable[[str], None],
) -> tuple[list[str], Mapping[str, Found]]:
    """Return the host of each further engine, and the number of GPUs and the capacity of each host."""
    transport = plan.links.transport
    if new := list(transport.further_hosts(size)):
        try:
            transport.prepare(new, on_progress)
            return new, plan.links.open(new, on_progress)
        except BaseException:
            for host in new:
                plan.links.release(host)
            raise
    if tasks and machines.has_fixed_tasks:
        raise StartError(
            "A cluster whose workers and parameter servers are processes of `distnb worker`, each at an address of its "
            "own, cannot gain workers. Add the worker to the cluster_resolver, and start the cluster again; or start "
            "workers by ssh (on=distnb.SSH([…]), workers=…, ps=…), which can gain more."
        )
    transport.prepare(machines.hosts, on_progress)
    found = plan.links.open(machines.hosts, on_progress)
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
                    if machines.has_fixed_room
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
    return machines.without_gpus.get(host) if machines.has_fixed_room else None
