"""This process as a member of one team: its world, its process group and subgroups, from generation to generation."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore

from distnb.accelerators import c10d_backend, torch_device
from distnb.collectives.group import backends, exits
from distnb.collectives.group.backends import Carrier
from distnb.collectives.group.forming import Forming, Parts
from distnb.collectives.group.gloo_sockets import LOST_AFTER_S
from distnb.collectives.group.guarded_operations import GuardedProcessGroup
from distnb.collectives.group.process_group import GroupCore
from distnb.collectives.group.rendezvous import StoreClient
from distnb.collectives.group.world import World
from distnb.errors import CollectiveError, ProgramAborted
from distnb.topology import Device, Team

__all__ = ["Attempt", "Member", "tend_all"]

_PERIOD_S = 0.1
_SILENT = (
    f"The connection to another replica was lost: its machine has confirmed nothing for {LOST_AFTER_S:g} s. Is it "
    "down, or the network between?"
)


class Attempt:
    """A joining under way, which can be given up from another thread."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def abort(self, reason: str) -> None:
        """Give it up."""
        self._reason = reason

    def check(self) -> None:
        """Raises ProgramAborted if it was given up."""
        if self._reason is not None:
            raise ProgramAborted(self._reason)


def _nothing() -> None:
    """No attempt is under way that could be given up."""


class Member:
    """One team, as this replica of it sees it.

    Args:
        key: Names the team in this process.
        rank: Which replica this is.
        device: This replica's device.
        devices: Every replica's.
        apart: Whether each replica has a device of its own.
    """

    def __init__(
        self, key: tuple[int, ...], rank: int, device: Device, devices: tuple[Device, ...], apart: bool
    ) -> None:
        self.key = key
        self.rank = rank
        self.size = len(devices)
        self.device = device
        self.devices = devices
        self._apart = apart
        self._backend = self._device_backend()
        self.generation = -1
        self.group = self._group(rank, range(self.size), "world", None)
        self.world = World(self.group, HashStore(), self._backend_name, self._backend_config)
        self._names: Counter[str] = Counter()
        self._subgroups: tuple[weakref.ref[GuardedProcessGroup], ...] = ()
        self._client: StoreClient | None = None
        self._prefix = ""
        self._attempt: Attempt | None = None
        self._timeout_s: float | None = None

    # -- which backends ----------------------------------------------------------------------------------------------

    def _device_backend(self) -> str | None:
        """That of the replicas' devices; it needs one for each replica."""
        kinds = {device.type for device in self.devices}
        return c10d_backend(self.device.type) if self._apart and len(kinds) == 1 else None

    @property
    def _backend_name(self) -> str:
        return self._backend or "gloo"

    @property
    def _backend_config(self) -> str:
        kind = "cuda" if self.device.type == "cpu" else self.device.type
        return f"cpu:gloo,{kind}:{self._backend_name}"

    def _group(self, rank: int, replicas: Any, name: str, parent: GuardedProcessGroup | None) -> GuardedProcessGroup:
        return GuardedProcessGroup(
            rank,
            len(replicas),
            label=name,
            replicas=replicas,
            form=self._form,
            backend_name=self._backend_name,
            device_types=list(dict.fromkeys(("cpu", self.device.type))),
            parent=parent,
            make_subgroup=self._make_subgroup,
        )

    def _make_subgroup(self, parent: GuardedProcessGroup, ranks: list[int], name: str) -> GuardedProcessGroup | None:
        if self.rank not in ranks:
            return None
        # Unlike torch's, a name is never used twice in a store: not after a destroyed group, nor in a later generation.
        self._names[name] += 1
        made = self._group(ranks.index(self.rank), ranks, f"part/{self.generation}/{name}/{self._names[name]}", parent)
        # Never changed in place: other threads look at it.
        self._subgroups = (*(each for each in self._subgroups if each() is not None), weakref.ref(made))
        return made

    # -- forming -----------------------------------------------------------------------------------------------------

    def advance(self, team: Team, client: StoreClient, attempt: Attempt, timeout_s: float | None) -> None:
        """Be connected in the team's generation."""
        if self.generation == team.generation:
            if self.group.has_ended:
                raise CollectiveError(
                    f"Generation {team.generation} of this team's process group was aborted. Join a newer one."
                )
            return
        self.suspend()
        self._client, self._prefix, self._attempt, self._timeout_s = client, team.prefix, attempt, timeout_s
        self.group.renew()
        try:
            self.group.connect()
        except BaseException:
            self.suspend()
            raise
        for group in self.groups():
            group.renew()  # the parts connect when they are first used
        self.generation = team.generation
        self.world.set_store(PrefixStore(f"{team.prefix}/user", client.store()))
        self._attempt = None

    def _form(self, group: GroupCore) -> Parts:
        assert self._client is not None
        carrier = None
        if self._backend is not None:
            carrier = Carrier(self._backend, torch_device(self.device), group.label, tuple(group.replicas))
        return Forming(
            group,
            self._client,
            self._prefix,
            str(self.device),
            carrier=carrier,
            staged=frozenset({self.device.type} - {"cpu"}) if carrier is None else frozenset(),
            give_up=self._attempt.check if self._attempt is not None else _nothing,
            timeout_s=self._timeout_s,
        ).run()

    # -- life --------------------------------------------------------------------------------------------------------

    def groups(self) -> list[GuardedProcessGroup]:
        """The default group and all subgroups."""
        if not self._subgroups:
            return [self.group]
        return [self.group, *(group for each in self._subgroups if (group := each()) is not None)]

    def suspend(self) -> None:
        """Drop the connections. Never blocks."""
        self.generation = -1
        self._names.clear()
        for group in self.groups():
            group.reset()

    def fail(self, error: BaseException) -> None:
        """End everything under way in this generation."""
        groups = self.groups()
        for group in groups:
            group.fail(error, end_transport=False)
        backends.abort_all([group.transport for group in groups if group.transport is not None])

    def begin(self, program: int) -> None:
        """A program began."""
        for group in self.groups():
            group.begin(program)

    def end(self, failed: bool) -> None:
        """A program ended. All groups are told before any difference is raised."""
        problem: Exception | None = None
        for group in self.groups():
            try:
                group.end(failed)
            except Exception as error:  # noqa: BLE001  (raised below)
                problem = problem or error
        if problem is not None:
            raise problem

    @property
    def was_disturbed(self) -> bool:
        """Whether errors that the program caught have left a group less than whole."""
        return any(group.was_disturbed for group in self.groups())

    def end_process(self, until: float) -> None:
        """Before the interpreter ends: see to it that no thread of the groups' backends needs it any more."""
        for group in self.groups():
            group.end_process(until)

    def forget_in_child(self) -> None:
        """In a forked child: see to it that nothing here is used or destroyed, and that no connection is kept open."""
        for group in self.groups():
            group.forget_in_child()

    def set_environment(self, team: Team) -> None:
        """What torchrun would have set."""
        if self.key[0] < 0:
            return  # it came from the environment
        # Programs select their GPU by LOCAL_RANK.
        beside = team.beside(self.rank)
        local = beside.index(self.rank) if self.device.type == "cpu" else self.device.index
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(local),
            LOCAL_WORLD_SIZE=str(len(beside)),
            MASTER_ADDR=team.store_host,
            MASTER_PORT=str(team.store_port),
        )


# -- the thread that looks after waits in C++ ------------------------------------------------------------------------

_tending = threading.Lock()
_thread: threading.Thread | None = None


def tend_all(members: Mapping[Any, Member]) -> None:
    """Start the thread that looks after all groups, once in this process."""
    global _thread
    with _tending:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_tend, args=(members,), name="distnb-groups", daemon=True)
            exits.note(_thread)
            _thread.start()


def _tend(members: Mapping[Any, Member]) -> None:
    while not exits.ending.wait(_PERIOD_S):
        for member in list(members.values()):
            for group in member.groups():
                with suppress(Exception):  # this thread must live; what is wrong is raised where somebody waits
                    if group.transport is not None and group.transport.connections.silent():
                        group.fail(CollectiveError(_SILENT))
                    group.tend()
