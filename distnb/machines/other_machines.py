"""The argument `on` of `distnb.start`: an object for each way to other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distnb.cluster.engine_plan import check_replicas_per_worker
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import StartOptions
from distnb.errors import OptionError
from distnb.machines.host_plan import HostPlan, make_plan
from distnb.machines.hosts import HostOptions, Way
from distnb.machines.users_code.sent_folders import read_folders
from distnb.topology import Task

__all__ = ["HostPlace", "OtherMachines", "check_count", "one_host_each"]


@dataclass(frozen=True)
class HostPlace:
    """The place of engines on other machines, and the notebook's folders that are sent there."""

    machines: HostOptions
    way: Way
    folders: tuple[str, ...]

    def plan(self, options: StartOptions, processes: Processes, on_progress: Callable[[str], None]) -> HostPlan:
        """Return the plan of the engines."""
        return replace(make_plan(options, self.machines, self.way, processes, on_progress), folders=self.folders)


class OtherMachines(ABC):
    """The machines of a cluster's engines. Each class is a way to reach them, and validates its arguments."""

    @abstractmethod
    def find_hosts(self, options: StartOptions) -> HostOptions:
        """Return the machines for a start.

        Raises:
            OptionError: An option of the start does not apply to them.
        """

    @abstractmethod
    def way(self, machines: HostOptions) -> Way:
        """Return the transport to machines that `find_hosts` has returned."""

    def place(self, options: StartOptions) -> HostPlace:
        """Return the place of the engines.

        Raises:
            OptionError: An option of the start does not apply to these machines.
        """
        machines = self.find_hosts(options)
        check_replicas_per_worker(options, options.tasks or tuple(machines.tasks))
        return HostPlace(machines, self.way(machines), read_folders(options.sync))


def check_count(name: str, count: object) -> None:
    """Raise OptionError unless a number of engines is None, or a whole number of at least 1."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise OptionError(f"{name}={count!r}: give a whole number of engines, 1 or more.")


def one_host_each(
    prefix: str, options: StartOptions, usual: Callable[[], int]
) -> tuple[tuple[str, ...], Mapping[Task, str]]:
    """Return a host for each engine of a start, and the host of each task.

    Args:
        prefix: The beginning of a host's name, before its number.
        usual: Returns the number of engines if the options name none.
    """
    check_count("n", options.n)
    count = len(options.tasks) or options.n or usual()
    hosts = tuple(f"{prefix}-{number}" for number in range(count))
    return hosts, dict(zip(options.tasks, hosts, strict=True)) if options.tasks else {}
