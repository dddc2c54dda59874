"""The communicator of a process group: formed at its first use, watched while replicas wait, ended as one.

A group has one communicator in each generation. An old one cannot affect the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from distnb import activity
from distnb.collectives.group.backends import Backends
from distnb.collectives.group.communicator_state import CommunicatorState, caught
from distnb.collectives.shared_memory.shared_sum import SharedSum
from distnb.collectives.verify.collective_log import CollectiveRecord, CollectiveWait
from distnb.collectives.verify.deadlock import DeadlockDetector
from distnb.collectives.verify.verifier import Verifier
from distnb.errors import CollectiveError, CollectiveMismatchError, ProgramAborted

if TYPE_CHECKING:
    from distnb.collectives.group.process_group import GuardedProcessGroup

__all__ = ["Beginning", "Communicator"]

_ABORT_GRACE_S = 0.5
_FAILED_GRACE_S = 3.0
_ORDER_GRACE_S = 1.5  # until the notebook has received an error and ordered the end of the other replicas
_GRACE_S = 0.2
_PAUSE_S = 0.002
_CATCHING_S = 0.03  # an error that is not caught has ended its replica's program by then
_IN_CHILD = "A forked child of a replica, such as a DataLoader's worker, cannot take part in its collectives."
_EARLIER = "This operation belonged to an earlier generation of the process group, which was aborted."


class Beginning:
    """A placeholder for a Gloo operation that begins, until its work exists.

    An order to end can arrive in between. Then the placeholder stays, so that the backend never counts as idle.
    """

    def is_completed(self) -> bool:
        """Return False: the state is not known."""
        return False


class Communicator:
    """A process group's backends in one generation, and the operations under way. Its failure is a state machine.

    Attributes:
        name: Its name on all replicas.
        backends, verifier, shared: Its parts, while it is connected.
    """

    def __init__(self, group: GuardedProcessGroup, failure: BaseException | None = None) -> None:
        self.group = group
        self.name = ""
        self._state = CommunicatorState(failure)
        self.backends: Backends | None = None
        self.verifier: Verifier | None = None
        self.shared: SharedSum | None = None
        self.posting = threading.RLock()
        self._failing = threading.Lock()  # for events of the state
        self._connecting = threading.Lock()
        self._deadlocks: DeadlockDetector | None = None
        self.open: dict[int, Any] = {}  # works of Gloo's by their numbers
        self._watched: set[Any] = set()
        self._deadlines: dict[Any, tuple[Any, float, float]] = {}  # number or message -> (work, limit, deadline)
        self._departed_since: float | None = None  # the time since when other replicas' errors are known

    # -- from beginning to end ---------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect with the other ranks unless connected. Raise the failure if there is one."""
        with self._connecting:
            if self.backends is None and self.failure is None:
                self._connect()
        if self.failure is not None:
            if self.backends is not None:  # aborted as they were made
                self.backends.abort()
            self.raise_failure()

    def _connect(self) -> None:
        group = self.group
        self.name = f"{group.membership.prefix}/{group.label}"
        what = f"the forming of the process group of replicas {list(group.replicas)}"
        activity.begin("collective", activity.Arrival(at=activity.clock(), group=self.name, what=what))
        try:
            backends, log = group.membership.form(self)
        finally:
            activity.end()
        patience_s = _ORDER_GRACE_S if group.membership.supervised else 0.0
        self.verifier = Verifier(log, group.replicas, group.calls, patience_s)
        self.verifier.begin(group.program)
        self._deadlocks = DeadlockDetector(log)
        self.shared = SharedSum.of(log)
        self.backends = backends

    def fail(self, error: BaseException, *, raised: bool = False, abort: bool = True) -> None:
        """End the program's communication with an error: every operation under way, and all later ones.

        If an error of this replica's program has caused the failure, that error is recorded instead. Other replicas
        receive it where they wait. Safe from any thread.

        Args:
            error: The error.
            raised: Whether the program gets the error elsewhere.
            abort: Whether to abort the backends. If False, the caller does.
        """
        left = self._error_left(_GRACE_S) if isinstance(error, CollectiveError) else None
        error, undone = left or (error, "")
        self._end_program(error, undone, raised=raised or left is not None, abort=abort)

    def _end_program(self, error: BaseException, undone: str, raised: bool, abort: bool) -> None:
        verifier, parent = self.verifier, self.group.parent
        with self._failing:
            orders = self._state.fail(error, undone, raised, now=time.monotonic())
        if "report" in orders and verifier is not None:
            verifier.report_failure(error, undone)
        if "free" in orders:
            self._free(abort)
        if "fail parent" in orders and parent is not None:
            parent.communicator._end_program(error, undone, raised, abort=True)

    def stop(self, error: CollectiveError, *, abort: bool = True) -> None:
        """End every operation of this replica under way, and all later ones, without a report to the others."""
        with self._failing:
            self._state.stop(error, now=time.monotonic())
        self._free(abort)

    def _free(self, abort: bool) -> None:
        if abort and (backends := self.backends) is not None:
            backends.abort()
        for work in list(self._watched):
            work.conclude()

    def _error_left(self, patience_s: float) -> tuple[BaseException, str] | None:
        """Return the result of `Verifier.error_left`, or None if another thread posts a collective for longer."""
        verifier = self.verifier
        if verifier is None or self.group.calls.error is None or not self.posting.acquire(timeout=patience_s):
            return None
        try:
            return verifier.error_left()
        finally:
            self.posting.release()

    def retire(self, error: BaseException | None = None, abort: bool = True) -> None:
        """Release the backends, because this communicator is replaced or no longer needed. Never blocks.

        Later operations raise the error. Operations under way may complete if they are not aborted.
        """
        with self._failing:
            self._state.retire(error or CollectiveError(_EARLIER), now=time.monotonic())
        backends, self.backends, self.verifier, self.shared = self.backends, None, None, None
        if backends is not None:
            if abort:
                backends.abort()
            backends.release(lambda: not self.under_way())

    def end_process(self, until: float) -> None:
        """End operations under way and the backends' threads before the interpreter ends, until a deadline."""
        if (backends := self.backends) is None:
            return
        self.stop(CollectiveError("This replica's program has ended."), abort=self.under_way())
        while self.under_way() and time.monotonic() < until:
            time.sleep(0.01)
        self.backends = None
        backends.end(idle=not self.under_way(), until=until)

    def lost(self, *ended: str) -> int:
        """Return the number of other replicas that have gone without ending their program in one of these phases."""
        if (backends := self.backends) is None or (verifier := self.verifier) is None:
            return 0
        return backends.connections.closed() - verifier.count(*ended)

    def under_way(self) -> bool:
        """Return whether an operation is running outside of Python."""
        if any(not inner.is_completed() for inner in list(self.open.values())):
            return True
        return any(work.under_way() for work in list(self._watched))

    def forget_in_child(self) -> None:
        """Release the connections in a forked child, without a lock, which the parent's threads may hold."""
        self._state.stop(CollectiveError(_IN_CHILD), now=time.monotonic())
        if (backends := self.backends) is not None:
            backends.keep_for_ever()
            backends.connections.forget_in_child()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended it, or that keeps it from being formed."""
        return self._state.failure

    @property
    def failed(self) -> bool:
        """True if a wait for a work must fail. After `retire` completed works stay valid."""
        return self._state.phase not in ("open", "retired")

    def raise_failure(self, *, to_program: bool = True) -> NoReturn:
        """Raise the failure.

        Args:
            to_program: Whether the program gets the error where this is called.

        Raises:
            ProgramAborted: The program has received the error before, has caught it, and calls another collective.
                `except Exception` does not catch this.
        """
        state, failure = self._state, self._state.failure
        assert failure is not None
        if not state.ends_program:
            # A copy: one object would collect the traceback of every raise.
            raise type(failure)(*failure.args) from None
        if to_program:
            if state.phase == "handed over":
                raise ProgramAborted(caught(state.undone)) from failure
            with self._failing:
                state.hand_over(now=time.monotonic())
        raise failure

    @property
    def ended_program(self) -> tuple[BaseException, str] | None:
        """The error that ended the program on all replicas, and an explanation if the program caught it."""
        state = self._state
        if state.failure is None or state.is_earlier or not state.ends_program:
            return None
        return state.failure, caught(state.undone)

    @property
    def failed_for_s(self) -> float:
        """The time since `ended_program` is known; 0 if it is None."""
        return time.monotonic() - self._state.since if self.ended_program is not None else 0.0

    # -- operations --------------------------------------------------------------------------------------------------

    def post(self, record: CollectiveRecord, limit_s: float | None = None) -> int:
        """Post a collective that is about to be entered, compare it with the others', and return its number.

        The caller holds `posting` until it has entered the collective.

        Raises:
            CollectiveError: The collective must not be entered.
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
            self.fail(error)
            self.raise_failure()
        if self.group.parent is None and verifier.pending_error is None:
            self.group.calls.error = None
        self.limit(number, Beginning(), limit_s)
        if agree:
            self._await(lambda: verifier.agreed(number), number)
        return number

    def _await(self, ready: Callable[[], bool], number: int | None) -> None:
        """Wait for reports of the others before entering Gloo, which would notice the death of one of them."""
        if ready():
            return
        what = verifier.describe(number) if number is not None and (verifier := self.verifier) is not None else ""
        activity.begin(
            "collective", activity.Arrival(at=activity.clock(), group=self.name, number=number or 0, what=what)
        )
        try:
            self._poll(ready, number)
        finally:
            activity.end()

    def meet(self, record: CollectiveRecord) -> list[str] | None:
        """Post the end of a call of `run`, and wait until all replicas have posted it.

        Replicas that do not share memory do not wait here: their reports are slow.

        Returns:
            The content of each replica's record; [] if it is unknown. None if an error has left the call on another
            replica: this one's post is then withdrawn.
        """
        with self.posting:
            number = self.post(record)
        verifier, shared, since = self.verifier, self.shared, 0.0
        if verifier is None or shared is None:
            return []
        shared.announce_news()
        activity.begin(
            "collective", activity.Arrival(at=activity.clock(), group=self.name, number=number, what=record.operation)
        )
        try:
            while True:
                news = shared.news()
                try:
                    with self.posting:
                        absent = verifier.absent_from(number)
                        if not absent:
                            return verifier.contents(number)
                        if since and time.monotonic() - since > _CATCHING_S and not verifier.count("failed"):
                            verifier.withdraw(number)
                            return None
                except CollectiveError as error:
                    self.fail(error)
                    self.raise_failure()
                if verifier.is_void(number):
                    since = since or time.monotonic()
                    self.examine(number)
                    time.sleep(_PAUSE_S)
                else:
                    shared.await_news(absent[0], news[absent[0]], self, number)
        finally:
            self.waited()
            activity.end()

    def report_failed_call(self) -> None:
        """Report that an error leaves a call of `run` on this replica, for those that wait in `meet`."""
        if self.verifier is not None and self.shared is not None:  # others are in Gloo, and cannot withdraw
            self.verifier.report_failed_call()
            self.shared.announce_news()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for an act of another replica that is no collective."""
        self._await(ready, None)

    def _poll(self, ready: Callable[[], bool], number: int | None) -> None:
        closed_since = None
        while not ready():
            self.examine(number)
            if (backends := self.backends) is not None and backends.connections.closed():
                closed_since = closed_since or time.monotonic()
                if time.monotonic() - closed_since > _ABORT_GRACE_S:  # its last reports have arrived by now
                    self.explain(number, RuntimeError("it was closed"))
            time.sleep(_PAUSE_S)

    def retract(self, number: int, error: BaseException) -> None:
        """Report that a posted collective is not entered after all."""
        self._deadlines.pop(number, None)
        if not isinstance(error, (KeyboardInterrupt, ProgramAborted)):  # after these Gloo may be busy with it
            self.open.pop(number, None)
        if (verifier := self.verifier) is not None:
            verifier.retract(number, error)

    def limit(self, what: Any, work: Any, limit_s: float | None) -> None:
        """Give an operation (a collective's number, or a message) a time limit from now on.

        Coalesced operations have no work, and no limit.
        """
        if limit_s is None:
            return
        if work is None:
            self._deadlines.pop(what, None)
        else:
            self._deadlines[what] = (work, limit_s, time.monotonic() + limit_s)

    def watch(self, work: Any) -> None:
        """Register a work that an abort must conclude."""
        self._watched.add(work)
        if self.failure is not None:
            work.conclude()

    def finished(self, work: Any) -> None:
        """Remove a work that has ended, unless its future is not completed yet."""
        self.open.pop(work.number, None)  # a message has none
        self._deadlines.pop(work.number, None)
        if work in self._watched and not work.under_way():
            self._watched.discard(work)

    def waited(self) -> None:
        """Withdraw the report of a long wait that is over."""
        if (deadlocks := self._whole_deadlocks) is not None:
            deadlocks.stop()

    # -- reasons to end a wait ---------------------------------------------------------------------------------------

    @property
    def _whole_deadlocks(self) -> DeadlockDetector | None:
        """The detector of the whole team, to which this replica reports its waits."""
        parent = self.group.parent
        return self._deadlocks if parent is None else parent.communicator._whole_deadlocks

    def begin_program(self, program: int) -> None:
        """Begin a program on this replica."""
        if self._state.failure is not None or self._state.is_earlier:
            with self._failing:
                self._state.begin_program(now=time.monotonic())
        if self.verifier is not None:
            self.verifier.begin(program)
        if self._deadlocks is not None:
            self._deadlocks.begin_program()

    def examine_forming(self, absent: Callable[[], list[int]]) -> None:
        """Look for reasons to end the wait for a connection: an abort, or a replica that will not connect.

        `absent` returns the ranks that have not connected yet.
        """
        group = self.group
        if self.failure is not None:
            self.raise_failure()
        if group.parent is None:
            return
        whole = group.parent.communicator
        whole.examine(None)
        try:
            if whole.verifier is not None:
                whole._raise_failed(whole.verifier.check_coming(group.replicas))
            if (deadlocks := self._whole_deadlocks) is not None:
                names = tuple(group.replicas[rank] for rank in absent())
                what = f"the first collective of the process group of replicas {list(group.replicas)}"
                deadlocks.wait(CollectiveWait(group=group.label, number=0, absent=names, text=what))
        except CollectiveMismatchError as error:
            self.fail(error)
            self.raise_failure()

    def examine(self, number: int | None, waiting: bool = True, grace_s: float = _FAILED_GRACE_S) -> None:
        """Look for reasons to end a wait, and raise the error of the first one.

        Args:
            number: The number of the operation; None for a message.
            waiting: Whether the program waits in this call, and gets the error.
            grace_s: The time that must have passed since a replica is known to have ended with an error.
        """
        if self.failure is not None:
            self.raise_failure(to_program=waiting)
        if (verifier := self.verifier) is None:
            return
        if not (waiting and number in self.open):  # the thread that tends the groups does so for waits in C++
            verifier.log.exchange()
        failed: list[int] = []
        try:
            with self.posting:
                verifier.check()
                if number is not None:
                    failed = verifier.check_departed(number)
            if waiting and number is not None and (deadlocks := self._whole_deadlocks) is not None:
                absent = tuple(verifier.absent(number))
                text = verifier.describe(number)
                deadlocks.wait(CollectiveWait(group=self.group.label, number=number, absent=absent, text=text))
        except CollectiveError as error:
            self.fail(error)
            self.raise_failure(to_program=waiting)
        if self.group.parent is not None:
            try:
                self.group.parent.communicator.examine(None, waiting)
            except Exception as error:
                self.fail(error, raised=waiting)
                raise
        self._raise_failed(failed, grace_s, waiting)

    def _raise_failed(self, failed: list[int], grace_s: float = _FAILED_GRACE_S, waiting: bool = True) -> None:
        """Raise in a script, after a grace period, if replicas ended their program with an error.

        A notebook receives that error and orders the end of the others. An error raised here could reach the notebook
        first and hide it.
        """
        if self.group.membership.supervised:
            return
        self._departed_since = (self._departed_since or time.monotonic()) if failed else None
        if self._departed_since is not None and time.monotonic() - self._departed_since >= grace_s:
            who = ", ".join(str(self.group.replicas[rank]) for rank in failed)
            self.fail(
                CollectiveError(
                    f"Replica {who} ended with an error, and will not come to the collective that this replica "
                    "waits in."
                )
            )
            self.raise_failure(to_program=waiting)

    def explain(self, number: int | None, error: BaseException) -> NoReturn:
        """Raise the cause of an operation's failure in the backend."""
        # Most likely another replica was aborted or died, and the notebook will report it in a moment.
        until = time.monotonic() + _ABORT_GRACE_S
        while time.monotonic() < until:
            self.examine(number)
            time.sleep(0.01)
        self.examine(number, grace_s=0.0)  # a replica that ends with an error closes its connections
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
        """Examine waits in C++ and works that nobody waits for. A separate thread calls this ten times a second.

        With `limits_held` every time limit starts again, because the user is asked for input.
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
                self.fail(self._out_of_time(what, limit_s))
        verifier = self.verifier
        if verifier is None or self.failure is not None:
            return
        if self.group.calls.error is not None:
            verifier.log.exchange()
            if self._fails_by_error(0.0):
                return
        try:
            if self.open:
                self.examine(min(self.open), waiting=False)
            elif verifier.log.has_unsent:
                verifier.log.exchange()
            elif self.group.membership.backend_name != "gloo":
                self.examine(None, waiting=False)  # waits for an accelerator do not notice it
        except Exception as error:  # noqa: BLE001  (raised where somebody waits)
            self.fail(error)

    # -- the end of a program ----------------------------------------------------------------------------------------

    def end_program(self, failed: bool) -> None:
        """End this replica's part of the program.

        Raises:
            BaseException: The program did not fail, but it caught an error that ends it all the same, or its
                collectives differ from another replica's.
        """
        if (verifier := self.verifier) is None:
            return
        try:
            with self.posting:
                verifier.end(failed or self._state.failure is not None)
        except CollectiveError as error:
            self.fail(error)
        if failed:
            return
        if self._state.failure is None and self.group.calls.error is not None:
            # Others may still reach a collective that the error left undone.
            self._await(lambda: verifier.others_ended() or self._fails_by_error(_GRACE_S), None)
        if self._state.failure is not None and not self._state.is_earlier:
            self.raise_failure()

    def _fails_by_error(self, patience_s: float) -> bool:
        """End the program if its latest error left a collective undone in which others wait. Return whether that is
        so."""
        if (left := self._error_left(patience_s)) is not None:
            self._end_program(*left, raised=True, abort=True)
        return left is not None
