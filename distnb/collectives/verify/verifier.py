"""The comparison of the replicas' collectives. It does not communicate itself.

Every collective has a number, per process group and replica, beginning with 1. A replica posts its record before it
enters the collective, and then reads the others' records of the same number. So at least one of two replicas sees the
other's record before it enters, and different collectives never meet inside Gloo, where they would hang, end the
process or compute wrong sums. The replica that entered first compares later: at its next collective, or while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NoReturn

from distnb import activity
from distnb.collectives.verify import callsite
from distnb.collectives.verify.collective_log import (
    KEY_NBYTES,
    RING,
    CollectiveLog,
    CollectiveRecord,
    Phase,
    Trouble,
)
from distnb.collectives.verify.program_calls import ProgramCalls
from distnb.errors import CollectiveError, CollectiveMismatchError

__all__ = ["Verifier"]

_ADVICE: Final = (
    "Every replica must call the same collectives, in the same order, with tensors of the same shape and dtype."
)
_EVEN: Final = (
    "Give all replicas equally many batches: distribute_dataset cuts each batch for all of them, and "
    "distribute_datasets_from_function goes on with empty ones until the longest pipeline has ended."
)
_RETURNED: Final = "strategy.run's result("  # the comparison after the function of `run` has returned
_ADVICE_ON: Final = {  # by a part of the operation's name
    ".step(": "Under central storage call step() on all replicas together: each updates some variables for all.",
    ".scope(": "Enter strategy.scope() on all replicas: objects made in it become equal on all of them. Make objects "
    "that only one replica needs outside.",
    ".build(": "Call a model that creates parameters in strategy.run on all replicas, also with an empty slice: its "
    "parameters are made equal on all of them.",
    "running statistics(": "Run a BatchNorm in training mode on all replicas, or call eval() on its model first.",
    _RETURNED: "Return early from the function on all replicas, or only after its last collective.",
}
_AHEAD: Final = RING - 64
_REFUSED: Final = bytes(KEY_NBYTES)  # the key of a collective whose arguments were refused after it was posted
# These combine no data of the replicas, and programs take turns by barriers.
_EMPTY: Final = ("barrier(", "monitored_barrier(", "new_group(")
# The parts of the key that two calls of equal collectives can share, as ranges of bytes: the signature, and the line,
# the lines that led there, the line's text, or the texts of the lines that led there.
_PLACES: Final = tuple((slice(0, 8), slice(begin, begin + 8)) for begin in (8, 16, 24, 32))


class Verifier:
    """The running comparison of this replica's collectives with the others'.

    Not thread-safe: its process group calls it under a lock.

    Args:
        log: The replicas' log.
        replicas: The replica id of each rank of the process group, for messages.
        calls: The counts of this replica's program.
        patience_s: The time to wait for an order to end after another replica has reported an error of its program.
            Then this replica raises a consequence of that error.

    Attributes:
        number: The number of this replica's newest collective.
    """

    def __init__(
        self,
        log: CollectiveLog,
        replicas: Sequence[int],
        calls: ProgramCalls | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self.number = 0
        self.program = 0
        self.log = log
        self._calls = calls or ProgramCalls()
        self._errors_posted = 0  # the number of errors that this replica's newest collective reports
        self._first_after_error = 0  # the number of the first collective that reports them
        self._patience_s = patience_s
        self._reported_since = 0.0  # the time at which another replica's error was first seen
        self._refused = 0  # the number of the latest collective whose arguments were refused here
        self._replicas = replicas
        self._peers = [rank for rank in range(log.size) if rank != log.me]
        self._compared = [0] * log.size
        self._known: set[bytes] = set()
        # Places that one of two replicas visited while the other was elsewhere: (peer, who, what, place) -> number.
        self._visits: dict[tuple[int, int, int, bytes], int] = {}
        self._warned: set[tuple[bytes, bytes]] = set()

    def post(self, record: CollectiveRecord) -> int:
        """Post a collective that this replica is about to enter under the next number, and compare it.

        Raises:
            CollectiveMismatchError: Another replica called something else.
            CollectiveError: Another replica reports an error that ends the program.
        """
        self.number = number = self.number + 1
        self._report_data_end(number)
        position = self._calls.position
        if position.errors != self._errors_posted:
            self._errors_posted, self._first_after_error = position.errors, number
            self._report_error()
        self.log.write(number, record, self.program, position)
        self.log.advance(number)
        for rank in self._peers:
            self._catch_up(rank, entering=number)
        return number

    def _report_data_end(self, number: int) -> None:
        """Report a loop over data that has ended since the collective before that number."""
        batches = activity.pop_data_end()
        if batches is not None:
            self.log.set_data_end(number - 1, batches)

    def check(self) -> None:
        """Compare the others' new posts, as far as they have arrived. Raises as `post`."""
        for rank in self._peers:
            trouble = self.log.trouble_of(rank)
            if trouble is not None and trouble.kind == "failed":
                self._reported_since = self._reported_since or time.monotonic()
                if time.monotonic() - self._reported_since < self._patience_s:
                    continue
            if trouble is not None:
                self._raise_reported(rank)
            if self._compared[rank] < self.number:
                self._catch_up(rank)

    def _raise_reported(self, rank: int) -> None:
        """Raise the error that another replica reports as the end of the program, if any."""
        trouble = self.log.trouble_of(rank)
        if trouble is not None and trouble.kind != "raised":
            raise (CollectiveMismatchError if trouble.kind == "mismatch" else CollectiveError)(trouble.text)

    # -- errors of the program -------------------------------------------------------------------------------------

    @property
    def pending_error(self) -> BaseException | None:
        """The program's latest error, until every replica has called an equal collective after it."""
        calls = self._calls
        if calls.error is None:
            return None
        met = calls.errors == self._errors_posted and all(
            self._compared[rank] >= self._first_after_error for rank in self._peers
        )
        return None if met else calls.error

    def error_left(self) -> tuple[BaseException, str] | None:
        """Return the error of this replica's program that left a collective undone in which others wait, if any.

        Returns:
            The error, and a description of the collective.
        """
        error = self.pending_error
        if error is None:
            return None
        mine, number = self._calls.position, self.number + 1
        for rank in self._peers:
            try:
                self._catch_up(rank)
                self._compare_again(self.number, rank)
                if self._refused == self.number and self._compared[rank] < self._refused:
                    self._raise_reported(rank)
            except CollectiveError as mismatch:
                if self.log.position(rank, min(self._compared[rank] + 1, self.number)).errors != mine.errors:
                    return error, str(mismatch)
            else:
                if self.log.last(rank) < number or self.is_void(number, rank):
                    continue
                other = self.log.position(rank, number)
                if other.errors != mine.errors and other.crossed < mine.crossed:
                    return error, f"{self._name(rank).capitalize()} waits in {self.describe(number, rank)}."
        return None

    def report_failure(self, error: BaseException, undone: str = "") -> None:
        """Report an error that ends the program to the other replicas, which raise it where they wait."""
        if undone:
            text = f"{self._error_text()} {undone}"
        elif isinstance(error, CollectiveError):
            text = str(error)
        else:
            return
        self.log.set_trouble(Trouble("mismatch" if isinstance(error, CollectiveMismatchError) else "failed", text))
        self.log.publish()

    def _report_error(self) -> None:
        """Report the program's latest error, or withdraw it once all replicas have met after it."""
        self.log.set_trouble(Trouble("raised", self._error_text()) if self.pending_error is not None else None)

    def _error_text(self) -> str:
        calls = self._calls
        return (
            f"{self._name(self.log.me).capitalize()} raised {type(calls.error).__name__} in {calls.place}, and so left "
            "a collective undone. Code that catches an error must catch it on all replicas, before their next "
            "collective."
        )

    def room(self) -> bool:
        """Return whether the next collective can be posted now.

        It must not overwrite a record that another replica has not compared yet. After a collective whose arguments
        were refused here, they must have been refused on the others, too.
        """
        oldest = max(self.number - _AHEAD, self._refused - 1)
        for rank in self._peers:
            if self._compared[rank] <= oldest or self.log.acknowledged(rank) <= oldest:
                return False
        return True

    def must_agree(self, record: CollectiveRecord) -> bool:
        """Return whether all replicas must have posted the same before this one enters.

        Without shared memory, where a difference is not seen at once, this is needed once for each call.
        """
        if self.log.shared or record.key in self._known:
            return False
        self._known.add(record.key)
        return True

    def agreed(self, number: int) -> bool:
        """Return whether all others have posted the same under that number, or their reports no longer arrive."""
        return self.log.lost or all(self._compared[rank] >= number for rank in self._peers)

    def absent(self, number: int) -> list[int]:
        """Return the replicas that have not yet called the collective of that number."""
        return [self._replicas[rank] for rank in self._peers if self.log.last(rank) < number]

    def describe(self, number: int, rank: int | None = None) -> str:
        """Describe the collective that this replica, or another one, called under that number."""
        posted = self.log.read(self.log.me if rank is None else rank, number)
        return f"{posted[0].operation} at {posted[0].place}" if posted else "a collective"

    def retract(self, number: int, error: BaseException) -> None:
        """Report that this replica does not enter the collective because its arguments were refused."""
        posted = self.log.read(self.log.me, number)
        if posted is not None:
            record, program = posted
            reason = f"{record.operation}, which failed with {type(error).__name__}"
            position = self.log.position(self.log.me, number)
            self.log.write(number, CollectiveRecord(_REFUSED, reason[:120], record.place), program, position)
            self._calls.fail(record.operation, error)
            self._refused = number
            self._compared = [min(compared, number - 1) for compared in self._compared]

    # -- the ends of calls of `run` ----------------------------------------------------------------------------------
    #
    # When a call has returned, the replicas may compare its results, which is no collective of the program's. If an
    # error leaves the call on a replica, that replica reports this and goes on; the others withdraw the comparison, if
    # they share memory, where they wait outside of Gloo:
    #
    #     replica 0                                 replica 1
    #     the call raises: reports failed call 1    the call returns: posts "strategy.run's result" as collective 7
    #     posts all_reduce as collective 7          sees that call 1 failed there: withdraws its collective 7
    #                                               posts all_reduce as collective 7

    def report_failed_call(self) -> None:
        """Report that an error leaves the current call of `run` on this replica."""
        self.log.set_failed_call(self.program, self._calls.position.crossed)

    def is_void(self, number: int, rank: int | None = None) -> bool:
        """Return whether a replica (this one by default) posted the results of a call that has raised elsewhere."""
        poster = self.log.me if rank is None else rank
        posted = self.log.read(poster, number)
        if posted is None or not posted[0].operation.startswith(_RETURNED):
            return False
        crossed = self.log.position(poster, number).crossed
        return any(self.log.has_failed_call(other, posted[1], crossed) for other in range(self.log.size))

    def absent_from(self, number: int) -> list[int]:
        """Return the ranks that have not posted the same under that number, as far as their posts have arrived.

        Raises:
            CollectiveError: One called something else.
        """
        for rank in self._peers:
            self._catch_up(rank)
        return [rank for rank in self._peers if self._compared[rank] < number]

    def contents(self, number: int) -> list[str]:
        """Return the content that each replica has posted under that number."""
        return [
            posted[0].content if posted else "" for posted in (self.log.read(r, number) for r in range(self.log.size))
        ]

    def withdraw(self, number: int) -> None:
        """Withdraw this replica's newest collective. The next one gets its number."""
        self.log.withdraw(number)
        self.number = number - 1
        self._compared = [min(compared, number - 1) for compared in self._compared]

    # -- programs --------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """Begin a program on this replica."""
        self.program = program
        self._errors_posted = self._first_after_error = self._refused = 0
        self._visits.clear()
        if self._peers:  # otherwise nobody reads the log
            self.log.set_trouble(None)
            self.log.set_phase(program, "running")

    def end(self, failed: bool) -> None:
        """End this replica's part of the program.

        Raises:
            CollectiveMismatchError: The program succeeded, but this replica's collectives differ from another
                replica's, or their number from that of a replica that has succeeded, too.
            CollectiveError: Another replica reports an error that ends the program.
        """
        self._report_data_end(self.number + 1)
        if not self._peers:
            return
        if not failed:
            if self._calls.error is None:
                self.log.set_trouble(None)
            else:
                self._report_error()
        self.log.set_phase(self.program, "failed" if failed else "ended")
        self.log.exchange()
        if not failed:
            self.check()
            self._compare_ends()

    def others_ended(self) -> bool:
        """Return whether no other replica is in this program any more."""
        return all(self.phase(rank) in ("ended", "failed") for rank in self._peers)

    def phase(self, rank: int) -> Phase:
        """Return a replica's phase in this replica's program: "idle" before it, and its end if it has begun a later
        one."""
        program, phase, _ = self.log.phase(rank)
        if program < self.program:
            return "idle"
        if program > self.program:
            return "failed" if self.log.has_failed(rank, self.program) else "ended"
        return phase

    def _compare_ends(self) -> None:
        me = self.log.me
        for rank in self._peers:
            program, phase, last = self.log.phase(rank)
            if self._compared[rank] < self.number:
                self._catch_up(rank)
            if program != self.program or phase != "ended" or last == self.number:
                continue
            present, missing, number = (rank, me, self.number + 1) if last > self.number else (me, rank, last + 1)
            self._raise_missing(present, missing, number)

    # -- replicas that will not come -----------------------------------------------------------------------------------

    def check_departed(self, number: int) -> list[int]:
        """Return the ranks whose program an error ended, so that they will not call this replica's collective.

        Raises:
            CollectiveMismatchError: A replica ended its program, or went on to the next, without calling it.
        """
        failed = []
        for rank in self._peers:
            self._compare_again(number, rank)
            program, _, last = self.log.phase(rank)
            phase = self.phase(rank)
            if phase != "failed" and self.is_void(number):
                continue
            if phase == "failed" and (last < number or self._is_of_later_program(rank, number)):
                failed.append(rank)
            elif phase == "ended" and last < number:
                # The collective may be the second one of an operation that consists of several.
                self._raise_missing(self.log.me, rank, last + 1 if program == self.program else number)
        return failed

    def _is_of_later_program(self, rank: int, number: int) -> bool:
        posted = self.log.read(rank, number)
        return posted is not None and posted[1] > self.program

    def check_coming(self, replicas: Sequence[int]) -> list[int]:
        """Return the ranks whose program an error ended, so that they will not connect to these replicas.

        Raises:
            CollectiveMismatchError: One of the replicas ended its program.
        """
        failed = []
        for rank in self._peers:
            if self._replicas[rank] not in replicas:
                continue
            if self.phase(rank) == "failed":
                failed.append(rank)
            elif self.phase(rank) == "ended":
                raise CollectiveMismatchError(
                    f"{self._name(self.log.me).capitalize()} waits to connect a process group of replicas "
                    f"{list(replicas)}, but {self._name(rank)} finished its program without using that group. {_ADVICE}"
                )
        return failed

    def count(self, *phases: str) -> int:
        """Return the number of other replicas in one of these phases of their program."""
        return sum(self.log.phase(rank)[1] in phases for rank in self._peers)

    # -- comparison ------------------------------------------------------------------------------------------------

    def _catch_up(self, rank: int, entering: int = 0) -> None:
        """Compare a replica's new posts, before this one enters a collective or later.

        Wrong arguments are refused on each replica after it has posted. So a replica whose arguments were refused
        waits, before its next collective, until the others' are refused there, too, or the others report a mismatch. A
        replica that enters a collective whose arguments were refused elsewhere first finds out whether its own are
        refused, before it reports a mismatch.
        """
        log = self.log
        number = self._compared[rank] + 1
        while number <= self.number:
            if not log.same(rank, number):
                other = log.read(rank, number)
                if other is None and log.last(rank) < number:
                    break  # not there yet
                mine = log.read(log.me, number)
                # If one is overwritten, the replica that came later has compared them.
                if mine is not None and other is not None:
                    if self._is_one_void(number, rank, other):
                        break
                    refused = mine[0].key == _REFUSED, other[0].key == _REFUSED
                    if refused == (True, False) or (number == entering and refused == (False, True)):
                        break
                    self._compare(number, mine, rank, other)
            self._compared[rank] = number
            number += 1

    def _compare_again(self, number: int, rank: int) -> None:
        """Compare a record that changed after it was compared, because its replica's arguments were refused."""
        if self._compared[rank] >= number and not self.log.same(rank, number):
            mine, other = self.log.read(self.log.me, number), self.log.read(rank, number)
            if mine is None or other is None or mine[0].signature == other[0].signature:
                return
            if not self._is_one_void(number, rank, other):
                self._compare(number, mine, rank, other)

    def _is_one_void(self, number: int, rank: int, other: tuple[CollectiveRecord, int]) -> bool:
        """Return whether this replica's post or another's, which was read before, will be or has been withdrawn."""
        return self.is_void(number) or self.is_void(number, rank) or self.log.read(rank, number) != other

    def _compare(
        self, number: int, mine: tuple[CollectiveRecord, int], rank: int, other: tuple[CollectiveRecord, int]
    ) -> None:
        late, later = (self.log.me, rank) if mine[1] < other[1] else (rank, self.log.me)
        if mine[1] != other[1] and self.log.has_failed(later, min(mine[1], other[1])):
            # The program of `late` is about to be ended. The other program was sent before the error was known.
            raise CollectiveError(
                f"{self._name(later).capitalize()} ended a program with an error, and went on to the next while "
                f"{self._name(late)} waits in {self.describe(number, late)}."
            )
        if mine[0].signature != other[0].signature:
            self._raise(number, rank, mine[0], other[0], "The replicas called different collectives")
        here, there = self.log.position(self.log.me, number), self.log.position(rank, number)
        if here.errors != there.errors and here.crossed != there.crossed and mine[1] == other[1]:
            self._raise(number, rank, mine[0], other[0], "An error took a replica to a later call")
        if mine[1] != other[1]:
            self._raise(number, rank, mine[0], other[0], "The replicas are in different cells, one of them late")
        if mine[0].key != other[0].key and not mine[0].operation.startswith(_EMPTY):
            self._compare_order(number, mine[0], rank, other[0])
            self._warn_of_texts(mine[0], rank, other[0])

    def _compare_order(self, number: int, mine: CollectiveRecord, rank: int, other: CollectiveRecord) -> None:
        """Compare the order of equal collectives that two replicas called at different places.

        That is correct if each place belongs to one of them (`if rank == 0: … else: …`). If both visit a place with
        different numbers, their orders differ, and sums combine different things. Lines with equal text count as one
        place, because each replica may have lines of its own.
        """
        me = self.log.me
        for what, (head, part) in enumerate(_PLACES):
            if mine.key[part] == other.key[part]:
                continue
            for record, here, there in ((mine, me, rank), (other, rank, me)):
                # `here` is at this place now. Was `there` at it before, while `here` was elsewhere?
                earlier = self._visits.get((rank, there, what, record.key[head] + record.key[part]))
                if earlier is not None:
                    self._raise_swapped(here, number, there, earlier, record)
            for record, who in ((mine, me), (other, rank)):
                self._visits.setdefault((rank, who, what, record.key[head] + record.key[part]), number)

    def _warn_of_texts(self, mine: CollectiveRecord, rank: int, other: CollectiveRecord) -> None:
        """Warn once if two lines with different texts called one collective."""
        if self.log.me != 0 or mine.line_text == other.line_text:
            return  # if any two replicas differ, one of them differs from replica 0
        if "root=" in mine.operation and not mine.operation.startswith(("reduce(", "distnb's reduce(")):
            return  # the root, or all replicas but the root, may have another argument
        lines = (mine.key[8:16], other.key[8:16])
        if lines not in self._warned:
            self._warned.add(lines)
            callsite.find(mine.key[8:]).warn(
                f"One collective, {mine.operation}, was called at {mine.place} on {self._name(0)} and at {other.place} "
                f"on {self._name(rank)}. If these are not parts of the same thing, the result is wrong: the replicas "
                "may call their collectives in different orders. If they are, say so by a single call that all "
                "replicas make, with the value chosen in a line before it."
            )

    # -- errors ----------------------------------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        return f"replica {self._replicas[rank]}"

    def _raise(self, number: int, rank: int, mine: CollectiveRecord, other: CollectiveRecord, what: str) -> NoReturn:
        both = sorted([(self.log.me, mine, rank), (rank, other, self.log.me)])
        ends = [self._data_end(one, another, number) for one, _, another in both]
        calls = "; ".join(
            f"{self._name(one)} {f'{end} {_did(record)}'.strip()}"
            for (one, record, _), end in zip(both, ends, strict=True)
        )
        advice = _EVEN if any(ends) else _advice(*(record.operation for _, record, _ in both))
        self._raise_reported(rank)
        errors = [self.log.position(each, number).errors for each in (self.log.me, rank)]
        cause = self._cause(rank) if errors[0] != errors[1] else ""
        raise CollectiveMismatchError(f"{cause}{what}: {calls} (collective number {number}). {advice}")

    def _cause(self, rank: int) -> str:
        """Return the error that another replica reports as the beginning of a message; "" if there is none."""
        trouble = self.log.trouble_of(rank) if rank != self.log.me else None
        return f"{trouble.text} " if trouble is not None and trouble.kind == "raised" else ""

    def _data_end(self, rank: int, other: int, number: int) -> str:
        """Return "has no more batches …" if a replica's loop over data ended and another's did not; otherwise ""."""
        batches = self.log.data_end_of(rank, number)
        if batches is None or batches == self.log.data_end_of(other, number):
            return ""
        return f"has no more batches (its data ended after {batches}), and"

    def _raise_swapped(self, here: int, number: int, there: int, earlier: int, record: CollectiveRecord) -> NoReturn:
        first, second = sorted([(self._replicas[here], number), (self._replicas[there], earlier)])
        raise CollectiveMismatchError(
            f"The replicas called their collectives in a different order: {record.operation} at {record.place} was "
            f"collective number {first[1]} on replica {first[0]} and number {second[1]} on replica {second[0]}, so "
            f"unlike things were put together. {_ADVICE}"
        )

    def _raise_missing(self, present: int, missing: int, number: int) -> NoReturn:
        if missing != self.log.me:
            self._raise_reported(missing)
        posted = self.log.read(present, number)
        what = _did(posted[0]) if posted else "called a collective"
        end = self._data_end(missing, present, number)
        who = f"{self._name(missing)} {end}".strip()
        raise CollectiveMismatchError(
            f"{self._cause(missing)}{self._name(present).capitalize()} {what} (collective number {number}), but {who} "
            f"finished its program after {number - 1} collectives without calling it. "
            f"{_EVEN if end else _advice(what)}"
        )


def _did(record: CollectiveRecord) -> str:
    """Describe a replica's collective."""
    if record.operation.startswith(_RETURNED):
        return f"has returned from the function of strategy.run at {record.place}"
    return f"called {record.operation} at {record.place}"


def _advice(*operations: str) -> str:
    """Return the cure for replicas that called these different operations."""
    return next((cure for part, cure in _ADVICE_ON.items() if any(part in each for each in operations)), _ADVICE)
