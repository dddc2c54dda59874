"""What a process group communicates by: formed when it is first needed, watched while replicas wait, ended as one.

A group has one communicator after another: after an abort, for the next generation, and after an error that the program
caught. Nothing of an old one can touch the one that follows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from distnb import activity
from distnb.collectives.group.backends import Backends
from distnb.collectives.shared_memory.shared_sum import SharedSum
from distnb.collectives.verify.collective_log import CollectiveRecord, CollectiveWait
from distnb.collectives.verify.deadlock import DeadlockDetector
from distnb.collectives.verify.verifier import Superseded, Verifier
from distnb.errors import CollectiveError, CollectiveMismatchError, ProgramAborted

if TYPE_CHECKING:
    from distnb.collectives.group.process_group import GuardedProcessGroup

__all__ = ["Beginning", "Communicator"]

_ABORT_GRACE_S = 0.5
_FAILED_GRACE_S = 3.0
_LEFT_GRACE_S = 2.0  # an error that nobody catches ends its replica's program by then, whatever that tidies up
_PAUSE_S = 0.002
_EARLIER = "This operation belonged to an earlier generation of the process group, which was aborted."


class Beginning:
    """Stands for an operation of Gloo's that begins, until its work is at hand.

    An order to end can come between the two: then it stands there for ever, and nobody takes the backend for idle.
    """

    def is_completed(self) -> bool:
        """Nobody knows."""
        return False


class Communicator:
    """One forming of a process group: its backends, what is under way in them, and what ended them.

    Attributes:
        failure: What ended it, or keeps it from being formed.
        mendable: Whether the next operation after the program has heard of the failure makes a new communicator.
        told: Whether the program has heard of it.
        former: The verifier of the communicator that broke, and whose place this one takes.
        name: How all replicas call it.
        backends, verifier, shared: What it consists of, while it is connected.
    """

    def __init__(
        self, group: GuardedProcessGroup, failure: BaseException | None = None, former: Verifier | None = None
    ) -> None:
        self.group = group
        self.failure = failure
        self.mendable = self.told = self._retired = False
        self.former = former
        self.name = ""
        self.backends: Backends | None = None
        self.verifier: Verifier | None = None
        self.shared: SharedSum | None = None
        self.posting = threading.RLock()
        self.failing = threading.Lock()
        self._connecting = threading.Lock()
        self._deadlocks: DeadlockDetector | None = None
        self.open: dict[int, Any] = {}  # works of Gloo's by their numbers
        self._watched: set[Any] = set()
        self._deadlines: dict[Any, tuple[Any, float, float]] = {}  # number or message -> (work, limit, until when)
        self._failed_since: float | None = None
        self._left_since: float | None = None

    # -- from beginning to end ---------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect with the other ranks, if that is not done. Raises what ended it, if something did."""
        with self._connecting:
            if self.backends is None and self.failure is None:
                self._connect()
        if self.failure is not None:
            if self.backends is not None:  # aborted as they were made
                self.backends.abort()
            self.raise_failure()

    def _connect(self) -> None:
        group = self.group
        self.name = f"{group.member.prefix}/{group.meeting}"
        what = f"the forming of the process group of replicas {list(group.replicas)}"
        activity.begin("collective", activity.Arrival(at=activity.clock(), group=self.name, what=what))
        try:
            backends, log = group.member.form(self)
        except BaseException as error:
            if group.breaks:
                text = str(error) if isinstance(error, CollectiveError) else "The forming of a group was broken off."
                self.fail(CollectiveError(text))
            raise
        finally:
            activity.end()
        self.verifier = Verifier(log, group.replicas, group.positions, group.breaks)
        self.verifier.begin(group.program)
        self._deadlocks = DeadlockDetector(log)
        self.shared = SharedSum.of(log)
        self.backends, self.former = backends, None

    def fail(self, error: BaseException, *, mendable: bool = False, told: bool = False, abort: bool = True) -> None:
        """End every operation under way, and all later ones, with an error. Safe from any thread.

        With `abort=False` the caller aborts the backends.
        """
        with self.failing:
            if self.failure is not None and (mendable or not self.mendable):
                self.told |= told
                return
            self.failure, self.mendable, self.told = error, mendable, told
        verifier = self.verifier
        if mendable and verifier is not None and isinstance(error, CollectiveError):
            self.group.broke(verifier.half_met)
            verifier.tell(error)
        if abort and (backends := self.backends) is not None:
            backends.abort()
        for work in list(self._watched):
            work.conclude()

    def retire(self, error: BaseException | None = None, abort: bool = True) -> None:
        """Let go of the backends: another communicator takes this one's place, or none. Never blocks.

        What is still done with it raises the error; what is under way may end well where it is not aborted.
        """
        with self.failing:
            self.failure, self.mendable, self._retired = error or CollectiveError(_EARLIER), False, True
        if self.verifier is not None:
            self.verifier.close()
        backends, self.backends, self.verifier, self.shared = self.backends, None, None, None
        if backends is not None:
            if abort:
                backends.abort()
            backends.release(lambda: not self.under_way())

    def end_process(self, until: float) -> None:
        """Before the interpreter ends: end what is under way, and the backends' threads, until a moment."""
        if (backends := self.backends) is None:
            return
        self.fail(CollectiveError("This replica's program has ended."), abort=self.under_way())
        while self.under_way() and time.monotonic() < until:
            time.sleep(0.01)
        self.backends = None
        backends.end(idle=not self.under_way(), until=until)

    def lost(self, *ended: str) -> int:
        """How many others are gone, though they have not ended their program in one of these ways."""
        if (backends := self.backends) is None or (verifier := self.verifier) is None:
            return 0
        return backends.connections.closed() - verifier.count(*ended)

    def under_way(self) -> bool:
        """Whether something runs outside of Python."""
        if any(not inner.is_completed() for inner in list(self.open.values())):
            return True
        return any(work.under_way() for work in list(self._watched))

    @property
    def failed(self) -> bool:
        """Whether no work is to be waited for. Once another one took this one's place, what is completed is good."""
        return self.failure is not None and not self._retired

    def raise_failure(self) -> NoReturn:
        """Raise what ended it."""
        failure = self.failure
        assert failure is not None
        self.told = True
        raise type(failure)(*failure.args) from None  # anew: one object would collect the traceback of every raise

    # -- operations --------------------------------------------------------------------------------------------------

    def post(self, record: CollectiveRecord, limit_s: float | None = None) -> int:
        """Number a collective that is about to be entered, and compare it with what others called.

        `posting` is held, until it is entered.

        Raises:
            CollectiveError: It must not be entered.
            Superseded: It is to be posted again, after `supersede`.
        """
        if (verifier := self.verifier) is None:
            self.raise_failure()
        if (deadlocks := self._whole_deadlocks) is not None:
            deadlocks.issued()
        self._await(verifier.room, None)
        agree = verifier.must_agree(record)
        try:
            number = verifier.post(record)
        except CollectiveError as error:
            self.fail(error, mendable=True, told=True)
            raise
        self.limit(number, Beginning(), limit_s)
        if agree:
            self._await(lambda: verifier.agreed(number), number)
            verifier.entered()
        return number

    def _await(self, heard: Callable[[], bool], number: int | None) -> None:
        """Wait for what all others tell. Nothing is entered yet that would end in Gloo when one of them dies."""
        if heard():
            return
        what = verifier.describe(number) if number is not None and (verifier := self.verifier) is not None else ""
        activity.begin(
            "collective", activity.Arrival(at=activity.clock(), group=self.name, number=number or 0, what=what)
        )
        try:
            self._hear(heard, number)
        finally:
            activity.end()

    def wait_until(self, heard: Callable[[], bool]) -> None:
        """Wait for what another replica does that is no collective."""
        self._await(heard, None)

    def _hear(self, heard: Callable[[], bool], number: int | None) -> None:
        closed_since = None
        while not heard():
            self.examine(number)
            if (backends := self.backends) is not None and backends.connections.closed():
                closed_since = closed_since or time.monotonic()
                if time.monotonic() - closed_since > _ABORT_GRACE_S:  # what it told before it ended is known by now
                    self.explain(number, RuntimeError("it was closed"))
            time.sleep(_PAUSE_S)

    def retract(self, number: int, error: BaseException) -> None:
        """A collective that was posted is not entered after all."""
        self._deadlines.pop(number, None)
        if not isinstance(error, (KeyboardInterrupt, ProgramAborted)):  # after these Gloo may be busy with it
            self.open.pop(number, None)
        if (verifier := self.verifier) is not None:
            verifier.retract(number, error)

    def supersede(self, found: Superseded) -> None:
        """Leave for a new communicator without an error, since this replica had its own."""
        if (verifier := self.verifier) is not None:
            verifier.begin_again()
        self.fail(found.error, mendable=True, told=True)

    def limit(self, what: Any, work: Any, limit_s: float | None) -> None:
        """Fail if an operation (a collective's number, or a message) is not completed in time from now on.

        While operations are coalesced they have no work, and no limit.
        """
        if limit_s is None:
            return
        if work is None:
            self._deadlines.pop(what, None)
        else:
            self._deadlines[what] = (work, limit_s, time.monotonic() + limit_s)

    def watch(self, work: Any) -> None:
        """Have a work concluded by an abort."""
        self._watched.add(work)
        if self.failure is not None:
            work.conclude()

    def finished(self, work: Any) -> None:
        """Forget a work that ended, unless somebody has yet to be told."""
        self.open.pop(work.number, None)  # none of a message
        self._deadlines.pop(work.number, None)
        if work in self._watched and not work.under_way():
            self._watched.discard(work)

    def waited(self) -> None:
        """A wait that was long enough to be told of is over."""
        if (deadlocks := self._whole_deadlocks) is not None:
            deadlocks.stop()

    # -- reasons not to wait any longer ------------------------------------------------------------------------------

    @property
    def _whole_deadlocks(self) -> DeadlockDetector | None:
        """Where this replica tells for whom it waits: in the log of the whole team."""
        parent = self.group.parent
        return self._deadlocks if parent is None else parent.communicator._whole_deadlocks

    def begin_program(self, program: int) -> None:
        """A program began on this replica."""
        if self.verifier is not None:
            self.verifier.begin(program)
        if self._deadlocks is not None:
            self._deadlocks.begin_program()

    def examine_forming(self, absent: Callable[[], list[int]]) -> None:
        """Look, while connecting, for reasons not to wait any longer: an abort, or a replica that cannot come any more.

        `absent` gives the ranks that have not come yet.
        """
        group, former = self.group, self.former
        if self.failure is not None:
            self.raise_failure()
        if former is not None:
            self._mourn(former.check_coming(group.replicas))
        whole = group.parent.communicator if group.parent is not None else None
        if whole is not None:
            whole.examine(None)
        elif former is None:
            return
        try:
            if whole is not None and whole.verifier is not None:
                whole._mourn(whole.verifier.check_coming(group.replicas))
            if (deadlocks := self._whole_deadlocks) is not None:
                names = tuple(group.replicas[rank] for rank in absent())
                what = f"the first collective of the process group of replicas {list(group.replicas)}"
                deadlocks.wait(CollectiveWait(group=group.meeting, number=0, absent=names, text=what))
        except CollectiveMismatchError as error:
            if whole is not None:
                whole.fail(error, mendable=True, told=True)
            raise

    def examine(self, number: int | None, waiting: bool = True, mourning_s: float = _FAILED_GRACE_S) -> None:
        """Look, while waiting, for reasons not to wait any longer, and raise what is found.

        Args:
            number: Which operation; None of a message.
            waiting: Whether this replica does nothing else meanwhile.
            mourning_s: How long a replica must be known to have ended with an error.
        """
        if self.failure is not None:
            self.raise_failure()
        if (verifier := self.verifier) is None:
            return
        if not (waiting and number in self.open):  # the thread that tends the groups does it for who waits there
            verifier.log.exchange()
        failed: list[int] = []
        left = ""
        try:
            with self.posting:
                if not waiting and number is not None and number not in self.open:
                    return  # it was refused as it began: an error of this replica's own is on its way to who catches it
                verifier.check()
                if number is not None:
                    failed = verifier.check_departed(number)
                    left = "" if failed else verifier.departed(number)
            if waiting and number is not None:
                self._examine_cycle(verifier, number)
            self._miss(verifier, left)
        except CollectiveError as error:
            self.fail(error, mendable=True, told=waiting)
            raise
        if self.group.parent is not None:
            whole = self.group.parent.communicator
            try:
                whole.examine(None, waiting)
            except Exception as error:
                self.fail(error, mendable=whole.mendable, told=waiting)
                raise
        self._mourn(failed, mourning_s)

    def _examine_cycle(self, verifier: Verifier, number: int) -> None:
        """Tell for whom this replica waits. A cycle of waits breaks the whole group too, in which others wait."""
        if (deadlocks := self._whole_deadlocks) is None:
            return
        try:
            deadlocks.wait(
                CollectiveWait(
                    group=self.group.label,
                    number=number,
                    absent=tuple(verifier.absent(number)),
                    text=verifier.describe(number),
                )
            )
        except CollectiveMismatchError as error:
            if self.group.parent is not None:
                self.group.parent.communicator.fail(error, mendable=True, told=True)
            raise

    def _miss(self, verifier: Verifier, text: str) -> None:
        """Raise if a replica left where this one waits, and has not ended: its program has caught the error."""
        self._left_since = (self._left_since or time.monotonic()) if text else None
        if self._left_since is not None and time.monotonic() - self._left_since >= _LEFT_GRACE_S:
            verifier.half_met = True
            raise CollectiveError(text)

    def _mourn(self, failed: list[int], mourning_s: float = _FAILED_GRACE_S) -> None:
        """Raise if replicas ended their program with an error, some time after they did; in a script.

        A notebook hears of the error itself, and orders the end of the others: what they would raise here could come
        there first, and hide it.
        """
        if self.group.member.supervised:
            return
        self._failed_since = (self._failed_since or time.monotonic()) if failed else None
        if self._failed_since is not None and time.monotonic() - self._failed_since >= mourning_s:
            who = ", ".join(str(self.group.replicas[rank]) for rank in failed)
            self.fail(
                CollectiveError(
                    f"Replica {who} ended with an error, and will not come to the collective that this replica "
                    "waits in."
                )
            )
            self.raise_failure()

    def explain(self, number: int | None, error: BaseException) -> NoReturn:
        """Raise what an operation that failed in the backend means."""
        # Most likely another replica was aborted or died, and who watches over both will say so in a moment.
        until = time.monotonic() + _ABORT_GRACE_S
        while time.monotonic() < until:
            self.examine(number)
            time.sleep(0.01)
        self.examine(number, mourning_s=0.0)  # what ended with an error takes its connections along
        self.fail(CollectiveError(f"The connection to another replica was lost, which may have died: {error}"))
        self.raise_failure()

    def _out_of_time(self, number: Any, limit_s: float) -> CollectiveError:
        who, what = "", "The operation"
        if (verifier := self.verifier) is not None and isinstance(number, int):
            what = verifier.describe(number)
            absent = ", ".join(map(str, verifier.absent(number)))
            who = f" Not there yet: replica {absent}." if absent else ""
        return CollectiveError(
            f"{what} did not end within the time limit of {limit_s:g} s that the program gave it.{who} "
            "Give it a longer one, or none: replicas are then waited for as long as they are alive."
        )

    def tend(self, *, limits_held: bool = False) -> None:
        """Called ten times a second on a thread of its own: for waits in C++, and for works that nobody waits for.

        With `limits_held` every time limit begins anew: a user thinks about what is waited for.
        """
        for number, inner in list(self.open.items()):
            if inner.is_completed():
                self.open.pop(number, None)
        for what, (work, limit_s, until) in list(self._deadlines.items()):
            if work.is_completed():
                self._deadlines.pop(what, None)
            elif limits_held:
                self.limit(what, work, limit_s)
            elif time.monotonic() > until:
                self.fail(self._out_of_time(what, limit_s), mendable=True)
        numbers, verifier = list(self.open), self.verifier
        if verifier is None or self.failure is not None:
            return
        try:
            if numbers:
                self.examine(min(numbers), waiting=False)
                return
            if verifier.log.untold:
                verifier.log.exchange()  # only that: an error of this replica's own may be on its way to who catches it
            if self.group.member.backend_name != "gloo":
                # Waits for an accelerator see nothing: look for them whether a replica has left where this one is.
                self._miss(verifier, verifier.departed(verifier.number))
        except Superseded:
            pass  # the thread that posts next goes on with a new one
        except Exception as error:  # noqa: BLE001  (raised where somebody waits)
            if self.failure is None:
                self.fail(error, mendable=not numbers)
