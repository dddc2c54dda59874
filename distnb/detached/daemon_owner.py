"""The owner of a detached cluster's engines, as the notebook sees it: their daemon."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distnb.cluster.engine_plan import EnginePlace, PlacedEngine
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.start_options import StartOptions
from distnb.detached import registry
from distnb.detached.daemon import DaemonOptions
from distnb.detached.daemon_client import DaemonClient, notebook_name, start_daemon
from distnb.detached.reconnection import restore_names, resume_programs
from distnb.detached.saved_names import SavedNames
from distnb.notebook.engine_owners import LastingOwner, OnExit, OnLost, import_torch, print_notices
from distnb.notebook.engines import Engines
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from distnb.notebook.session_part import Ask
from distnb.wire.channel import Switchboard

__all__ = ["OwnedByDaemon", "connect", "start"]


class OwnedByDaemon(LastingOwner):
    """Engines of a detached cluster, to whose daemon this process is connected as its notebook."""

    def __init__(self, client: DaemonClient) -> None:
        self._saved = SavedNames()
        self.client = client
        self.name = client.facts.name
        self.directory = client.facts.directory
        self.keys = client.facts.keys
        self.store = client.facts.store
        self.hosts = client.facts.hosts
        self.packages, self.folders = client.facts.packages, client.facts.folders

    def _listening(self) -> tuple[str | None, tuple[int, int] | None]:
        facts = self.client.facts
        return (None if facts.ports is None else facts.address), facts.ports

    def cluster(self, switchboard: Switchboard, on_exit: OnExit) -> DaemonClient:
        """Return the cluster, which the daemon owns."""
        self.client.on_exit = on_exit
        return self.client

    def start(self, on_progress: Callable[[str], None]) -> None:
        """Have the daemon start the engines, and import torch here meanwhile."""
        self.client.start(on_progress=on_progress, meanwhile=import_torch)

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

    def resume(
        self, engines: Engines, namespace: NotebookNamespace, ask: Ask, on_progress: Callable[[str], None]
    ) -> object:
        """Wait for programs that still run, show their output, and bind the names of the earlier notebook."""
        namespace.most_nbytes = self.client.facts.data_limit_nbytes
        idle_states = resume_programs(engines, on_progress)
        return restore_names(engines, namespace, ask, idle_states)

    def note_names(self, user_ns: Mapping[str, Any], program: int) -> None:
        """Save the names that are bound to engine objects, for the next notebook."""
        names = SavedNames.of(user_ns, program)
        if names != self._saved:
            try:
                names.save(self.directory)
            except FileNotFoundError:
                if self.directory.exists():
                    raise
                return  # the cluster has ended, which the next program reports
            self._saved = names

    def close(self) -> None:
        """Disconnect from the daemon."""
        self.client.close()


def start(options: StartOptions, place: EnginePlace, on_progress: Callable[[str], None]) -> OwnedByDaemon:
    """Start the daemon of a detached cluster, have it plan the cluster, and print the notices about that."""
    without_resolver = dataclasses.replace(options, on=None)
    client = start_daemon(DaemonOptions(who=notebook_name(), options=without_resolver, place=place))
    try:
        client.plan(on_progress)
        raise_file_limit(client.facts.engines)  # the daemon raises its own
    except BaseException:
        client.stop()
        raise
    print_notices(client.facts.notices)
    return OwnedByDaemon(client)


def connect(name: str, *, take: bool) -> OwnedByDaemon:
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
