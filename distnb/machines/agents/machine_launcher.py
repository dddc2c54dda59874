"""The machine agents of a cluster, and the launcher that starts engines through them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from distnb.cluster.connection import Connection
from distnb.cluster.local.launcher import EngineEnded, EngineOrder, Launched, Launcher, PlacedEngine
from distnb.cluster.local.processes import Processes
from distnb.cluster.process_environment import forwarded_environment, hash_seed
from distnb.errors import ClusterError, StartError
from distnb.machines.agents.machine_link import MachineLink
from distnb.machines.agents.machine_messages import Assignment
from distnb.machines.transport import Found, Transport

__all__ = ["Hosts", "MachineLinks"]


class MachineLinks:
    """The machine agents to which this process is connected, one for each host, from the plan of a cluster to its end.

    Args:
        transport: The way to the machines. It is closed with the links.
        processes: The supervisor of the processes that are connected to the agents.
    """

    def __init__(self, transport: Transport, processes: Processes) -> None:
        self.transport = transport
        transport.directory = processes.directory
        self._processes = processes
        self._links: dict[str, MachineLink] = {}

    def open(self, hosts: Iterable[str], on_progress: Callable[[str], None] = lambda text: None) -> dict[str, Found]:
        """Connect to the agents of hosts at the same time, unless they are connected, and return what these have.

        The transport must be prepared for the hosts.

        Raises:
            StartError: Some machines did not answer. The message names each of them.
        """
        asked: dict[str, MachineLink] = {}
        new: list[str] = []
        try:
            for host in hosts:
                if host not in self._links or not self._links[host].is_open:
                    self._links[host] = MachineLink(host, self.transport, self._processes)
                    new.append(host)
                asked[host] = self._links[host]
            self._await_answers(asked, on_progress)
            if failures := [link.failure for link in asked.values() if link.failure]:
                raise StartError("\n".join(failures))
        except BaseException:
            self._close(new)
            raise
        return {host: link.found for host, link in asked.items() if link.found is not None}

    def _await_answers(self, asked: Mapping[str, MachineLink], on_progress: Callable[[str], None]) -> None:
        patience_s = self.transport.patience_s
        deadline = time.monotonic() + patience_s
        waiting = list(asked.values())
        while waiting:
            on_progress(f"waiting for {', '.join(link.host for link in waiting)}")
            with self._processes.changed:
                first = waiting[0]
                answered = self._processes.changed.wait_for(
                    lambda link=first: link.found is not None or link.failure,  # type: ignore[misc]
                    deadline - time.monotonic(),
                )
            if not answered:
                first.failure = (
                    f"{first.host} did not answer within {patience_s:.0f} s. Is it up, and reachable from here?"
                )
            waiting = [link for link in waiting if link.found is None and not link.failure]

    def __getitem__(self, host: str) -> MachineLink:
        return self._links[host]

    def release(self, host: str) -> None:
        """End the agent of a host that has no engines any more, and release what the transport reserved for it."""
        self._close([host])
        self.transport.release(host)

    def close(self) -> None:
        """End all agents."""
        self._close([*self._links])

    def _close(self, hosts: Iterable[str]) -> None:
        links = [link for host in hosts if (link := self._links.pop(host, None)) is not None and link.is_open]
        for link in links:
            link.close()
        pids = [link.pid for link in links]
        self._processes.expect(pids)
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: not any(link.is_open for link in links), Hosts.patience_s)
        self._processes.end(pids)


class Hosts(Launcher):
    """The launcher of engines on other machines.

    Args:
        engines: The engines of the start.
        connection: The information that the engines need to reach the notebook.
        address: The address at which the notebook listens for the engines.
        links: The agents of the machines.
    """

    has_controller = False
    patience_s = 15.0  # an agent ends an engine within half of it

    def __init__(
        self, engines: Iterable[PlacedEngine], connection: Connection, address: str, links: MachineLinks
    ) -> None:
        super().__init__(engines)
        # The notebook's pid is meaningless on other machines, and they cannot reach ipyparallel's controller.
        self._connection = dataclasses.replace(connection, notebook_pid=0, controller=False)
        self._address = address
        self._links = links

    def prepare(self, engines: Sequence[int], on_progress: Callable[[str], None]) -> None:
        """Prepare the machines of these engines, and connect to those that were lost."""
        hosts = list(dict.fromkeys(self.places[engine].host for engine in engines))
        self._links.transport.prepare(hosts, on_progress)
        self._links.open(hosts, on_progress)

    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Order the engines of each machine from its agent."""
        machine = self._links.transport.machine
        machines = [machine(each.host) for each in self.places.values()]
        assignment = Assignment(
            connection=self._connection,
            notebook=self._address,
            agent=orders[0].agent,
            hash_seed=hash_seed(),
            variables=forwarded_environment(),
        )
        for host in dict.fromkeys(self.places[order.engine].host for order in orders):
            theirs = [order for order in orders if self.places[order.engine].host == host]
            link = self._links[host]
            for order in theirs:
                launched(order.engine, link.pid)
            link.launch(
                assignment,
                {order.engine: str(order.device) for order in theirs},
                machines.count(machine(host)),
                {order.engine: (order.log, partial(ended, order.engine, link.pid)) for order in theirs},
            )

    def remove(self, engine: int) -> None:
        """Remove an engine. The last one of a host releases the host."""
        host = self.places.pop(engine).host
        if all(each.host != host for each in self.places.values()):
            self._links.release(host)

    def expect_end(self, pids: Mapping[int, int], processes: Processes) -> None:
        """Mark the ends of engines, from now on, as requested."""
        for link, engines in self._by_link(pids):
            link.expect_end(engines)

    def end(self, pids: Mapping[int, int], processes: Processes) -> None:
        """End engines by the agents of their machines."""
        asked = self._by_link(pids)

        def running() -> list[int]:
            return [engine for link, engines in asked for engine in link.running(engines)]

        for link, engines in asked:
            link.end(engines)
        with processes.changed:
            processes.changed.wait_for(lambda: not running(), self.patience_s)
        if stuck := running():
            engine = min(stuck)
            raise ClusterError(
                f"Engine {engine} on {self.places[engine].host} did not end, not even by SIGKILL: it hangs in the "
                "operating system of that machine (a driver, a network disk). Check these, or restart the machine."
            )

    def _by_link(self, engines: Iterable[int]) -> list[tuple[MachineLink, list[int]]]:
        by_host: dict[str, list[int]] = {}
        for engine in engines:
            by_host.setdefault(self.places[engine].host, []).append(engine)
        found = []
        for host, its in by_host.items():
            with suppress(KeyError):  # it was never connected
                found.append((self._links[host], its))
        return found

    def notice_ends(self, pids: Mapping[int, int], processes: Processes) -> None:
        """Wait until the ends of processes here are handled. Other machines report theirs themselves."""
        processes.notice(set(pids.values()))
