"""The process group that torch and everyone above it see: each of its operations is recorded and can be aborted.

It stands in for Gloo's or NCCL's own group, which it holds inside. It outlives them: after an abort it forms new ones
for the next generation, so that a DistributedDataParallel module or a subgroup made in an earlier cell stays good. A
program that catches an error of a collective goes on: the next one that all replicas reach forms the group anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from distnb.collectives.group.backends import Backends
from distnb.collectives.group.identity import GroupIdentity
from distnb.collectives.group.regions import Regions, Standing
from distnb.collectives.group.time_limit import TimeLimit, out_of_time
from distnb.collectives.group.waiting import Waits
from distnb.collectives.shared_memory.shared_sum import SharedSum
from distnb.collectives.verify.collective_log import CollectiveLog
from distnb.collectives.verify.verifier import Superseded, Verifier
from distnb.errors import CollectiveError, CollectiveMismatchError

__all__ = ["Formed", "GroupCore"]

_ABORT_GRACE_S = 0.5
_FAILED_GRACE_S = 3.0
_LEFT_GRACE_S = 0.5  # an error that nobody catches ends the program by then, and is told as itself
_NOT_CONNECTED = (
    "This process group belongs to a team of replicas that is not the one that runs now, or to a generation that ended."
)


class Formed(Protocol):
    """What a process group gets when it is formed."""

    transport: Backends
    board: CollectiveLog


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

    Attributes:
        failure: What ended the group, or this forming of it.
        breaks: How often it was formed anew in this generation.
        half_met: Whether what ended it last was a replica that an error had taken elsewhere.
        regions: Where this replica is in its program.
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
        self.breaks = 0
        self.half_met = False
        self.regions: Regions = parent.regions if parent is not None else Regions()
        self.regions.tell(self)
        self._standing = Standing(self.regions)
        self._mendable = self._told = self._broke_in_program = False
        self._former: Verifier | None = None
        self.replicas = tuple(replicas)
        self.program: int = parent.program if parent is not None else 0
        self.label = label
        self._form = form
        self._make_subgroup = make_subgroup
        self._parent = parent
        self._transport: Backends | None = None
        self._ledger: Verifier | None = None
        self._own_waits: Waits | None = None
        self._shared: SharedSum | None = None
        self._issuing = threading.RLock()
        self._forming = threading.Lock()
        self._failing = threading.Lock()
        self._open: dict[int, Any] = {}
        self._watched: set[Any] = set()
        self._failed_since: float | None = None
        self._left_since: float | None = None
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
        self._drop()
        self.failure, self._mendable = CollectiveError(_NOT_CONNECTED), False
        self._former, self.breaks = None, 0
        self._standing.forget()

    def _drop(self) -> None:
        transport, opened, watched = self._transport, self._open, self._watched
        self.epoch += 1
        self._transport = self._ledger = self._shared = None
        self._open, self._watched = {}, set()
        self._time_limit.forget()
        self._waiting_since.clear()
        self._failed_since = self._left_since = None
        if transport is not None:
            transport.abort()
            transport.release(lambda: not _under_way(opened, watched))

    def renew(self) -> None:
        """The next operation connects again, for a new generation; unless the group was destroyed."""
        if not self._destroyed:
            self.failure = None

    def fail(
        self, error: BaseException, end_transport: bool = True, *, mendable: bool = False, told: bool = False
    ) -> None:
        """End every operation under way, and all later ones until `reset`, with an error. Safe from any thread.

        Args:
            error: What all of them raise.
            end_transport: Whether to abort the transport too; else the caller does.
            mendable: Whether the next operation after the program has heard of it forms the group anew.
            told: Whether the program hears of it from the caller.
        """
        with self._failing:
            if self.failure is not None and (mendable or not self._mendable):
                self._told |= told
                return
            self.failure, self._mendable, self._told = error, mendable, told
        ledger = self._ledger
        if mendable and ledger is not None and isinstance(error, CollectiveError):
            self._broke_in_program, self.half_met = True, ledger.half_met
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
    def transport(self) -> Backends | None:
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

    def _ready(self) -> Backends:
        if self.failure is not None:
            self._mend()
        if self._transport is None:
            with self._forming:
                if self._transport is None:
                    self._connect()
            if self.failure is not None:  # aborted meanwhile
                if (made := self.transport) is not None:
                    made.abort()
                self.raise_failure()
        transport = self.transport
        assert transport is not None
        return transport

    def _connect(self) -> None:
        try:
            formed = self._form(self)
        except BaseException as error:
            if self.breaks:
                text = str(error) if isinstance(error, CollectiveError) else "The forming of a group was broken off."
                self.fail(CollectiveError(text))
            raise
        ledger = Verifier(formed.board, self.replicas, standing=self._standing, breaks=self.breaks)
        ledger.begin(self.program)
        self._own_waits = Waits(formed.board)
        self._shared = SharedSum.of(formed.board)
        self._ledger, self._transport, self._former = ledger, formed.transport, None

    def _mend(self) -> None:
        """Leave a group that broke, so that a new one is formed; raise if nobody has heard of it, or it is the end."""
        if not (self._mendable and self._told):
            self.raise_failure()
        with self._forming:
            if self.failure is None:
                return  # another thread has done it
            self._former = self._ledger or self._former
            self._drop()
            self.breaks += 1
            with self._failing:
                if self._mendable:  # and no order to end has come meanwhile
                    self.failure, self._mendable = None, False

    def supersede(self, found: Superseded) -> None:
        """Leave this group for a new one without an error, since this replica had its own."""
        if self._ledger is not None:
            self._ledger.begin_again()
        self.fail(found.error, mendable=True, told=True)

    @property
    def meeting(self) -> str:
        """Where in the store the replicas meet to form the group: another place each time."""
        return f"{self.label}/{self.breaks}" if self.breaks else self.label

    @property
    def disturbances(self) -> tuple[int, int]:
        """Grows where replicas meet after an error, at the same collective on all: state may be half-way."""
        return self._standing.disturbed

    def left(self, low: int, high: int, text: str) -> None:
        """An error left these regions on this replica."""
        if self._ledger is not None:
            self._ledger.left(low, high, text)
        else:
            self._standing.leave(low, high, text)

    # -- programs --------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """A program began on this replica."""
        self.program = program
        self._broke_in_program = False
        if self._parent is None:
            self.regions.begin_program()
        self._standing.forget()
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
        ledger, failure = self._ledger or self._former, self.failure
        caught = self._mendable and self._told
        if ledger is not None:
            with self._issuing:
                ledger.end(failed or (failure is not None and not caught), whole=failure is None and not self._former)
            if failure is not None and not failed and not caught:
                self.raise_failure()

    @property
    def has_ended(self) -> bool:
        """Whether no operation can follow in this generation."""
        return self.failure is not None and not self._mendable

    @property
    def was_disturbed(self) -> bool:
        """Whether the program's errors have left the group, or what replicas agreed on, less than whole."""
        standing = self._standing
        return self._broke_in_program or self.failure is not None or standing.excused or standing.disturbed > (0, 0)

    # -- failure ---------------------------------------------------------------------------------------------------

    def raise_failure(self) -> NoReturn:
        """Raise what ended the group."""
        failure = self.failure
        assert failure is not None
        self._told = True
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
        parent, former = self._parent, self._former
        if self.failure is not None:
            self.raise_failure()
        if former is not None:
            self._mourn(former.check_gone())
        if parent is not None:
            parent.examine(parent.epoch, None)
        elif former is None:
            return
        try:
            if parent is not None and parent._ledger is not None:
                parent._mourn(parent._ledger.check_present(self.replicas))
            if self._waits is not None:
                names = [self.replicas[rank] for rank in absent()]
                what = f"the first collective of the process group of replicas {list(self.replicas)}"
                self._waits.on(self.meeting, 0, names, what)
        except CollectiveMismatchError as error:
            if parent is not None:
                parent.fail(error, mendable=True, told=True)
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
        if not (waiting and number in self._open):  # the thread that tends the groups does it for who waits there
            ledger.exchange()
        try:
            with self._issuing:
                ledger.check()
                failed = ledger.check_departed(number) if number is not None else []
                left = ledger.departed(number) if number is not None else ""
            if waiting and number is not None and self._waits is not None:
                absent = [self.replicas[rank] for rank in ledger.absent(number)]
                self._wait_on(number, absent, ledger.told(number))
            self._miss(ledger, left)
        except CollectiveError as error:
            self.fail(error, mendable=True, told=waiting)
            raise
        if waiting and number is not None and self._patience_s is not None:
            since = self._waiting_since.setdefault(number, time.monotonic())
            if time.monotonic() - since > self._patience_s:
                self.fail(self._out_of_time(number, self._patience_s), mendable=True)
                self.raise_failure()
        if self._parent is not None:
            try:
                self._parent.examine(self._parent.epoch, None, waiting)
            except Exception as error:
                self.fail(error, mendable=self._parent._mendable, told=waiting)
                raise
        self._mourn(failed, mourning_s)

    def _wait_on(self, number: int, absent: list[int], text: str) -> None:
        """Tell for whom this replica waits. A circle of waits breaks the whole group too, in which others wait."""
        assert self._waits is not None
        try:
            self._waits.on(self.label, number, absent, text)
        except CollectiveMismatchError as error:
            if self._parent is not None:
                self._parent.fail(error, mendable=True, told=True)
            raise

    def _miss(self, ledger: Verifier, text: str) -> None:
        """Raise if a replica left where this one waits, some time after its error did."""
        self._left_since = (self._left_since or time.monotonic()) if text else None
        if self._left_since is not None and time.monotonic() - self._left_since >= _LEFT_GRACE_S:
            ledger.half_met = True
            raise CollectiveError(text)

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
            self.fail(self._out_of_time(*overdue), mendable=True)
        numbers, epoch, ledger = list(self._open), self.epoch, self._ledger
        if ledger is None or self.failure is not None:
            return
        if numbers:
            try:
                self.examine(epoch, min(numbers), waiting=False)
            except Superseded:
                pass  # the thread that posts next goes on in a new group
            except Exception as error:  # noqa: BLE001  (raised where somebody waits)
                if epoch == self.epoch and self.failure is None:
                    self.fail(error)
            return
        if ledger.untold:
            ledger.exchange()  # only that: an error of this replica's own may be on its way to who catches it
        if self._backend_name != "gloo":
            self._tend_device(ledger, epoch)

    def _tend_device(self, ledger: Verifier, epoch: int) -> None:
        """Waits for an accelerator see nothing: look for them whether a replica has left where this one is."""
        try:
            self._miss(ledger, ledger.departed(ledger.number))
        except CollectiveError as error:
            if epoch == self.epoch:
                self.fail(error, mendable=True)


def _under_way(opened: dict[int, Any], watched: set[Any]) -> bool:
    if any(not inner.is_completed() for inner in list(opened.values())):
        return True
    return any(work.under_way() for work in list(watched))
