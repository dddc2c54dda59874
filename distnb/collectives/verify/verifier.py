"""Finds collectives that do not match, by comparing what each replica posted. Does no communication itself.

Every collective has a number, per process group and replica, beginning with 1. A replica posts its record before it
enters the collective, and then looks at the others' records of the same number. Of two replicas at least one thus sees
the other's record before it enters, so two that differ never meet inside Gloo, which would hang, end the process, or
give wrong sums. Whoever entered first compares later: at its next collective, or while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from distnb import activity
from distnb.collectives.verify import callsite
from distnb.collectives.verify.collective_log import (
    KEY_NBYTES,
    RING,
    CollectiveLog,
    CollectiveRecord,
    Departure,
    Position,
)
from distnb.collectives.verify.regions import PositionTracker, Regions
from distnb.errors import CollectiveError, CollectiveMismatchError

__all__ = ["Superseded", "Verifier"]

_ADVICE: Final = (
    "Every replica must call the same collectives, in the same order, with tensors of the same shape and dtype."
)
_EVEN: Final = (
    "Give all replicas equally many batches: distribute_dataset cuts each batch for all of them, and "
    "distribute_datasets_from_function goes on with empty ones until the longest pipeline has ended."
)
_RETURNED: Final = "strategy.run's result("  # what replicas compare when the function of `run` has returned
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
_MISMATCH: Final = "mismatch\0"  # begins a verdict that is one
# Nothing of the replicas is put together in these, and taking turns with barriers is a custom.
_EMPTY: Final = ("barrier(", "monitored_barrier(", "new_group(")
# What two calls of equal collectives can have in common, in bytes of their keys: the signature, and the line, the
# lines that led there, the line's text, or the texts of the lines that led there.
_PLACES: Final = tuple((slice(0, 8), slice(begin, begin + 8)) for begin in (8, 16, 24, 32))


class Superseded(Exception):
    """Others wait where this replica had an error, and go on in a new group: so does this one, which need not hear."""

    def __init__(self, error: CollectiveError) -> None:
        super().__init__(str(error))
        self.error = error


class Verifier:
    """The running comparison of this replica's collectives with the others'.

    Not thread-safe: its process group calls it under a lock.

    Args:
        log: Where the replicas post.
        replicas: The replica id of each rank of the process group, for messages.
        positions: Where this replica is in its program.
        breaks: How often the group was formed before in this generation, and broke.

    Attributes:
        number: Of this replica's newest collective.
        half_met: Whether a replica was missed because an error had left where the others met.
    """

    def __init__(
        self,
        log: CollectiveLog,
        replicas: Sequence[int],
        positions: PositionTracker | None = None,
        breaks: int = 0,
    ) -> None:
        self.number = 0
        self.program = 0
        self.half_met = False
        self.breaks = breaks
        self._positions = positions or PositionTracker(Regions())
        self._positions.log = log
        self._posted = Position()
        self._excused = False
        self.log = log
        self._replicas = replicas
        self._peers = [rank for rank in range(log.size) if rank != log.me]
        self._compared = [0] * log.size
        self._known: set[bytes] = set()
        # Places that one of two replicas visited while the other was elsewhere: (peer, who, what, place) -> number.
        self._visits: dict[tuple[int, int, int, bytes], int] = {}
        self._warned: set[tuple[bytes, bytes]] = set()

    def post(self, record: CollectiveRecord) -> int:
        """Number and post a collective that this replica is about to enter, and compare it.

        Raises:
            CollectiveMismatchError: Another replica called something else.
            CollectiveError: Another replica left this by an error.
            Superseded: This one left by an error where others wait.
        """
        self.number = number = self.number + 1
        log, positions = self.log, self._positions
        self._excused = positions.excused
        self._posted = position = positions.take()
        self._tell_of_data(number)
        if position.left:
            log.set_departure(Departure(number=number - 1, low=position.low, high=position.high, text=positions.text))
        log.write(number, record, self.program, position)
        log.advance(number)
        for rank in self._peers:
            self._catch_up(rank)
        return number

    def _tell_of_data(self, number: int) -> None:
        """Tell the others if a loop over data ended since the collective before that number."""
        batches = activity.pop_data_end()
        if batches is not None:
            self.log.set_data_end(number - 1, batches)

    def check(self) -> None:
        """Compare whatever others have posted since, as far as it is known here. Raises what it finds."""
        for rank in self._peers:
            self._catch_up(rank)
            if found := self.log.verdict_of(rank):
                differs = found.startswith(_MISMATCH)
                error = CollectiveMismatchError(found.removeprefix(_MISMATCH)) if differs else CollectiveError(found)
                if self._excused:
                    raise Superseded(error)
                self.half_met |= not differs
                raise error

    def tell(self, error: CollectiveError) -> None:
        """Tell the others what was found here; they raise it too, where they wait."""
        self.log.set_verdict(f"{_MISMATCH if isinstance(error, CollectiveMismatchError) else ''}{error}")
        self.log.publish()

    def entered(self) -> None:
        """The collective that was posted last has been agreed on, and begins: what others find from now on counts."""
        self._excused = False
        self._positions.regions.error = None
        if self._posted.left or (self.breaks and self.number == 1):
            self._positions.disturbed = self.breaks, self.number

    def begin_again(self) -> None:
        """What was posted last is posted again, in the group that takes this one's place."""
        self._positions.give_back(self._posted)

    def close(self) -> None:
        """The group leaves this log."""
        if self._positions.log is self.log:
            self._positions.log = None

    def room(self) -> bool:
        """Whether the next collective can be posted without overwriting what another replica has yet to compare."""
        oldest = self.number - _AHEAD
        for rank in self._peers:
            if self._compared[rank] <= oldest or self.log.acknowledged(rank) <= oldest:
                return False
        return True

    def must_agree(self, record: CollectiveRecord) -> bool:
        """Whether everyone must have told the same before this replica enters.

        That is so after an error, since others may wait somewhere else, and once for each call where memory is not
        shared.
        """
        new = not self.log.shared and record.key not in self._known
        if new:
            self._known.add(record.key)
        return new or self._positions.excused or (self.breaks > 0 and self.number == 0)

    def agreed(self, number: int) -> bool:
        """Whether all others posted that number, and the same; or there is no way to know any more."""
        return self.log.lost or all(self._compared[rank] >= number for rank in self._peers)

    def absent(self, number: int) -> list[int]:
        """The replicas that have not called the collective of that number yet."""
        return [self._replicas[rank] for rank in self._peers if self.log.last(rank) < number]

    def describe(self, number: int, rank: int | None = None) -> str:
        """What this replica, or another one, called under that number, for people."""
        posted = self.log.read(self.log.me if rank is None else rank, number)
        return f"{posted[0].operation} at {posted[0].place}" if posted else "a collective"

    def retract(self, number: int, error: BaseException) -> None:
        """Say that this replica did not enter the collective after all, since its arguments were refused."""
        posted = self.log.read(self.log.me, number)
        if posted is not None:
            record, program = posted
            reason = f"{record.operation}, which failed with {type(error).__name__}"
            position = self.log.position(self.log.me, number)
            self.log.write(number, CollectiveRecord(bytes(KEY_NBYTES), reason[:120], record.place), program, position)
            self._positions.refused = True

    # -- programs --------------------------------------------------------------------------------------------------

    def begin(self, program: int) -> None:
        """This replica began a program."""
        self.program = program
        self._visits.clear()
        self.log.set_phase(program, "running")

    def end(self, failed: bool, whole: bool = True) -> None:
        """This replica's part of the program ended; all call as many collectives if the group is still `whole`.

        Raises:
            CollectiveMismatchError: It ended well, but called something else than another replica, or another number of
                collectives than one that has ended well too.
        """
        self._tell_of_data(self.number + 1)
        self.log.set_phase(self.program, "failed" if failed else "ended")
        self.log.exchange()
        if failed or not whole:
            return
        verdicts = [found for rank in self._peers if (found := self.log.verdict_of(rank))]
        if verdicts:
            # An error that left a region was told where it was raised. A mismatch concerns who passed it, too.
            if verdicts[0].startswith(_MISMATCH) and not (self._excused or self._positions.excused):
                raise CollectiveMismatchError(verdicts[0].removeprefix(_MISMATCH))
            return
        try:
            self._compare_ends()
        except Superseded:
            pass  # the others know

    def _compare_ends(self) -> None:
        me = self.log.me
        for rank in self._peers:
            program, phase, last = self.log.phase(rank)
            self._catch_up(rank)
            if program != self.program or phase != "ended" or last == self.number:
                continue
            present, missing, number = (rank, me, self.number + 1) if last > self.number else (me, rank, last + 1)
            if not self._has_left(missing, present, number):
                self._raise_missing(present, missing, number)

    # -- who cannot come any more ------------------------------------------------------------------------------------

    def check_departed(self, number: int) -> list[int]:
        """The ranks whose error ended their program, so that they do not come to the collective this one waits in.

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
        """The ranks whose error ended their program, so that they do not help to connect a group of these replicas.

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
        """How many others are in one of these phases of their program."""
        return sum(self.log.phase(rank)[1] in phases for rank in self._peers)

    def left_undone(self) -> bool:
        """Return whether an error took this replica away from a collective in which another one waits."""
        number, me = self.number + 1, self.log.me
        return any(self.log.last(rank) >= number and self._has_left(me, rank, number) for rank in self._peers)

    def departed(self, number: int) -> str:
        """What to say of a replica that an error took away from where this one waits; "" if there is none.

        If nobody catches that error, the program's end will tell better.
        """
        for rank in self._peers:
            if self.log.last(rank) < number and self._has_left(rank, self.log.me, number):
                return self._left_text(rank, self.log.me, number)
        return ""

    def _has_left(self, rank: int, other: int, number: int) -> bool:
        """Whether an error on one replica left where another one called its collective of that number."""
        departure = self.log.departure_of(rank)
        there = self.log.position(other, number)
        return departure.number == self.log.last(rank) and Position(low=departure.low, high=departure.high).misses(
            there
        )

    def _left_text(self, rank: int, waiting: int, number: int) -> str:
        return (
            f"{self._name(rank).capitalize()} left {self.log.departure_of(rank).text}, and does not come to "
            f"{self.describe(number, waiting)} (collective number {number}), in which others wait. A program that "
            "catches errors catches them on all replicas: what is met next works."
        )

    # -- comparison ------------------------------------------------------------------------------------------------

    def _catch_up(self, rank: int) -> None:
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
                    self._compare(number, mine, rank, other)
            self._compared[rank] = number
            number += 1

    def _compare_again(self, number: int, rank: int) -> None:
        """A record can change after it was compared: when its replica's arguments were refused."""
        if self._compared[rank] >= number and not self.log.same(rank, number):
            mine, other = self.log.read(self.log.me, number), self.log.read(rank, number)
            if mine is not None and other is not None and mine[0].signature != other[0].signature:
                self._compare(number, mine, rank, other)

    def _compare_positions(self, number: int, rank: int) -> None:
        mine, other = self.log.position(self.log.me, number), self.log.position(rank, number)
        if not (mine.left or other.left):
            return
        if other.misses(mine):
            self.half_met = True
            raise CollectiveError(self._left_text(rank, self.log.me, number))
        if mine.misses(other):
            raise Superseded(CollectiveError(self._left_text(self.log.me, rank, number)))
        self._positions.disturbed = max((self.breaks, number), self._positions.disturbed)

    def _compare(
        self, number: int, mine: tuple[CollectiveRecord, int], rank: int, other: tuple[CollectiveRecord, int]
    ) -> None:
        self._compare_positions(number, rank)
        if mine[0].signature != other[0].signature:
            if self._excused and number < self.number:
                called = f"{self._name(self.log.me).capitalize()} called {self.describe(number)}"
                raise Superseded(CollectiveMismatchError(f"{called} (collective number {number}). {_ADVICE}"))
            self._raise(number, rank, mine[0], other[0], "The replicas called different collectives")
        if mine[1] != other[1]:
            self._raise(number, rank, mine[0], other[0], "The replicas are in different cells, one of them late")
        if mine[0].key != other[0].key and not mine[0].operation.startswith(_EMPTY):
            self._compare_order(number, mine[0], rank, other[0])
            self._warn_of_texts(mine[0], rank, other[0])

    def _compare_order(self, number: int, mine: CollectiveRecord, rank: int, other: CollectiveRecord) -> None:
        """Two replicas are at different places with equal collectives.

        That is fine if each place belongs to one of them (`if rank == 0: … else: …`). A place that both visit, but
        with different numbers, tells of an order that differs, and of sums over unlike things. Lines that say the same
        are one place: each replica may have lines of its own.
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
        """Say once, of two lines that say different things, that they were one collective."""
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
        told = "; ".join(
            f"{self._name(one)} {f'{end} {_did(record)}'.strip()}"
            for (one, record, _), end in zip(both, ends, strict=True)
        )
        advice = _EVEN if any(ends) else _advice(*(record.operation for _, record, _ in both))
        raise CollectiveMismatchError(f"{what}: {told} (collective number {number}). {advice}")

    def _data_end(self, rank: int, other: int, number: int) -> str:
        """Say that a replica has no more batches, if its loop over data ended and another one's did not."""
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
        posted = self.log.read(present, number)
        what = _did(posted[0]) if posted else "called a collective"
        end = self._data_end(missing, present, number)
        who = f"{self._name(missing)} {end}".strip()
        raise CollectiveMismatchError(
            f"{self._name(present).capitalize()} {what} (collective number {number}), but {who} "
            f"finished its program after {number - 1} collectives without calling it. "
            f"{_EVEN if end else _advice(what)}"
        )


def _did(record: CollectiveRecord) -> str:
    """What a replica did, for people."""
    if record.operation.startswith(_RETURNED):
        return f"has returned from the function of strategy.run at {record.place}"
    return f"called {record.operation} at {record.place}"


def _advice(*operations: str) -> str:
    """The cure, where replicas called these instead of one thing."""
    return next((cure for part, cure in _ADVICE_ON.items() if any(part in each for each in operations)), _ADVICE)
