"""The owner of a session's engines: the notebook's process itself, or the daemon of a detached cluster."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from distnb.cluster.connection import Connection, Keys, make_keys
from distnb.cluster.engine_plan import EnginePlan, PlacedEngine, place_of
from distnb.cluster.lifecycle import Cluster, RunningCluster
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.local.processes import Processes
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.cluster.start_options import StartOptions
from distnb.detached import registry
from distnb.detached.daemon import DaemonOptions
from distnb.detached.daemon_client import DaemonClient, OnLost, notebook_name, start_daemon
from distnb.topology import Task
from distnb.wire.channel import Switchboard

__all__ = ["EngineOwner", "OwnedByDaemon", "OwnedByNotebook", "connected_owner", "plan_owner"]

OnExit = Callable[[int, int, str], None]
"""A function called with (engine, pid, status in words) when an engine ends unexpectedly."""


class EngineOwner(ABC):
    """The owner of the engines' processes, of the cluster's directory and keys, and of the store.

    Attributes:
        directory: The cluster's private directory.
        keys: The cluster's keys.
        tasks: The task of each engine; empty if all engines are alike.
        store: The address of the rendezvous store, or None if the engines meet by files.
        name: The name of a detached cluster, or "".
        hosts: The machine of each engine that does not run on this one.
        packages: The versions of the packages on each of these machines.
        sync: Whether the notebook's local modules are sent to them.
    """

    directory: Path
    keys: Keys
    tasks: tuple[Task, ...] = ()
    store: tuple[str, int] | None = None
    name = ""
    hosts: Mapping[int, str] = MappingProxyType({})
    packages: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    sync = False

    def open_switchboard(self) -> Switchboard:
        """Open the notebook's end of the channels to the engines."""
        host, ports = self._listening()
        return Switchboard(
            self.directory,
            server_secret=self.keys.server_secret.encode(),
            server_public=self.keys.server_public.encode(),
            client_public=self.keys.client_public.encode(),
            host=host,
            ports=ports,
        )

    @abstractmethod
    def _listening(self) -> tuple[str | None, tuple[int, int] | None]:
        """Return the host and the ports for the switchboard."""

    @abstractmethod
    def cluster(self, switchboard: Switchboard, on_exit: OnExit) -> RunningCluster:
        """Return the cluster, whose engines connect to this switchboard."""

    @abstractmethod
    def start(self, on_progress: Callable[[str], None]) -> None:
        """Start the engines of `cluster`, and return when all of them are ready."""

    def when_lost(self, handle: OnLost) -> None:  # noqa: B027  (only another process can take engines away)
        """Call a function, in a thread of its own, when this notebook loses the engines to another one, or to an end.

        It is called with a description of each engine's end, and with a text for the user: the reason and the cure.
        """

    @abstractmethod
    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None]
    ) -> tuple[list[PlacedEngine], tuple[str, ...]]:
        """Return places for further engines or, with tasks, for the engines of further workers; and notices."""

    @abstractmethod
    def joined(self) -> None:
        """Note that further engines have a copy of what the others have. Until then they end with the notebook."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, after the cluster has been stopped."""


class OwnedByNotebook(EngineOwner):
    """Engines that end with this process.

    Raises:
        StartError: The private directory, or the store, could not be made.
    """

    def __init__(self, plan: EnginePlan, *, sync: bool = False) -> None:
        self._plan = plan
        self.tasks = plan.tasks
        self.hosts, self.packages, self.sync = dict(enumerate(plan.hosts)), plan.packages, sync
        self.keys = make_keys()
        self._processes = Processes()
        self.directory = self._processes.directory
        self._store: RendezvousStore | None = None
        self._cluster: Cluster | None = None
        if plan.hosts:
            try:
                self._store = RendezvousStore(host=plan.address)
            except BaseException:
                self._processes.close()
                raise
            self.store = self._store.host, self._store.port

    def _listening(self) -> tuple[str | None, tuple[int, int] | None]:
        return self._plan.address if self._plan.hosts else None, None

    def cluster(self, switchboard: Switchboard, on_exit: OnExit) -> Cluster:
        """Return the cluster, which this process owns."""
        listener = switchboard.programs.listener
        connection = Connection(
            program_url=switchboard.program_url,
            control_url=switchboard.control_url,
            server_public=self.keys.server_public,
            client_public=self.keys.client_public,
            client_secret=self.keys.client_secret,
            notebook_pid=os.getpid(),
            listener=listener.path if listener is not None else "",
        )
        self._cluster = Cluster(
            self._plan.devices,
            connection,
            on_exit=on_exit,
            launcher=self._plan.launcher(connection),
            processes=self._processes,
        )
        return self._cluster

    def start(self, on_progress: Callable[[str], None]) -> None:
        """Start the engines, and import torch here while the engines import it: their replies need it."""
        meanwhile = _import_torch if self._store is None else self._store.serve
        assert self._cluster is not None
        self._cluster.start(on_progress=on_progress, meanwhile=meanwhile)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None]
    ) -> tuple[list[PlacedEngine], tuple[str, ...]]:
        """Return places that the plan allows."""
        return self._plan.place_further(there, count, on_progress)

    def joined(self) -> None:
        """Do nothing: all engines end with the notebook."""

    def close(self) -> None:
        """Remove the private directory, and close the transport and the store."""
        self._processes.close()
        self._plan.close()
        if self._store is not None:
            self._store.close()


class OwnedByDaemon(EngineOwner):
    """Engines of a detached cluster, to whose daemon this process is connected as its notebook."""

    def __init__(self, client: DaemonClient) -> None:
        self.client = client
        self.name = client.facts.name
        self.directory = client.facts.directory
        self.keys = client.facts.keys
        self.store = client.facts.store
        self.hosts = client.facts.hosts
        self.packages, self.sync = client.facts.packages, client.facts.sync

    def _listening(self) -> tuple[str | None, tuple[int, int] | None]:
        facts = self.client.facts
        return (None if facts.ports is None else facts.address), facts.ports

    def cluster(self, switchboard: Switchboard, on_exit: OnExit) -> DaemonClient:
        """Return the cluster, which the daemon owns."""
        self.client.on_exit = on_exit
        return self.client

    def start(self, on_progress: Callable[[str], None]) -> None:
        """Have the daemon start the engines, and import torch here meanwhile."""
        self.client.start(on_progress=on_progress, meanwhile=_import_torch)

    def when_lost(self, handle: OnLost) -> None:
        """Call a function when another notebook takes the cluster over, or when it ends."""
        self.client.when_lost(handle)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, on_progress: Callable[[str], None]
    ) -> tuple[list[PlacedEngine], tuple[str, ...]]:
        """Return places that the daemon's plan allows."""
        return self.client.place_further(there, count, on_progress)

    def joined(self) -> None:
        """Have the daemon keep them."""
        self.client.joined()

    def close(self) -> None:
        """Disconnect from the daemon."""
        self.client.close()


def plan_owner(options: StartOptions, on_progress: Callable[[str], None]) -> EngineOwner:
    """Plan a cluster, print the notices about it, and return the owner of its engines, which are not started yet."""
    place = place_of(options)
    if options.detach:
        without_resolver = dataclasses.replace(options, cluster_resolver=None)
        client = start_daemon(DaemonOptions(who=notebook_name(), options=without_resolver, place=place))
        try:
            client.plan(on_progress)
            raise_file_limit(client.facts.engines)  # the daemon raises its own
        except BaseException:
            client.stop()
            raise
        _print_notices(client.facts.notices)
        return OwnedByDaemon(client)
    plan = place.plan(options, on_progress)
    _print_notices(plan.notices)
    try:
        return OwnedByNotebook(plan, sync=options.sync)
    except BaseException:
        plan.close()
        raise


def connected_owner(name: str, *, take: bool) -> OwnedByDaemon:
    """Connect to the daemon of a detached cluster as its notebook.

    Raises:
        NoClusterError: There is no such cluster on this machine.
        ClusterError: Another notebook is connected.
    """
    client = DaemonClient(registry.find(name).socket)
    try:
        client.connect(notebook_name(), take=take)
        raise_file_limit(client.facts.engines)
    except BaseException:
        client.close()
        raise
    return OwnedByDaemon(client)


def _print_notices(notices: Iterable[str]) -> None:
    for notice in notices:
        print(f"distnb: {notice}", file=sys.stderr)


_import_torch = partial(importlib.import_module, "torch.distributed")
