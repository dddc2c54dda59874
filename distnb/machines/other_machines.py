"""The argument `on` of `distnb.start`: an object for each way to other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from distnb.cluster.devices import check_count
from distnb.cluster.engine_plan import check_replicas_per_worker
from distnb.cluster.start_options import StartOptions
from distnb.machines.host_plan import HostOptions, HostPlace
from distnb.machines.transport import Way
from distnb.machines.users_code.sent_folders import read_folders
from distnb.topology import Task

__all__ = ["OtherMachines", "one_host_each"]


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
