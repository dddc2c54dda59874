"""The process groups of this process, which all of its code shares and any thread can abort.

A team of engines forms one group per generation. All communication uses it: distnb's own collectives, calls of
torch.distributed, DistributedDataParallel, and libraries. `process_group.py` guards it.

This module runs on the replicas.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from distnb.accelerators import device_of_rank, name_on_machine
from distnb.collectives.group import exits, rendezvous
from distnb.collectives.group.communicator_state import caught
from distnb.collectives.group.gloo_sockets import LOST_AFTER_S, give_up_on_silence
from distnb.collectives.group.interface import Group
from distnb.collectives.group.membership import Attempt, Membership
from distnb.collectives.group.process_group import GuardedProcessGroup
from distnb.collectives.group.rendezvous import StoreClient
from distnb.collectives.group.torch_state import TorchDistributed
from distnb.collectives.shared_memory import host
from distnb.compat.c10d_internals import PrefixStore
from distnb.errors import CollectiveError, CollectiveMismatchError, ProgramAborted, ProgramInterrupted
from distnb.topology import Device, Team, parse_device

__all__ = ["Memberships", "memberships"]

_logger = logging.getLogger("distnb.collectives")

_EXIT_GRACE_S = 3.0
_PERIOD_S = 0.1
_CAUGHT_S = 0.5  # an uncaught error has ended its program by then
_SCRIPT = -1  # the prefix of the key of a group that was joined from the environment
_INTERRUPTED = "The program was interrupted. Its replicas communicate again in the next program."
_SILENT = (
    f"The connection to another replica was lost: its machine has confirmed nothing for {LOST_AFTER_S:g} s. Is it "
    "down, or the network between?"
)


class Memberships:
    """The memberships of this process. The only instance is `memberships`.

    Attributes:
        joining: The joining under way, if one is.
        when_failed: Called with a program and a reason if that program caught an error that has ended it on all
            replicas, and continues.
    """

    def __init__(self) -> None:
        self.joining: Attempt | None = None
        self.when_failed: Callable[[int, str], object] | None = None
        self._memberships: dict[tuple[int, ...], Membership] = {}
        self._active: Membership | None = None
        self._torch = TorchDistributed()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tending: threading.Thread | None = None
        self._limits_held = False
        self._ordered = 0  # the latest program whose end was ordered here
        self._cause: tuple[BaseException, str] | None = None
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._in_forked_child)

    def join(
        self, team: Team, rank: int, device: Device, *, timeout_s: float | None = None, supervised: bool = False
    ) -> Group:
        """Make the group of this team and generation the default process group. Form it if it is new.

        Waits for the other replicas of the team without a time limit; `abort` ends the wait. The groups of other teams
        stay connected if they are of the newest generation. Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT. `supervised` means that a notebook orders the end of this replica's program by
        `abort` when another replica's program has failed.

        Raises:
            CollectiveError: Another replica did not arrive in time, or could not be reached.
            ProgramAborted: `abort` was called meanwhile.
        """
        active = self._active
        if active is not None and active.key == team.engines and active.generation == team.generation:
            return active.interface
        client = StoreClient.of(team)
        membership = self._join(team.engines, team, rank, device, client, timeout_s, team.has_own_devices, supervised)
        membership.set_environment(team)
        return membership.interface

    def _join(
        self,
        key: tuple[int, ...],
        team: Team,
        rank: int,
        device: Device,
        client: StoreClient,
        timeout_s: float | None,
        apart: bool,
        supervised: bool = False,
    ) -> Membership:
        self._torch.install()
        attempt = Attempt()
        with self._lock:
            self.joining = attempt
        try:
            for other in list(self._memberships.values()):
                if other.generation < team.generation and other.key != key:
                    other.suspend()
            membership = self._memberships.get(key)
            if membership is not None and (membership.rank != rank or membership.devices != team.devices):
                membership.suspend()
                membership = None
            if membership is None:
                membership = Membership(key, rank, device, team.devices, apart, supervised)
            if membership.generation != team.generation:
                _logger.info("replica %d joins generation %d of %s", rank, team.generation, key)
                membership.advance(team, client, attempt, timeout_s)
                _logger.info("generation %d of %s is formed: %s", team.generation, key, membership.backend_name)
                self._torch.set_store(membership.world, PrefixStore(f"{team.prefix}/user", client.store()))
            with self._lock:
                self._memberships[key] = self._active = membership
                self._torch.enter(membership.world)
            attempt.check()
        finally:
            with self._lock:
                self.joining = None
        if self._tending is None or not self._tending.is_alive():
            self._tending = threading.Thread(target=self._tend, name="distnb-groups", daemon=True)
            exits.note(self._tending)
            self._tending.start()
        return membership

    def leave(self) -> None:
        """Close the connections of the current group. The next `join` forms it again in the same generation.

        Needed for a team of one replica, which is not notified of a new generation.
        """
        with self._lock:
            if self._active is not None:
                _logger.info("leaving generation %d of %s", self._active.generation, self._active.key)
                self._active.suspend()
                self._active = None

    def join_from_env(self, *, sockets_only: bool = False, timeout_s: float | None = None) -> Group:
        """Join the group that torchrun or `distnb run` describes by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        A default group that the program has initialised before supplies the rank, the size and the store. With
        `sockets_only` Gloo is used even if each replica has a GPU of its own.

        Raises:
            CollectiveError: The variables are not set, or the others cannot be reached in time.
        """
        if self._active is not None:
            return self._active.interface
        found = self._torch.foreign_default()
        if found is not None:
            rank, size, store = found.rank, found.size, found.store
        else:
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise CollectiveError(
                    f"{', '.join(missing)} is not set: this process was not started as one of several replicas. "
                    "Start the program by `distnb run script.py -n 2` or by torchrun."
                )
            store, rank, size = next(iter(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        local = int(os.environ.get("LOCAL_RANK", rank))
        named = os.environ.get("DISTNB_DEVICE")  # `distnb run --devices …`: several replicas may share one
        device = parse_device(named) if named else device_of_rank(local)
        store = PrefixStore("distnb", store)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = PrefixStore(rendezvous.attempt(PrefixStore("starts", store), rank, size, timeout_s), store)
        card = rendezvous.Card(
            host=host.identity(), pid=os.getpid(), device=str(device), accelerator=name_on_machine(device)
        )
        where = PrefixStore("devices", store)
        cards = rendezvous.meet(where, rank, size, card, lambda absent: None, timeout_s=timeout_s)
        devices = tuple(parse_device(other.device) for other in cards)
        apart = not sockets_only and len({(other.host, other.accelerator) for other in cards}) == size
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
        if len({other.host for other in cards}) > 1:
            give_up_on_silence(port)
        team = Team(engines=tuple(range(size)), devices=devices, generation=0, store_host=address, store_port=port)
        membership = self._join(
            (_SCRIPT, *team.engines), team, rank, device, StoreClient(lambda: store), timeout_s, apart
        )
        if found is not None:
            membership.group.set_timeout(found.timeout)
        self.program_began(1)
        return membership.interface

    def current(self) -> Group | None:
        """Return the group that was joined last, or None."""
        return self._active.interface if self._active is not None else None

    def abort(self, reason: str, *, interrupted: bool = False) -> None:
        """End every collective of this process, now: it raises ProgramAborted, and so does every later one.

        If the user `interrupted`, they raise ProgramInterrupted, which is a KeyboardInterrupt as well.

        Safe from any thread and more than once. Waits in C++ (DistributedDataParallel's) end with a RuntimeError. The
        next generation of the group is formed by `join`.
        """
        with self._lock:
            if self.joining is not None:
                self.joining.reason = reason
            membership = self._active
        if membership is not None:
            _logger.info("aborting generation %d of %s: %s", membership.generation, membership.key, reason)
            membership.fail(ProgramInterrupted(_INTERRUPTED) if interrupted else ProgramAborted(reason))

    def hold_limits(self, on: bool) -> None:
        """Suspend all time limits, or restart them. Safe from any thread."""
        self._limits_held = on

    # -- programs ----------------------------------------------------------------------------------------------------

    def program_began(self, program: int) -> None:
        """Begin a program on this replica. Its serial number is equal on all replicas and increases.

        If an earlier program has set RANK or a related variable, it gets this replica's value again, with a notice.
        """
        if self._active is not None:
            changed = self._active.restore_environment()
            if changed:
                values = ", ".join(f"{name} was {value or 'deleted'}" for name, value in changed.items())
                print(
                    f"distnb: environment variables that an earlier cell changed are reset to this replica's values "
                    f"({values}). Set them in the cell that needs them.",
                    file=sys.stderr,
                )
            self._torch.program_began()
            self._active.begin(program)

    def program_completed(self) -> None:
        """End a program that has not failed on this replica: it calls no further collectives.

        If the program caught an error, wait until the others have ended theirs: they may reach a collective that the
        error left undone.

        Raises:
            CollectiveMismatchError: Another replica completed its part, too, with more or fewer collectives.
            BaseException: An error that the program caught left a collective undone; or that error's consequence,
                ProgramAborted, if the error has been raised before.
        """
        self._cause = None
        if self._active is not None:
            self._active.end(failed=False)
            self._active.group.calls.error = None

    def program_failed(self) -> None:
        """End a program that has failed on this replica: it calls no further collectives."""
        self._cause, active = None, self._active
        if active is None:
            return
        active.end(failed=True)
        self._cause = active.group.communicator.ended_program
        if self._cause is None and (left := active.error_left()) is not None:
            self._cause = left[0], caught(left[1])
        active.group.calls.error = None  # its traceback keeps the program's objects alive

    def pop_cause(self) -> tuple[BaseException | None, str]:
        """Return the error that ended the program on all replicas if it arose here, once.

        The text explains why the error ends the program even if the program caught it.
        """
        cause, self._cause = self._cause, None
        return cause or (None, "")

    # -- the process -------------------------------------------------------------------------------------------------

    def _groups(self) -> list[GuardedProcessGroup]:
        return [group for membership in list(self._memberships.values()) for group in membership.groups()]

    def _tend(self) -> None:
        """Examine, on a separate thread, waits in C++ and works that nobody waits for."""
        while not exits.ending.wait(_PERIOD_S):
            for group in self._groups():
                with suppress(Exception):  # this thread must live; errors are raised where somebody waits
                    communicator = group.communicator
                    if communicator.backends is not None and communicator.backends.connections.silent():
                        _logger.warning("a connection of the group is silent")
                        communicator.fail(CollectiveError(_SILENT))
                    communicator.tend(limits_held=self._limits_held)
            self._order_end()

    def _order_end(self) -> None:
        """Order the end of a program that continues for a while after an error that ends it."""
        membership = self._active
        if membership is None or self.when_failed is None or self._ordered == membership.group.program:
            return
        if membership.group.communicator.failed_for_s > _CAUGHT_S:
            self._ordered = membership.group.program
            self.when_failed(self._ordered, "an error left a collective undone")

    def _at_exit(self) -> None:
        membership = self._active
        if membership is not None and membership.key[0] == _SCRIPT:
            try:
                membership.end(failed=getattr(sys, "last_value", None) is not None)
            except CollectiveMismatchError as error:
                print(f"distnb: {error}", file=sys.stderr)
            except BaseException as error:  # noqa: BLE001  (an exit has nobody to raise it to)
                traceback.print_exception(error)
        if os.getpid() != self._pid:
            return
        exits.ending.set()
        until = time.monotonic() + _EXIT_GRACE_S
        for group in self._groups():
            group.communicator.end_process(until)
        exits.join_all(until)

    def _in_forked_child(self) -> None:
        """Forget all groups in a forked child, such as a DataLoader's worker, which is no replica.

        The child takes no lock, since the parent's threads may hold it, and destroys nothing, since destructors would
        wait for those threads.
        """
        if self._memberships:
            # Garbage of the parent can be the last to hold what Gloo's threads served.
            gc.freeze()
        else:
            self._pid = os.getpid()  # groups that it joins from now on are its own
        for group in self._groups():
            group.communicator.forget_in_child()
        self._active = None


memberships = Memberships()
