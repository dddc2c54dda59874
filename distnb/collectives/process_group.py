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

import torch
import torch.distributed as dist

from distnb.collectives import signature
from distnb.collectives.board import Board
from distnb.collectives.ledger import Ledger
from distnb.collectives.shared_sum import SharedSum, SharedWork
from distnb.collectives.staging import Staging
from distnb.collectives.transport import Transport
from distnb.collectives.waiting import Waits
from distnb.collectives.work import CollectiveWork, DeviceWork, MessageWork
from distnb.errors import CollectiveError, CollectiveMismatchError

__all__ = ["Formed", "GroupCore"]

# For the type checker it is anything: torch's stubs have overloads that only the old interface used.
_ProcessGroup: Any = dist.ProcessGroup
_ABORT_GRACE_S = 0.5
_FAILED_GRACE_S = 3.0
_EXIT_GRACE_S = 1.0


class Formed(Protocol):
    """What a process group gets when it is formed."""

    transport: Transport
    board: Board


class GroupCore(_ProcessGroup):  # type: ignore[misc]
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
        super().__init__(rank, size)
        self.epoch = 0
        self.failure: BaseException | None = None
        self.replicas = tuple(replicas)
        self.program: int = parent.program if parent is not None else 0
        self.label = label
        self._group_name = label
        self._group_desc = "undefined"
        self._size = size
        self._form = form
        self._make_subgroup = make_subgroup
        self._backend_name = backend_name
        self._devices = [torch.device(kind) for kind in device_types]
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

    # -- what torch asks about a group -----------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return list(self._devices)

    def _get_backend(self, device: torch.device) -> Any:
        transport = self._ready()
        kind = "cpu" if device.type in transport.staged else device.type
        if kind not in transport.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return transport.backends[kind]

    def _get_backend_name(self) -> str:
        return self._backend_name

    name = _get_backend_name

    def getBackendName(self) -> str:
        """What C++ is told. No name that it knows: it would take the group for one of its own classes."""
        return "distnb"

    # C++ keeps the names in its backends, of which it knows none here.
    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    def getGroupName(self) -> str:
        """What C++ asks for the name."""
        return self._group_name

    def getGroupDesc(self) -> str:
        """What C++ asks for the description."""
        return self._group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Accepted and not applied: a replica that is slow is never an error, one that is lost is found at once."""

    # -- life ------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect with the other ranks now, and not in the first operation."""
        self._ready()

    def reset(self) -> None:
        """Forget the connections; the next operation makes new ones, for a new generation. Never blocks."""
        transport, opened, watched = self._transport, self._open, self._watched
        self.epoch += 1
        self._transport = self._ledger = self._shared = None
        self._open, self._watched = {}, set()
        self.failure, self._failed_since = None, None
        if transport is not None:
            transport.abort()
            transport.release(lambda: not _under_way(opened, watched))

    def fail(self, error: BaseException) -> None:
        """End every operation under way, and all later ones until `reset`, with an error. Safe from any thread."""
        if self.failure is not None:
            return
        self.failure = error
        if isinstance(error, CollectiveMismatchError):
            for ledger in (self._ledger, self._parent._ledger if self._parent is not None else None):
                if ledger is not None:
                    ledger.tell(error)
        if self._transport is not None:
            self._transport.abort()
        for work in list(self._watched):
            work.conclude()

    def abort(self) -> None:
        """What torch calls to end everything under way on this replica."""
        self.fail(CollectiveError("The process group was aborted."))

    def shutdown(self) -> None:
        """What torch calls to end a group that is no longer used; others may still be in their last operation."""
        transport, opened, watched = self._transport, self._open, self._watched
        self.failure = self.failure or CollectiveError("The process group was destroyed. Make a new one.")
        self._transport = self._ledger = None
        if transport is not None:
            transport.release(lambda: not _under_way(opened, watched))

    def connections(self) -> Any:
        """The sockets under this group, or None while it has none."""
        return self._transport.connections if self._transport is not None else None

    def keep_for_ever(self) -> None:
        """Before the interpreter ends: see to it that no destructor waits, and no thread comes back from C++ later."""
        transport = self._transport
        if transport is None:
            return
        transport.keep_for_ever()
        if _under_way(self._open, self._watched):
            transport.abort()
            until = time.monotonic() + _EXIT_GRACE_S
            while _under_way(self._open, self._watched) and time.monotonic() < until:
                time.sleep(0.01)

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
        """The program ended on this replica. Raises CollectiveMismatchError if others ended it with other counts."""
        ledger = self._ledger
        if ledger is not None:
            with self._issuing:
                ledger.end(failed or self.failure is not None)

    # -- failure ---------------------------------------------------------------------------------------------------

    def _raise_if_failed(self) -> None:
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

    def examine(self, epoch: int, number: int | None, waiting: bool = True) -> None:
        """Look, while waiting, for reasons not to wait any longer.

        Args:
            epoch, number: Which operation; no number for messages.
            waiting: Whether this replica does nothing else meanwhile.

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
        if self._parent is not None:
            try:
                self._parent.examine(self._parent.epoch, None)
            except Exception as error:
                self.fail(error)
                raise
        self._mourn(failed)

    def _mourn(self, failed: list[int]) -> None:
        """Raise if replicas ended their program with an error, some time after they did."""
        if not failed:
            self._failed_since = None
        elif self._failed_since is None:
            self._failed_since = time.monotonic()
        elif time.monotonic() - self._failed_since > _FAILED_GRACE_S:
            # The notebook's side tells of failures much sooner; this is for programs that have no notebook.
            who = ", ".join(str(self.replicas[rank]) for rank in failed)
            self.fail(
                CollectiveError(
                    f"Replica {who} ended with an error, and will not come to the collective that this replica waits in."
                )
            )
            self.raise_failure()

    def explain(self, epoch: int, number: int | None, error: BaseException) -> NoReturn:
        """Raise what an operation that failed in the backend means."""
        self.examine(epoch, number)
        # Most likely another replica was aborted or died, and who watches over both will say so in a moment.
        until = time.monotonic() + _ABORT_GRACE_S
        while time.monotonic() < until:
            time.sleep(0.01)
            self.examine(epoch, number)
        self.fail(CollectiveError(f"The connection to another replica was lost, which may have died: {error}"))
        self.raise_failure()

    def ran_out_of_time(self, epoch: int, number: int | None, limit_s: float) -> NoReturn:
        """Raise that the time limit which the caller gave is over."""
        self.examine(epoch, number)
        absent = self._ledger.absent(number) if self._ledger is not None and number is not None else []
        who = f" Not there yet: replica {', '.join(str(self.replicas[rank]) for rank in absent)}." if absent else ""
        raise CollectiveError(f"The operation did not end within the {limit_s:g} s that its caller gave it.{who}")

    # -- bookkeeping of works --------------------------------------------------------------------------------------

    def watch(self, work: Any) -> None:
        """Have a work concluded by an abort."""
        self._watched.add(work)
        if self.failure is not None:
            work.conclude()

    def finished(self, work: Any) -> None:
        """Forget a work that ended."""
        self._open.pop(work.number, None)
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
        numbers = list(self._open)
        if numbers and self.failure is None:
            try:
                self.examine(self.epoch, min(numbers), waiting=False)
            except Exception:  # noqa: BLE001  (it is the group's failure now, and raised where somebody waits)
                pass

    def start_in_memory(self, key: signature.Key, tensor: torch.Tensor, op: str) -> SharedWork | None:
        """Begin an all-reduce or all-gather in memory that the replicas share.

        Args:
            key: Its signature.
            tensor: What is reduced, in place, or gathered.
            op: "sum", "mean", "max", "min" or "gather".

        Returns:
            The work; None if this tensor, or this group, cannot be served so. That is so on all replicas then.
        """
        transport = self._ready()
        shared, ledger = self._shared, self._ledger
        kind = tensor.device.type
        if shared is None or ledger is None or not (kind == "cpu" or kind in transport.staged) or not shared.takes(tensor, op):
            return None
        record = signature.record(key)
        with self._issuing:
            waits = self._own_waits if self._parent is None else self._waits
            if waits is not None:
                waits.issued()
            if not ledger.room():
                self._wait_for_room(ledger)
            try:
                number = ledger.post(record)
            except CollectiveMismatchError as error:
                self.fail(error)
                raise
            own = shared.post(tensor, self, number)
        return SharedWork(shared, own, tensor, op, self, number)

    def _note(self, key: signature.Key) -> int:
        """Record something that every replica must do alike, though nothing is communicated in it."""
        self._ready()
        record = signature.record(key)
        ledger = self._ledger
        if ledger is None:
            self.raise_failure()
        with self._issuing:
            try:
                return ledger.post(record)
            except CollectiveMismatchError as error:
                self.fail(error)
                raise

    def _run(
        self,
        key: signature.Key,
        method: str,
        tensors: tuple[Any, ...],
        written: tuple[bool, ...],
        *rest: Any,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Record a collective and enter it.

        Args:
            key: Its signature.
            method: The backend's name for it.
            tensors: Its arguments that are tensors or lists of them; `written` tells which it writes to.
            rest: The other arguments.
            timeout: The caller's own time limit.
        """
        transport = self._ready()
        device = key[3]
        record = signature.record(key)
        staging = None
        if device in transport.staged:
            staging = Staging(_device_of(tensors))
            tensors = tuple(staging.host(each, written=flag) for each, flag in zip(tensors, written, strict=True))
            device = "cpu"
        backend = transport.backends.get(device)
        if backend is None:
            raise RuntimeError(
                f"No backend type associated with device type {device}: these replicas communicate tensors on "
                f"{', '.join(transport.backends)}."
            )
        call = getattr(backend, method, None) or getattr(transport.plain, method)
        ledger = self._ledger
        if ledger is None:
            self.raise_failure()
        with self._issuing:
            waits = self._own_waits if self._parent is None else self._waits
            if waits is not None:
                waits.issued()
            if not ledger.room():
                self._wait_for_room(ledger)
            try:
                number = ledger.post(record)
            except CollectiveMismatchError as error:
                self.fail(error)
                raise
            try:
                inner = call(*tensors, *rest)
            except BaseException as error:
                ledger.retract(number, error)
                raise
        if device != "cpu":
            return DeviceWork(self, inner)
        self._open[number] = inner
        return CollectiveWork(self, inner, number, staging, timeout)

    def _wait_for_room(self, ledger: Ledger) -> None:
        epoch = self.epoch
        while not ledger.room():
            time.sleep(0.002)
            self.examine(epoch, None)

    def _message(self, method: str, tensors: list[torch.Tensor], written: bool, *rest: Any) -> dist.Work:
        """Start a send or a receive. These have no number: only two replicas take part."""
        transport = self._ready()
        device = tensors[0].device
        if device.type != "cpu" and device.type not in transport.staged:
            return DeviceWork(self, getattr(transport.backends[device.type], method)(tensors, *rest))
        staging = None
        if device.type in transport.staged:
            staging = Staging(device)
            tensors = staging.host(tensors, written=written)
        work = MessageWork(self, getattr(transport.backends["cpu"], method)(tensors, *rest), staging)
        return work


def _under_way(opened: dict[int, Any], watched: set[Any]) -> bool:
    if any(not inner.is_completed() for inner in list(opened.values())):
        return True
    return any(work.under_way() for work in list(watched))


def _device_of(value: Any) -> torch.device:
    while not isinstance(value, torch.Tensor):
        value = next(each for each in value if not isinstance(each, (list, tuple)) or each)
    return value.device


