"""The membership of this process in one team: its world, process group and subgroups, from generation to generation."""

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
from distnb.collectives.group.torch_state import TorchState
from distnb.collectives.verify.collective_log import CollectiveLog
from distnb.compat.c10d_internals import HashStore
from distnb.errors import ProgramAborted
from distnb.topology import Device, Team

__all__ = ["Attempt", "Membership"]

_VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # as bytes, which need no decoding


class Attempt:
    """An attempt to join a group, which another thread can cancel.

    Attributes:
        reason: The reason for its cancellation, or None.
    """

    reason: str | None = None

    def check(self) -> None:
        """Raise ProgramAborted if it was cancelled."""
        if self.reason is not None:
            raise ProgramAborted(self.reason)


class Membership:
    """The membership of this replica in one team.

    Attributes:
        key: The team's key in this process.
        rank, device, devices: This replica's id, its device, and all replicas' devices.
        backend_name: The backend for tensors of the replicas' own devices; "gloo" if there is no other.
        device_types: The types of devices whose tensors the groups carry; `staged` ones go through host memory.
        interface: The group of this generation, as the rest of distnb uses it.
        client, prefix: The store of this generation, and the prefix of its keys.
        attempt, timeout_s: The attempt to join, and its time limit. None waits as long as all replicas are alive.
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
        # The devices' own backend needs a separate device for each replica (`apart`).
        alike = apart and len({each.type for each in devices}) == 1
        self.backend_name = (c10d_backend(device.type) if alike else None) or "gloo"
        self.device_types = tuple(dict.fromkeys(("cpu", device.type)))
        self.staged = frozenset(self.device_types[1:] if self.backend_name == "gloo" else ())
        self.attempt = Attempt()
        self.generation = -1
        self.group = GuardedProcessGroup(self, "world", range(len(devices)))
        kind = "cuda" if device.type == "cpu" else device.type
        config = f"cpu:gloo,{kind}:{self.backend_name}"
        self.world = TorchState.of_group(self.group, HashStore(), self.backend_name, config)
        self._environment: dict[str, str] = {}  # empty in a script, where the launcher has set it
        self._raw_environment: dict[bytes, bytes] = {}
        self._names: Counter[str] = Counter()
        self._subgroups: tuple[weakref.ref[GuardedProcessGroup], ...] = ()

    def make_subgroup(self, parent: GuardedProcessGroup, ranks: list[int], name: str) -> GuardedProcessGroup | None:
        """Return a part of a group of this team, or None if this replica is not in it."""
        if self.rank not in ranks:
            return None
        # Unlike torch's, a name is never used twice in a store: not after a destroyed group, nor in a later generation.
        self._names[name] += 1
        made = GuardedProcessGroup(self, f"part/{self.generation}/{name}/{self._names[name]}", ranks, parent)
        # Never changed in place: other threads read it.
        self._subgroups = (*(each for each in self._subgroups if each() is not None), weakref.ref(made))
        return made

    def groups(self) -> list[GuardedProcessGroup]:
        """Return the default group and all subgroups."""
        if not self._subgroups:
            return [self.group]
        return [self.group, *(group for each in self._subgroups if (group := each()) is not None)]

    # -- forming -----------------------------------------------------------------------------------------------------

    def advance(self, team: Team, client: StoreClient, attempt: Attempt, timeout_s: float | None) -> None:
        """Connect in the team's generation unless connected."""
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
            group.renew()  # subgroups connect at their first use
        self.generation = team.generation
        self.interface = Group(self.group, self.device, team.generation, self.devices)
        self.attempt = Attempt()

    def form(self, communicator: Communicator) -> tuple[Backends, CollectiveLog]:
        """Connect a communicator with the other replicas."""
        return Forming(communicator, self).run()

    def suspend(self) -> None:
        """Close the connections. Never blocks."""
        self.generation = -1
        self._names.clear()
        for group in self.groups():
            group.reset()

    def set_environment(self, team: Team) -> None:
        """Set the variables that torchrun would set. Programs select their GPU by LOCAL_RANK."""
        local_ranks = team.on_host_of(self.rank)
        local = local_ranks.index(self.rank) if self.device.type == "cpu" else self.device.index
        self._environment = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(len(self.devices)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(len(local_ranks)),
            "MASTER_ADDR": team.store_host,
            "MASTER_PORT": str(team.store_port),
        }
        os.environ.update(self._environment)
        self._raw_environment = {os.fsencode(name): os.fsencode(value) for name, value in self._environment.items()}

    def restore_environment(self) -> dict[str, str | None]:
        """Set the variables of `set_environment` again.

        Returns:
            The variables that a program had changed, with the values that it had set (None if it had deleted one).
        """
        if self._raw_environment.items() <= _VARIABLES.items():
            return {}
        changed = {name: found for name, own in self._environment.items() if (found := os.environ.get(name)) != own}
        if changed:
            os.environ.update(self._environment)
        return changed

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """Begin a program."""
        for group in self.groups():
            group.begin(program)

    def end(self, failed: bool) -> None:
        """End a program. All groups are notified before an error is raised."""
        problem: BaseException | None = None
        for group in self.groups():
            try:
                group.communicator.end_program(failed)
            except (Exception, ProgramAborted) as error:  # noqa: BLE001  (raised below)
                problem = problem or error
        if problem is not None:
            raise problem

    def error_left(self) -> tuple[BaseException, str] | None:
        """Return the error of this replica's program that left a collective undone, and a description of that, if
        any."""
        verifiers = [group.communicator.verifier for group in self.groups()]
        return next((left for each in verifiers if each is not None and (left := each.error_left())), None)

    def fail(self, error: BaseException) -> None:
        """End everything under way in this generation."""
        groups = self.groups()
        for group in groups:
            group.communicator.fail(error, abort=False)
        abort_all([made for group in groups if (made := group.communicator.backends) is not None])
