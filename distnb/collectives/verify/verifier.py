"""The comparison of the replicas' collectives. It does no communication itself.

Every collective has a number, per process group and replica, beginning with 1. A replica posts its record before it
enters the collective, and then reads the others' records of the same number. Of two replicas at least one thus sees
the other's record before it enters, so two that differ never meet inside Gloo. There they would hang, end the process
or get wrong sums. The replica that entered first compares later: at its next collective, or while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NoReturn

from distnb import activity
from distnb.collectives.verify import callsite
from distnb.collectives.verify.collective_log import KEY_NBYTES, RING, CollectiveLog, CollectiveRecord, Trouble
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
_ADVICE_ON: Final = {  # by what the names of operations contain
    ".step(": "step() under central storage is taken by all replicas together: each has variables that it updates for "
    "all.",
    ".scope(": "What is made in strategy.scope() is made equal on all replicas, so all of them enter it; what only one "
    "needs is made outside.",
    ".build(": "Parameters that a model gets in strategy.run are made equal on all replicas, so all of them call it, "
    "with an empty slice as well.",
    _RETURNED: "A function that returns early does so on all replicas, or else after its last collective.",
}
_AHEAD: Final = RING - 64
_REFUSED: Final = bytes(KEY_NBYTES)  # the key of a collective that was posted, and whose arguments were refused then
# Nothing of the replicas is put together in these, and taking turns with barriers is a custom.
_EMPTY: Final = ("barrier(", "monitored_barrier(", "new_group(")
# What two calls of equal collectives can have in common, in bytes of their keys: the signature, and the line, the
# lines that led there, the line's text, or the texts of the lines that led there.
_PLACES: Final = tuple((slice(0, 8), slice(begin, begin + 8)) for begin in (8, 16, 24, 32))


class Verifier:
    """The running comparison of this replica's collectives with the others'.

    Not thread-safe: its process group calls it under a lock.

    Args:
        log: The log in which the replicas post.
        replicas: The replica id of each rank of the process group, for messages.
        calls: The counts of this replica's program.
        patience_s: The time to wait for an order to end, after another replica has reported an error of its program,
            before this one raises a consequence of it.

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
        self._reported_since = 0.0  # the time when another replica's error was first seen
        self._refused = 0  # the number of the latest collective whose arguments were refused here
        self._replicas = replicas
        self._peers = [rank for rank in range(log.size) if rank != log.me]
        self._compared = [0] * log.size
        self._known: set[bytes] = set()
        # Places that one of two replicas visited while the other was elsewhere: (peer, who, what, place) -> number.
        self._visits: dict[tuple[int, int, int, bytes], int] = {}
        self._warned: set[tuple[bytes, bytes]] = set()

    def post(self, record: CollectiveRecord) -> int:
        """Post a collective that this replica is about to enter, under the next number, and compare it.

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
        """Report if a loop over data ended since the collective before that number."""
        batches = activity.pop_data_end()
        if batches is not None:
            self.log.set_data_end(number - 1, batches)

    def check(self) -> None:
        """Compare what the others have posted since, as far as it is known here. Raises as `post`."""
        for rank in self._peers:
            trouble = self.log.trouble_of(rank)
            if trouble is not None and trouble.kind == "failed":
                self._reported_since = self._reported_since or time.monotonic()
                if time.monotonic() - self._reported_since < self._patience_s:
                    continue
            self._raise_reported(rank)
            self._catch_up(rank)

    def _raise_reported(self, rank: int) -> None:
        """Raise the error by which another replica says that the program ends, if it does."""
        trouble = self.log.trouble_of(rank)
        if trouble is not None and trouble.kind != "raised":
            raise (CollectiveMismatchError if trouble.kind == "mismatch" else CollectiveError)(trouble.text)

    # -- errors of the program -------------------------------------------------------------------------------------

    @property
    def pending_error(self) -> BaseException | None:
        """The program's latest error, if some replica has not called an equal collective since."""
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
            The error, and what it left undone, for people.
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
                if self.log.last(rank) < number:
                    continue
                other = self.log.position(rank, number)
                if other.errors != mine.errors and other.crossed < mine.crossed:
                    return error, f"{self._name(rank).capitalize()} waits in {self.describe(number, rank)}."
        return None

    def report_failure(self, error: BaseException, undone: str = "") -> None:
        """Report an error that ends the program to the others, which raise it where they wait."""
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

        It must not overwrite a record that another replica has yet to compare. After a collective whose arguments were
        refused, the others must have been refused there, too.
        """
        oldest = max(self.number - _AHEAD, self._refused - 1)
        for rank in self._peers:
            if self._compared[rank] <= oldest or self.log.acknowledged(rank) <= oldest:
                return False
        return True

    def must_agree(self, record: CollectiveRecord) -> bool:
        """Return whether all replicas must have posted the same before this one enters.

        That is so once for each call where memory is not shared: a difference is not seen at once there.
        """
        if self.log.shared or record.key in self._known:
            return False
        self._known.add(record.key)
        return True

    def agreed(self, number: int) -> bool:
        """Return whether all others posted the same under that number, or their reports no longer arrive."""
        return self.log.lost or all(self._compared[rank] >= number for rank in self._peers)

    def absent(self, number: int) -> list[int]:
        """Return the replicas that have not called the collective of that number yet."""
        return [self._replicas[rank] for rank in self._peers if self.log.last(rank) < number]

    def describe(self, number: int, rank: int | None = None) -> str:
        """Return what this replica, or another one, called under that number, for people."""
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

    # -- programs --------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """Begin a program on this replica."""
        self.program = program
        self._errors_posted = self._first_after_error = self._refused = 0
        self._visits.clear()
        self.log.set_trouble(None)
        self.log.set_phase(program, "running")

    def end(self, failed: bool) -> None:
        """End this replica's part of the program.

        Raises:
            CollectiveMismatchError: It ended well, but called something else than another replica, or another number of
                collectives than one that has ended well too.
            CollectiveError: Another replica reports an error that ends the program.
        """
        self._report_data_end(self.number + 1)
        if not failed:
            self._report_error()
        self.log.set_phase(self.program, "failed" if failed else "ended")
        self.log.exchange()
        if not failed:
            self.check()
            self._compare_ends()

    def others_ended(self) -> bool:
        """Return whether no other replica is in this program any more."""
        for rank in self._peers:
            program, phase, _ = self.log.phase(rank)
            if program < self.program or (program == self.program and phase == "running"):
                return False
        return True

    def _compare_ends(self) -> None:
        me = self.log.me
        for rank in self._peers:
            program, phase, last = self.log.phase(rank)
            self._catch_up(rank)
            if program != self.program or phase != "ended" or last == self.number:
                continue
            present, missing, number = (rank, me, self.number + 1) if last > self.number else (me, rank, last + 1)
            self._raise_missing(present, missing, number)

    # -- replicas that will not come -----------------------------------------------------------------------------------

    def check_departed(self, number: int) -> list[int]:
        """Return the ranks whose error ended their program, so that they do not come to this replica's collective.

        Raises:
            CollectiveMismatchError: A replica ended its program, or went on to the next, without calling it.
        """
        failed = []
        for rank in self._peers:
            self._compare_again(number, rank)
            program, phase, last = self.log.phase(rank)
            if last >= number:
                continue
            if program == self.program and phase == "failed":
                failed.append(rank)
            elif self._has_finished(program, phase):
                # What is waited in may be the second of what takes several.
                self._raise_missing(self.log.me, rank, last + 1 if program == self.program else number)
        return failed

    def _has_finished(self, program: int, phase: str) -> bool:
        return (program == self.program and phase == "ended") or program > self.program

    def check_coming(self, replicas: Sequence[int]) -> list[int]:
        """Return the ranks whose error ended their program, so that they do not help to connect these replicas.

        Raises:
            CollectiveMismatchError: One of the replicas ended its program.
        """
        failed = []
        for rank in self._peers:
            program, phase, _ = self.log.phase(rank)
            if self._replicas[rank] not in replicas:
                continue
            if program == self.program and phase == "failed":
                failed.append(rank)
            elif self._has_finished(program, phase):
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
        """Compare with what a replica has posted since, before this one enters a collective or later.

        Arguments that are wrong are refused on each replica after it has posted. So who was refused waits, before its
        next collective, until the others are refused there, too, or report a mismatch; and who enters a collective that
        another was refused in sees whether its own arguments are refused before it reports one.
        """
        log = self.log
        number = self._compared[rank] + 1
        while number <= self.number:
            if not log.same(rank, number):
                other = log.read(rank, number)
                if other is None and log.last(rank) < number:
                    break  # not there yet
                mine = log.read(log.me, number)
                # Where one is overwritten, the replica that came later has compared them.
                if mine is not None and other is not None:
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
            if mine is not None and other is not None and mine[0].signature != other[0].signature:
                self._compare(number, mine, rank, other)

    def _compare(
        self, number: int, mine: tuple[CollectiveRecord, int], rank: int, other: tuple[CollectiveRecord, int]
    ) -> None:
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

        That is fine if each place belongs to one of them (`if rank == 0: … else: …`). If both visit a place, but with
        different numbers, their orders differ, and the sums are over different things. Lines with equal text count as
        one place, because each replica may have lines of its own.
        """
        me = self.log.me
        for what, (head, part) in enumerate(_PLACES):
            if mine.key[part] == other.key[part]:
                continue
            for record, here, there in ((mine, me, rank), (other, rank, me)):
                # `here` is at this place now; has `there` been at it before, while `here` was elsewhere?
                earlier = self._visits.get((rank, there, what, record.key[head] + record.key[part]))
                if earlier is not None:
                    self._raise_swapped(here, number, there, earlier, record)
            for record, who in ((mine, me), (other, rank)):
                self._visits.setdefault((rank, who, what, record.key[head] + record.key[part]), number)

    def _warn_of_texts(self, mine: CollectiveRecord, rank: int, other: CollectiveRecord) -> None:
        """Warn once if two lines with different texts were one collective."""
        if self.log.me != 0 or mine.line_text == other.line_text:
            return  # of any two replicas that differ, one differs from replica 0
        if "root=" in mine.operation and not mine.operation.startswith(("reduce(", "group.reduce(")):
            return  # the root, or all but it, may well have another argument
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
        """Return the error that another replica reports, as the first sentences of a message; "" if it reports none."""
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
    """Return what a replica did, for people."""
    if record.operation.startswith(_RETURNED):
        return f"has returned from the function of strategy.run at {record.place}"
    return f"called {record.operation} at {record.place}"


def _advice(*operations: str) -> str:
    """Return the cure for replicas that called these operations instead of one."""
    return next((cure for part, cure in _ADVICE_ON.items() if any(part in each for each in operations)), _ADVICE)
