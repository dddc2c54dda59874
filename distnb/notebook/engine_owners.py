"""The owner of a session's engines: the notebook's process itself, or one that a feature adds.

Engines that stay when the notebook ends have another owner. The extension point "clusters that stay" has these names:

    start      makes the owner of a new cluster, given its options, its place and a function that shows progress
    connect    makes the owner of a cluster that another notebook has started, given its name
    list       has `rows()` and HEADER, the table of the user's clusters
    absence    the engine's behaviour while no notebook is connected: see `distnb.engine.absence`

Both owners are a `LastingOwner`.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distnb import features
from distnb.cluster.connection import Connection, Keys, make_keys
from distnb.cluster.engine_plan import EnginePlan, PlacedEngine, place_of
from distnb.cluster.lifecycle import Cluster, RunningCluster
from distnb.cluster.local.processes import Processes
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.cluster.start_options import StartOptions
from distnb.topology import Task
from distnb.wire.channel import Switchboard

if TYPE_CHECKING:
    from distnb.notebook.engines import Engines
    from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
    from distnb.notebook.session_part import Ask

__all__ = [
    "EngineOwner",
    "LastingOwner",
    "OnExit",
    "OnLost",
    "OwnedByNotebook",
    "import_torch",
    "plan_owner",
    "print_notices",
]

OnExit = Callable[[int, int, str], None]
"""A function called with (engine, pid, status in words) when an engine ends unexpectedly."""

OnLost = Callable[[str, str], None]
"""A function called with (what has become of each engine, the reason with its cure) when the cluster is lost."""


class EngineOwner(ABC):
    """The owner of the engines' processes, of the cluster's directory and keys, and of the store.

    Attributes:
        directory: The cluster's private directory.
        keys: The cluster's keys.
        tasks: The task of each engine; empty if all engines are alike.
        store: The address of the rendezvous store, or None if the engines meet by files.
        name: The name under which another notebook connects to engines that stay; "" if they end with this one.
        hosts: The machine of each engine that does not run on this one.
        packages: The versions of the packages on each of these machines.
        folders: The notebook's folders that are sent to them.
    """

    directory: Path
    keys: Keys
    tasks: tuple[Task, ...] = ()
    store: tuple[str, int] | None = None
    name = ""
    hosts: Mapping[int, str] = MappingProxyType({})
    packages: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    folders: tuple[str, ...] = ()

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

    def note_names(self, user_ns: Mapping[str, Any], program: int) -> None:  # noqa: B027  (engines may end with it)
        """Note the names of the notebook's namespace, and the latest program whose end it has seen, for a later one."""

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


class LastingOwner(EngineOwner):
    """An owner of engines that stay when the notebook ends."""

    @abstractmethod
    def resume(
        self, engines: Engines, namespace: NotebookNamespace, ask: Ask, on_progress: Callable[[str], None]
    ) -> object:
        """Take up the engines where an earlier notebook has left them, and bind its names.

        Return a description of the names, for the user.
        """


class OwnedByNotebook(EngineOwner):
    """Engines that end with this process. `processes` supervises them, and is closed with the owner.

    Raises:
        StartError: The store could not be made.
    """

    def __init__(self, plan: EnginePlan, processes: Processes) -> None:
        self._plan = plan
        self.tasks = plan.tasks
        self.hosts, self.packages, self.folders = dict(enumerate(plan.hosts)), plan.packages, plan.folders
        self.keys = make_keys()
        self._processes = processes
        self.directory = processes.directory
        self._store: RendezvousStore | None = None
        self._cluster: Cluster | None = None
        if plan.hosts:
            self._store = RendezvousStore(host=plan.address)
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
        meanwhile = import_torch if self._store is None else self._store.serve
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
        """Close the transport and the store, and remove the private directory."""
        self._plan.close()
        self._processes.close()
        if self._store is not None:
            self._store.close()


def plan_owner(options: StartOptions, on_progress: Callable[[str], None]) -> EngineOwner:
    """Plan a cluster, print the notices about it, and return the owner of its engines, which are not started yet."""
    place = place_of(options)
    if options.detach:
        staying: EngineOwner = features.require("clusters that stay", "start")(options, place, on_progress)
        return staying
    processes = Processes()
    with ExitStack() as planned:
        planned.callback(processes.close)
        plan = place.plan(options, processes, on_progress)
        planned.callback(plan.close)
        print_notices(plan.notices)
        owner = OwnedByNotebook(plan, processes)
        planned.pop_all()
    return owner


def print_notices(notices: Iterable[str]) -> None:
    """Print the notices about a cluster's plan."""
    for notice in notices:
        print(f"distnb: {notice}", file=sys.stderr)


import_torch = partial(importlib.import_module, "torch.distributed")
