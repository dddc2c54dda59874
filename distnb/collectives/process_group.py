"""The process group that torch and everyone above it see: each of its operations is recorded and can be aborted.

It stands in for Gloo's or NCCL's own group, which it holds inside. It outlives them: after an abort it forms new ones
for the next generation, so that a DistributedDataParallel module or a subgroup made in an earlier cell stays good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from distnb.collectives.board import Board
from distnb.collectives.identity import GroupIdentity
from distnb.collectives.ledger import Ledger
from distnb.collectives.shared_sum import SharedSum
from distnb.collectives.time_limit import TimeLimit, out_of_time
from distnb.collectives.transport import Transport
from distnb.collectives.waiting import Waits
from distnb.errors import CollectiveError, CollectiveMismatchError

__all__ = ["Formed", "GroupCore"]

_ABORT_GRACE_S = 0.5
_FAILED_GRACE_S = 3.0
_NOT_CONNECTED = (
    "This process group belongs to a team of replicas that is not the one that runs now, or to a generation that ended."
)

_OVER = (
    "That ended this process group, and no other collective can follow in it. A notebook's next cell gets a new group; "
    "a script has one for its whole run: correct what differs and start it again, instead of catching this error."
)


class Formed(Protocol):
    """What a process group gets when it is formed."""

    transport: Transport
    board: Board


class GroupCore(GroupIdentity):
    """State and failure of a guarded process group; `operations.GuardedProcessGroup` adds the operations.

    Args:
        rank, size: Who is who.
        label: Names the group among those of the team, the same on every replica.
        replicas: The replica id of each rank.
        form: Connects with the other ranks; called again after a reset, by the first operation.
        backend_name: What torch's `get_backend` says.
        device_types: The types of device whose tensors the group carries.
        make_subgroup: Makes the part of the group that `new_group` asks for: of this group, of these ranks, by name.
        parent: The group that this one is a part of.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        label: str,
        replicas: Sequence[int],
        form: Callable[[GroupCore], Formed],
        backend_name: str,
        device_types: Sequence[str],
        make_subgroup: Callable[[Any, list[int], str], Any],
        parent: GroupCore | None = None,
    ) -> None:
        super().__init__(rank, size, label, backend_name, device_types)
        self.epoch = 0
        self.failure: BaseException | None = None
        self.replicas = tuple(replicas)
        self.program: int = parent.program if parent is not None else 0
        self.label = label
        self._form = form
        self._make_subgroup = make_subgroup
        self._parent = parent
        self._transport: Transport | None = None
        self._ledger: Ledger | None = None
        self._own_waits: Waits | None = None
        self._shared: SharedSum | None = None
        self._issuing = threading.RLock()
        self._forming = threading.Lock()
        self._open: dict[int, Any] = {}
        self._watched: set[Any] = set()
        self._failed_since: float | None = None
        self._destroyed = False
        self._time_limit = TimeLimit()
        self.in_memory = True
        self._patience_s: float | None = None
        self._waiting_since: dict[int, float] = {}

    # -- life ------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta | None) -> None:
        """End the group if an operation of torch's takes longer than this; None, or torch's default: never."""
        self._time_limit.set(timeout)

    def prefer(self, patience_s: float | None, in_memory: bool) -> tuple[float | None, bool]:
        """What the strategy that computes now was told of communication. All replicas alike; returns what held before.

        Args:
            patience_s: How long one waits in one collective before it ends the group, for ever without it.
            in_memory: Whether memory that replicas share may be used instead of sockets."""
        before = self._patience_s, self.in_memory
        self._patience_s, self.in_memory = patience_s, in_memory
        return before

    def connect(self) -> None:
        """Connect with the other ranks now, and not in the first operation."""
        self._ready()

    def reset(self) -> None:
        """Forget the connections; every operation is refused until `renew`. Never blocks."""
        transport, opened, watched = self._transport, self._open, self._watched
        self.epoch += 1
        self._transport = self._ledger = self._shared = None
        self._open, self._watched = {}, set()
        self._time_limit.forget()
        self._waiting_since.clear()
        self.failure, self._failed_since = CollectiveError(_NOT_CONNECTED), None
        if transport is not None:
            transport.abort()
            transport.release(lambda: not _under_way(opened, watched))

    def renew(self) -> None:
        """The next operation connects again, for a new generation; unless the group was destroyed."""
        if not self._destroyed:
            self.failure = None

    def fail(self, error: BaseException, end_transport: bool = True) -> None:
        """End every operation under way, and all later ones until `reset`, with an error. Safe from any thread.

        Args:
            error: What all of them raise.
            end_transport: Whether to abort the transport too; else the caller does.
        """
        if self.failure is not None:
            return
        self.failure = error
        if isinstance(error, CollectiveMismatchError):
            for ledger in (self._ledger, self._parent._ledger if self._parent is not None else None):
                if ledger is not None:
                    ledger.tell(error)
        if self._transport is not None and end_transport:
            self._transport.abort()
        for work in list(self._watched):
            work.conclude()

    def abort(self) -> None:
        """What torch calls to end everything under way on this replica."""
        self.fail(CollectiveError("The process group was aborted."))

    def shutdown(self) -> None:
        """What torch calls to end a group that is no longer used; others may still be in their last operation."""
        transport, opened, watched = self._transport, self._open, self._watched
        self._destroyed = True
        self.failure = self.failure or CollectiveError("The process group was destroyed. Make a new one.")
        self._transport = self._ledger = None
        if transport is not None:
            transport.release(lambda: not _under_way(opened, watched))

    @property
    def transport(self) -> Transport | None:
        """What carries the data, while the group is connected."""
        return self._transport

    def end_process(self, until: float) -> None:
        """Before the interpreter ends: end what is under way, and the backends' threads.

        Args:
            until: When to stop waiting, as `time.monotonic` tells it.
        """
        transport, opened, watched = self._transport, self._open, self._watched
        if transport is None:
            return
        self.fail(CollectiveError("This replica's program has ended."), end_transport=_under_way(opened, watched))
        while _under_way(opened, watched) and time.monotonic() < until:
            time.sleep(0.01)
        self._transport = None
        transport.end(idle=not _under_way(opened, watched), until=until)

    def forget_in_child(self) -> None:
        """In a forked child: let go of the connections, which would otherwise stay open when the replica dies."""
        self.failure = CollectiveError(
            "A forked child of a replica, such as a DataLoader's worker, cannot take part in its collectives."
        )
        if self._transport is not None:
            self._transport.keep_for_ever()
            self._transport.connections.forget_in_child()

    def _ready(self) -> Transport:
        self._raise_if_failed()
        if self._transport is None:
            with self._forming:
                if self._transport is None:
                    formed = self._form(self)
                    ledger = Ledger(formed.board, self.replicas)
                    ledger.begin(self.program)
                    self._own_waits = Waits(formed.board)
                    self._shared = SharedSum.of(formed.board)
                    self._ledger, self._transport = ledger, formed.transport
            if self.failure is not None:  # aborted meanwhile
                self._transport.abort()
                self.raise_failure()
        return self._transport

    # -- programs --------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """A program began on this replica."""
        self.program = program
        if self._ledger is not None:
            self._ledger.begin(program)
        if self._own_waits is not None:
            self._own_waits.begin_program()

    def end(self, failed: bool) -> None:
        """The program ended on this replica.

        Raises:
            CollectiveMismatchError: It ended well, but so did others, with other counts.
            BaseException: It ended well, but the group had failed before, and nobody saw it.
        """
        ledger, failure = self._ledger, self.failure
        if ledger is not None:
            with self._issuing:
                ledger.end(failed or failure is not None)
            if failure is not None and not failed:
                self.raise_failure()

    # -- failure ---------------------------------------------------------------------------------------------------

    def _raise_if_failed(self) -> None:
        """Raise if an operation that begins now cannot: the group has ended before it."""
        if isinstance(self.failure, CollectiveMismatchError):
            raise CollectiveMismatchError(f"{self.failure} {_OVER}")
        if self.failure is not None:
            self.raise_failure()

    def raise_failure(self) -> NoReturn:
        """Raise what ended the group."""
        failure = self.failure
        assert failure is not None
        raise type(failure)(*failure.args) from None  # anew: one object would collect the traceback of every raise

    @property
    def _waits(self) -> Waits | None:
        """Where this replica tells for whom it waits: on the board of the whole team."""
        return self._own_waits if self._parent is None else self._parent._waits

    def check_forming(self, absent: Callable[[], list[int]]) -> None:
        """Look, while connecting, for reasons not to wait any longer.

        Args:
            absent: Gives the ranks that have not come yet.

        Raises:
            BaseException: The one that ended this group or the whole one, or CollectiveMismatchError if a replica
                cannot come any more.
        """
        parent = self._parent
        if self.failure is not None:
            self.raise_failure()
        if parent is None:
            return
        parent.examine(parent.epoch, None)
        try:
            if parent._ledger is not None:
                parent._mourn(parent._ledger.check_present(self.replicas))
            if self._waits is not None:
                names = [self.replicas[rank] for rank in absent()]
                what = f"the first collective of the process group of replicas {list(self.replicas)}"
                self._waits.on(self.label, 0, names, what)
        except CollectiveMismatchError as error:
            parent.fail(error)
            raise

    def examine(
        self, epoch: int, number: int | None, waiting: bool = True, mourning_s: float = _FAILED_GRACE_S
    ) -> None:
        """Look, while waiting, for reasons not to wait any longer.

        Args:
            epoch, number: Which operation; no number for messages.
            waiting: Whether this replica does nothing else meanwhile.
            mourning_s: How long a replica must be known to have ended with an error.

        Raises:
            BaseException: The one that ended the group, or CollectiveMismatchError if the ledger finds one now.
        """
        if epoch != self.epoch:
            raise CollectiveError(
                "This operation belonged to an earlier generation of the process group, which was aborted."
            )
        if self.failure is not None:
            self.raise_failure()
        ledger = self._ledger
        if ledger is None:
            return
        try:
            with self._issuing:
                ledger.check()
                failed = ledger.check_departed(number) if number is not None else []
            if waiting and number is not None and self._waits is not None:
                absent = [self.replicas[rank] for rank in ledger.absent(number)]
                self._waits.on(self.label, number, absent, ledger.told(number))
        except CollectiveMismatchError as error:
            self.fail(error)
            raise
        if waiting and number is not None and self._patience_s is not None:
            since = self._waiting_since.setdefault(number, time.monotonic())
            if time.monotonic() - since > self._patience_s:
                self.fail(self._out_of_time(number, self._patience_s))
                self.raise_failure()
        if self._parent is not None:
            try:
                self._parent.examine(self._parent.epoch, None)
            except Exception as error:
                self.fail(error)
                raise
        self._mourn(failed, mourning_s)

    def _mourn(self, failed: list[int], mourning_s: float = _FAILED_GRACE_S) -> None:
        """Raise if replicas ended their program with an error, some time after they did."""
        self._failed_since = (self._failed_since or time.monotonic()) if failed else None
        if self._failed_since is not None and time.monotonic() - self._failed_since >= mourning_s:
            # The notebook's side tells of failures much sooner; this is for programs that have no notebook.
            who = ", ".join(str(self.replicas[rank]) for rank in failed)
            self.fail(
                CollectiveError(
                    f"Replica {who} ended with an error, and will not come to the collective that this replica "
                    "waits in."
                )
            )
            self.raise_failure()

    def explain(self, epoch: int, number: int | None, error: BaseException) -> NoReturn:
        """Raise what an operation that failed in the backend means."""
        # Most likely another replica was aborted or died, and who watches over both will say so in a moment.
        until = time.monotonic() + _ABORT_GRACE_S
        while time.monotonic() < until:
            self.examine(epoch, number)
            time.sleep(0.01)
        self.examine(epoch, number, mourning_s=0.0)  # what ended with an error takes its connections along
        self.fail(CollectiveError(f"The connection to another replica was lost, which may have died: {error}"))
        self.raise_failure()

    def ran_out_of_time(self, epoch: int, number: int | None, limit_s: float) -> NoReturn:
        """Raise that the time limit which the caller gave is over."""
        self.examine(epoch, number)
        raise self._out_of_time(number, limit_s)

    def _out_of_time(self, number: int | None, limit_s: float) -> CollectiveError:
        return out_of_time(self._ledger, self.replicas, number, limit_s)

    # -- bookkeeping of works --------------------------------------------------------------------------------------

    def watch(self, work: Any) -> None:
        """Have a work concluded by an abort."""
        self._watched.add(work)
        if self.failure is not None:
            work.conclude()

    def finished(self, work: Any) -> None:
        """Forget a work that ended, unless somebody has yet to be told."""
        self._open.pop(work.number, None)  # none of a message
        self._waiting_since.pop(work.number, None)
        if work in self._watched and not work.under_way():
            self._watched.discard(work)

    def waited(self) -> None:
        """A wait that was long enough to be told of is over."""
        if self._waits is not None:
            self._waits.over()

    def tend(self) -> None:
        """Called ten times a second on a thread of its own: for waits in C++, and for works that nobody waits for."""
        for number, inner in list(self._open.items()):
            if inner.is_completed():
                self._open.pop(number, None)
        overdue = self._time_limit.overdue()
        if overdue is not None:
            self.fail(self._out_of_time(*overdue))
        numbers, epoch = list(self._open), self.epoch
        if numbers and self.failure is None:
            try:
                self.examine(epoch, min(numbers), waiting=False)
            except Exception as error:  # noqa: BLE001  (raised where somebody waits)
                if epoch == self.epoch:
                    self.fail(error)


def _under_way(opened: dict[int, Any], watched: set[Any]) -> bool:
    if any(not inner.is_completed() for inner in list(opened.values())):
        return True
    return any(work.under_way() for work in list(watched))
