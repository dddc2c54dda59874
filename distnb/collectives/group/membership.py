"""This process as a member of one team: its world, its process group and subgroups, from generation to generation."""

from __future__ import annotations

import os
import weakref
from collections import Counter

from distnb.accelerators import c10d_backend
from distnb.collectives.group.backends import Backends, abort_all
from distnb.collectives.group.communicator import Communicator
from distnb.collectives.group.forming import Forming
from distnb.collectives.group.interface import Group
from distnb.collectives.group.process_group import GuardedProcessGroup
from distnb.collectives.group.rendezvous import StoreClient
from distnb.collectives.group.world import World
from distnb.collectives.verify.collective_log import CollectiveLog
from distnb.compat.c10d_internals import HashStore
from distnb.errors import ProgramAborted
from distnb.topology import Device, Team

__all__ = ["Attempt", "Member"]


class Attempt:
    """A joining, which can be given up from another thread.

    Attributes:
        reason: Why it was given up, if it was.
    """

    reason: str | None = None

    def check(self) -> None:
        """Raises ProgramAborted if it was given up."""
        if self.reason is not None:
            raise ProgramAborted(self.reason)


class Member:
    """One team, as this replica of it sees it.

    Attributes:
        key: Names the team in this process.
        rank, device, devices: Which replica this is; its device, and everyone's.
        backend_name: What carries tensors of the replicas' own devices; "gloo" does where nothing else can.
        device_types: Whose tensors the groups carry; those that are `staged` go through host memory.
        interface: The group of this generation, as the rest of distnb uses it.
        client, prefix: Where in which store this generation meets.
        attempt, timeout_s: The joining, and how long it waits for the others; None for as long as there is hope.
        supervised: Whether a notebook orders the end of this replica's program when another replica's has failed.
    """

    client: StoreClient
    interface: Group
    timeout_s: float | None = None
    prefix = ""

    def __init__(
        self,
        key: tuple[int, ...],
        rank: int,
        device: Device,
        devices: tuple[Device, ...],
        apart: bool,
        supervised: bool,
    ) -> None:
        self.key = key
        self.rank = rank
        self.device = device
        self.devices = devices
        self.supervised = supervised
        # The devices' own backend needs one of them for each replica: `apart` says whether there is.
        alike = apart and len({each.type for each in devices}) == 1
        self.backend_name = (c10d_backend(device.type) if alike else None) or "gloo"
        self.device_types = tuple(dict.fromkeys(("cpu", device.type)))
        self.staged = frozenset(self.device_types[1:] if self.backend_name == "gloo" else ())
        self.attempt = Attempt()
        self.generation = -1
        self.group = GuardedProcessGroup(self, "world", range(len(devices)))
        kind = "cuda" if device.type == "cpu" else device.type
        config = f"cpu:gloo,{kind}:{self.backend_name}"
        self.world = World.of_group(self.group, HashStore(), self.backend_name, config)
        self._environment: dict[str, str] = {}  # empty in a script: there the launcher has set it
        self._names: Counter[str] = Counter()
        self._subgroups: tuple[weakref.ref[GuardedProcessGroup], ...] = ()

    def make_subgroup(self, parent: GuardedProcessGroup, ranks: list[int], name: str) -> GuardedProcessGroup | None:
        """A part of a group of this team; None if this replica is not in it."""
        if self.rank not in ranks:
            return None
        # Unlike torch's, a name is never used twice in a store: not after a destroyed group, nor in a later generation.
        self._names[name] += 1
        made = GuardedProcessGroup(self, f"part/{self.generation}/{name}/{self._names[name]}", ranks, parent)
        # Never changed in place: other threads look at it.
        self._subgroups = (*(each for each in self._subgroups if each() is not None), weakref.ref(made))
        return made

    def groups(self) -> list[GuardedProcessGroup]:
        """The default group and all subgroups."""
        return [self.group, *(group for each in self._subgroups if (group := each()) is not None)]

    # -- forming -----------------------------------------------------------------------------------------------------

    def advance(self, team: Team, client: StoreClient, attempt: Attempt, timeout_s: float | None) -> None:
        """Be connected in the team's generation."""
        if self.generation == team.generation:
            return
        self.suspend()
        self.client, self.prefix, self.attempt, self.timeout_s = client, team.prefix, attempt, timeout_s
        self.group.renew()
        try:
            self.group.ready()
        except BaseException:
            self.suspend()
            raise
        for group in self.groups()[1:]:
            group.renew()  # the parts connect when they are first used
        self.generation = team.generation
        self.interface = Group(self.group, self.device, team.generation, self.devices)
        self.attempt = Attempt()

    def form(self, communicator: Communicator) -> tuple[Backends, CollectiveLog]:
        """Connect one with the other replicas."""
        return Forming(communicator, self).run()

    def suspend(self) -> None:
        """Drop the connections. Never blocks."""
        self.generation = -1
        self._names.clear()
        for group in self.groups():
            group.reset()

    def set_environment(self, team: Team) -> None:
        """What torchrun would have set; programs select their GPU by LOCAL_RANK."""
        beside = team.on_host_of(self.rank)
        local = beside.index(self.rank) if self.device.type == "cpu" else self.device.index
        self._environment = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(len(self.devices)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": team.store_host,
            "MASTER_PORT": str(team.store_port),
        }
        os.environ.update(self._environment)

    def restore_environment(self) -> dict[str, str | None]:
        """Set the variables of `set_environment` again.

        Returns:
            Each variable that a program had changed, with the value that it had left there (None: it was deleted).
        """
        changed = {name: found for name, own in self._environment.items() if (found := os.environ.get(name)) != own}
        if changed:
            os.environ.update(self._environment)
        return changed

    # -- programs ----------------------------------------------------------------------------------------------------

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

    def error_left(self) -> BaseException | None:
        """Return the error by which this replica left a collective in which another one waits, if one did."""
        verifiers = [group.communicator.verifier for group in self.groups()]
        undone = any(verifier.left_undone() for verifier in verifiers if verifier is not None)
        return self.group.regions.error if undone else None

    def fail(self, error: BaseException) -> None:
        """End everything under way in this generation."""
        groups = self.groups()
        for group in groups:
            group.fail(error, abort=False)
        abort_all([made for group in groups if (made := group.communicator.backends) is not None])
